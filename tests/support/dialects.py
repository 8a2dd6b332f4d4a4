"""One client for each dialect that has live text, so that a test can hold the same speech against all of them."""

import asyncio
import base64
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlencode

import numpy as np
from websockets.asyncio.client import connect

from streaming.types import Pcm16
from tests.support.server import EOF, Server, listen, pieces
from tests.support.telephony import (
    CONNECTED,
    TWILIO_STOP,
    exchange,
    follow,
    mulaw,
    of_type,
    send_all,
    twilio_call,
    twilio_start,
)


@dataclass(frozen=True)
class Heard:
    """What a client was told: settled texts in order, and texts on the way to them."""

    finals: list[str]
    guesses: list[str]


async def at_once() -> None:
    pass


class Client(Protocol):
    """Sends int16 speech, shape (n,), 16 kHz, in the dialect's own encoding and rate.

    ``size``: of its messages in bytes, where the dialect leaves that to the client. ``begin`` is awaited once it is
    connected, before it speaks.
    """

    __name__: str

    async def __call__(
        self,
        server: Server,
        audio: Pcm16,
        *,
        finals: int,
        size: int = 2_560,
        begin: Callable[[], Awaitable[object]] = at_once,
    ) -> Heard: ...


async def native(
    server: Server,
    audio: Pcm16,
    *,
    finals: int,
    size: int = 2_560,
    begin: Callable[[], Awaitable[object]] = at_once,
) -> Heard:
    async with connect(server.stream_url(partial_interval_ms=100), proxy=None, max_size=None) as connection:
        await begin()
        listening = asyncio.create_task(listen(connection))
        await send_all(connection, pieces(audio.tobytes(), size))
        await connection.send(EOF)
        heard = await listening
    return Heard(heard.texts, [event["committed"] + event["tentative"] for event in heard.of_type("partial")])


async def realtime(
    server: Server,
    audio: Pcm16,
    *,
    finals: int,
    size: int = 2_560,
    begin: Callable[[], Awaitable[object]] = at_once,
) -> Heard:
    """Leaves when it has as many texts as it waits for: the protocol has no end."""
    kind = "conversation.item.input_audio_transcription."
    deltas: dict[str, str] = {}
    heard = Heard([], [])
    at_24_khz = audio[np.arange(audio.size * 3 // 2) * 2 // 3].tobytes()  # a level that is held survives this
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?intent=transcription"
    async with connect(url, proxy=None) as connection:
        await begin()
        sending = asyncio.create_task(send_all(connection, _appends(at_24_khz, size)))
        while len(heard.finals) < finals:
            event = json.loads(await connection.recv())
            if event["type"] == kind + "delta":
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
                heard.guesses.append(deltas[event["item_id"]])
            elif event["type"] == kind + "completed":
                heard.finals.append(event["transcript"])
        await sending
    return heard


def _appends(audio: bytes, size: int) -> Iterator[str]:
    for piece in pieces(audio, size):
        yield json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()})


async def deepgram(
    server: Server,
    audio: Pcm16,
    *,
    finals: int,
    size: int = 2_560,
    begin: Callable[[], Awaitable[object]] = at_once,
) -> Heard:
    query = urlencode({"encoding": "linear16", "sample_rate": 16_000, "interim_results": "true"})
    async with connect(f"ws://127.0.0.1:{server.port}/v1/listen?{query}", proxy=None) as connection:
        await begin()
        listening = asyncio.create_task(listen(connection))
        await send_all(connection, pieces(audio.tobytes(), size))
        await connection.send('{"type":"CloseStream"}')
        results = (await listening).of_type("Results")
    said = [(result["is_final"], result["channel"]["alternatives"][0]["transcript"]) for result in results]
    return Heard([text for final, text in said if final and text], [text for final, text in said if not final])


async def twilio(
    server: Server,
    audio: Pcm16,
    *,
    finals: int,
    size: int = 2_560,
    begin: Callable[[], Awaitable[object]] = at_once,
) -> Heard:
    """Follows the call meanwhile, as an application does."""
    call_id = f"CA{uuid.uuid4().hex}"
    async with exchange(server, "/twilio") as connection:
        following = asyncio.create_task(follow(server, call_id, wait_s=30))
        await send_all(connection, [CONNECTED, twilio_start("inbound", call_id=call_id)])
        await begin()
        await send_all(connection, [*twilio_call({"inbound": mulaw(audio[::2])}), TWILIO_STOP])
        events = await following
    partials = [event["committed"] + event["tentative"] for event in of_type(events, "partial")]
    return Heard([event["text"] for event in of_type(events, "final")], partials)


DIALECTS: tuple[Client, ...] = (native, realtime, deepgram, twilio)
