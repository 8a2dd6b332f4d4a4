"""Plays tracks to a service at the pace of speech, over its public WebSocket, and notes when every event comes.

While audio plays the client only sleeps, sends slices of bytes that were cut before, and stores what arrives. How
late it was itself is part of what it returns: a client that cannot keep time measures nothing.
"""

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import websockets

from bench.measures import Received
from bench.tracks import Track
from streaming.audio import SAMPLE_RATE

_BYTES_PER_S = SAMPLE_RATE * 2
_LEAD_S = 0.2  # from the last handshake to the first sample


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
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for track in tracks:
            connection = await stack.enter_async_context(_connected(url, parameters))
            played = Played(await _ready(connection))
            data = track.audio.tobytes()
            streams.append(_Stream(connection, [data[i : i + size] for i in range(0, len(data), size)], played))
        gc.collect()
        gc.disable()
        try:
            start_s = time.monotonic() + _LEAD_S
            await asyncio.gather(*(_run(stream, start_s, patience_s) for stream in streams))
        finally:
            gc.enable()
    return [stream.played for stream in streams]


@contextlib.asynccontextmanager
async def _connected(url: str, parameters: Mapping[str, str]) -> AsyncIterator[websockets.ClientConnection]:
    address = f"{url}?{urlencode(parameters)}" if parameters else url
    try:
        connection = await websockets.connect(address, compression=None, max_size=2**22, proxy=None)
    except (OSError, websockets.WebSocketException) as error:
        raise PlayFailed(f"cannot connect to {url}: {error}") from None
    try:
        yield connection
    finally:
        await connection.close()


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
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + duration_s + _LEAD_S + patience_s):
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
    """Each message leaves when its last sample has been spoken, as from a microphone."""
    played, spoken_bytes, free_s = stream.played, 0, start_s
    for message in stream.messages:
        spoken_bytes += len(message)
        due_s = start_s + spoken_bytes / _BYTES_PER_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        awake_s = time.monotonic()
        played.late_s.append(awake_s - max(due_s, free_s))
        await stream.connection.send(message)
        free_s = time.monotonic()
        played.blocked_s = max(played.blocked_s, free_s - awake_s)
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
