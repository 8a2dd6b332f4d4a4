"""The one client for all servers: plays tracks at the pace of speech and notes what the screen says, and when.

While audio plays it only sleeps, sends messages that were encoded before, and keeps what arrives; how late it was
itself is part of what it returns.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import websockets

from bench.peers.wire import Refused, Wire
from bench.player import LEAD_S, PlayFailed, connected, send_paced, undisturbed
from bench.snapshots import Snapshot
from bench.tracks import Track
from streaming.audio import SAMPLE_RATE

_READY_TIMEOUT_S = 120.0  # a server may load its model for its first client
_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Played:
    """What happened to one stream; times as in bench.snapshots, ``late_s`` and ``blocked_s`` as in bench.player.

    ``ended_s``: when the server was done, or had been quiet for long enough; None if it never was, and ``error`` why.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    blocked_s: float = 0.0
    ended_s: float | None = None
    error: str = ""


@dataclass(slots=True)
class _Stream:
    connection: websockets.ClientConnection
    wire: Wire
    messages: list[bytes]
    due_s: list[float]
    played: Played = field(default_factory=Played)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


async def play(
    url: str, wire: Callable[[], Wire], tracks: Sequence[Track], *, message_ms: int, patience_s: float
) -> list[Played]:
    """All tracks at once, one stream each. A stream that is not done ``patience_s`` after its track is given up.

    Raises PlayFailed.
    """
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for track in tracks:
            codec = wire()
            connection = await stack.enter_async_context(
                connected(url, max_size=2**24, close_timeout_s=_CLOSE_TIMEOUT_S)
            )
            await _greet(connection, codec)
            streams.append(_stream(connection, codec, track, message_ms))
        with undisturbed():
            start_s = time.monotonic() + LEAD_S
            await asyncio.gather(*(_run(stream, start_s, patience_s) for stream in streams))
    return [stream.played for stream in streams]


def _stream(connection: websockets.ClientConnection, wire: Wire, track: Track, message_ms: int) -> _Stream:
    size = SAMPLE_RATE * message_ms // 1_000
    ends = [min(track.audio.size, begin + size) for begin in range(0, track.audio.size, size)]
    messages = [wire.audio(track.audio[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return _Stream(connection, wire, messages, [end / SAMPLE_RATE for end in ends])


async def _greet(connection: websockets.ClientConnection, wire: Wire) -> None:
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            if wire.hello is not None:
                await connection.send(wire.hello)
            while not wire.is_ready(json.loads(await connection.recv())):
                pass
    except TimeoutError:
        raise PlayFailed(f"the server was not ready for a stream within {_READY_TIMEOUT_S:.0f} s") from None
    except (Refused, websockets.ConnectionClosed) as error:
        raise PlayFailed(f"the server refused a stream: {error}") from None


async def _run(stream: _Stream, start_s: float, patience_s: float) -> None:
    played = stream.played
    sender = asyncio.create_task(_send(stream, start_s))
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + LEAD_S + stream.due_s[-1] + patience_s):
            await _receive(stream, start_s)
            await sender
    except TimeoutError:
        played.error = f"not done {patience_s:.0f} s after the end of its track"
    except websockets.ConnectionClosed as closed:
        played.error = f"the connection was closed: {closed}"
    except Refused as refused:
        played.error = str(refused)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(stream: _Stream, start_s: float) -> None:
    await send_paced(stream.connection, zip(stream.messages, stream.due_s, strict=True), start_s, stream.played)
    if stream.wire.quiet_s is None:
        await stream.connection.send(stream.wire.farewell)
    stream.sent.set()


async def _receive(stream: _Stream, start_s: float) -> None:
    """Until the server is done, or quiet for as long as its wire says. Raises Refused and ConnectionClosed."""
    wire, played = stream.wire, stream.played
    while True:
        message = await _next(stream)
        at_s = time.monotonic() - start_s
        if message is None:
            await stream.connection.send(wire.farewell)
            played.ended_s = at_s
            return
        event = json.loads(message)
        screen = wire.screen(event)
        if screen is not None:
            played.snapshots.append(Snapshot(at_s, screen.settled, screen.shown))
        if wire.is_done(event):
            played.ended_s = at_s
            return


async def _next(stream: _Stream) -> str | bytes | None:
    """The next message; None where the server was quiet long enough after the last audio."""
    quiet_s = stream.wire.quiet_s
    if quiet_s is None:
        return await stream.connection.recv()
    while True:
        try:
            # A wait that begins before the last audio was sent proves nothing: then another one begins.
            was_sent = stream.sent.is_set()
            return await asyncio.wait_for(stream.connection.recv(), quiet_s)
        except TimeoutError:
            if was_sent:
                return None
