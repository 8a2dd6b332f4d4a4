"""Plays tracks to a service at the pace of speech, over its public WebSocket, and notes when every event comes.

While audio plays the client only sleeps, sends slices of bytes that were cut before, and stores what arrives. How
late it was itself is part of what it returns: a client that cannot keep time measures nothing.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode

import websockets

from bench.measures import Received
from bench.tracks import Track
from streaming.audio import SAMPLE_RATE

_BYTES_PER_S = SAMPLE_RATE * 2
_CLOSE_TIMEOUT_S = 10.0  # websockets' own
LEAD_S = 0.2  # from the last handshake to the first sample


class PlayFailed(Exception):
    """The service could not be reached or refused a stream."""


@dataclass(slots=True)
class Played:
    """What happened to one stream. Times as in bench.measures.

    ``late_s``: for each message, how much later than its last sample it was ready to go, through the client's own
    fault; ``blocked_s``: the longest that the service kept a message waiting. ``ended_s``: when the service said
    ``done``, None if it never did; ``error`` says why.
    """

    config: Mapping[str, Any]
    received: list[Received] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    blocked_s: float = 0.0
    ended_s: float | None = None
    error: str = ""


@dataclass(slots=True)
class _Stream:
    connection: websockets.ClientConnection
    messages: list[bytes]
    played: Played


async def play(
    url: str, tracks: Sequence[Track], *, parameters: Mapping[str, str], message_ms: int, patience_s: float
) -> list[Played]:
    """All tracks at once, one stream each. A stream that is not done ``patience_s`` after its track is given up.

    Raises PlayFailed.
    """
    size = _BYTES_PER_S * message_ms // 1_000
    query = f"?{urlencode(parameters)}" if parameters else ""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for track in tracks:
            connection = await stack.enter_async_context(connected(url, query))
            played = Played(await _ready(connection))
            data = track.audio.tobytes()
            streams.append(_Stream(connection, [data[i : i + size] for i in range(0, len(data), size)], played))
        with undisturbed():
            start_s = time.monotonic() + LEAD_S
            await asyncio.gather(*(_run(stream, start_s, patience_s) for stream in streams))
    return [stream.played for stream in streams]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's collector, whose pauses would be taken for the service's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.asynccontextmanager
async def connected(
    url: str, query: str = "", *, max_size: int = 2**22, close_timeout_s: float = _CLOSE_TIMEOUT_S
) -> AsyncIterator[websockets.ClientConnection]:
    """Raises PlayFailed where there is no connection."""
    try:
        connection = await websockets.connect(
            url + query, compression=None, max_size=max_size, proxy=None, close_timeout=close_timeout_s
        )
    except (OSError, websockets.WebSocketException) as error:
        raise PlayFailed(f"cannot connect to {url}: {error}") from None
    try:
        yield connection
    finally:
        await connection.close()


class Paced(Protocol):
    """What is noted of the sending; see ``Played``."""

    late_s: list[float]
    blocked_s: float


async def send_paced(
    connection: websockets.ClientConnection, messages: Iterable[tuple[bytes, float]], start_s: float, noted: Paced
) -> None:
    """Each message leaves when its last sample has been spoken, as from a microphone.

    With each message comes when that is, in seconds since ``start_s``.
    """
    free_s = start_s
    for message, spoken_s in messages:
        due_s = start_s + spoken_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        awake_s = time.monotonic()
        noted.late_s.append(awake_s - max(due_s, free_s))
        await connection.send(message)
        free_s = time.monotonic()
        noted.blocked_s = max(noted.blocked_s, free_s - awake_s)


async def _ready(connection: websockets.ClientConnection) -> Mapping[str, Any]:
    try:
        first: dict[str, Any] = json.loads(await connection.recv())
    except websockets.ConnectionClosed as closed:
        raise PlayFailed(f"the service closed the connection: {closed}") from None
    if first["type"] != "ready":
        raise PlayFailed(f"the service refused the stream: {first.get('message', first)}")
    return first


async def _run(stream: _Stream, start_s: float, patience_s: float) -> None:
    played = stream.played
    duration_s = sum(map(len, stream.messages)) / _BYTES_PER_S
    sender = asyncio.create_task(_send(stream, start_s))
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + duration_s + LEAD_S + patience_s):
            await _receive(stream, start_s)
            if not played.error:
                await sender
    except TimeoutError:
        played.error = f"not done {patience_s:.0f} s after the end of its track"
    except websockets.ConnectionClosed as closed:
        played.error = f"the connection was closed: {closed}"
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(stream: _Stream, start_s: float) -> None:
    ends = (sent_bytes / _BYTES_PER_S for sent_bytes in itertools.accumulate(map(len, stream.messages)))
    await send_paced(stream.connection, zip(stream.messages, ends, strict=True), start_s, stream.played)
    await stream.connection.send('{"type":"eof"}')


async def _receive(stream: _Stream, start_s: float) -> None:
    played = stream.played
    async for message in stream.connection:
        at_s = time.monotonic() - start_s
        received = Received(at_s, json.loads(message))
        played.received.append(received)
        if received.kind == "done":
            played.ended_s = at_s
            return
        if received.kind == "error" and received.event["fatal"]:
            played.error = str(received.event["message"])
            return
    played.error = "the service closed the connection before it was done"
