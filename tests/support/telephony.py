"""Telephone exchanges for tests: what Twilio, Telnyx, Asterisk and Genesys send, and a follower of their calls."""

import base64
import contextlib
import json
import struct
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from models.scripted import encode_words
from streaming.types import Pcm16
from tests.support.server import Server

RATE_HZ = 8_000
FRAME_MS = 20
FRAME = RATE_HZ * FRAME_MS // 1000
CALL_ID = "CA0000000000000000000000000000000a"
STREAM_ID = "MZ0000000000000000000000000000000a"
CONVERSATION_ID = "090eaa2f-72fa-480a-83e0-8667ff89c0ec"
SESSION_ID = "e160e428-53e2-487c-977d-96989bf5c99d"
Event = dict[str, Any]


def speech(*words: str | None) -> Pcm16:
    """8 kHz audio that the scripted engine reads as these words of 100 ms each; None is silence."""
    return encode_words(words)[::2]


def mulaw(pcm: Pcm16) -> bytes:
    """G.711 mu-law, from ITU-T G.711: sign, exponent and mantissa of the sample with a bias of 132, all inverted."""
    magnitude = np.minimum(np.abs(pcm.astype(np.int32)), 32_635) + 132
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = (magnitude >> (exponent + 3)) & 0x0F
    sign = np.where(pcm < 0, 0x80, 0)
    return bytes((~(sign | (exponent << 4) | mantissa) & 0xFF).astype(np.uint8))


def alaw(pcm: Pcm16) -> bytes:
    """G.711 A-law, likewise: 13 bits, the even bits of the result inverted."""
    magnitude = np.minimum(np.abs(pcm.astype(np.int32)), 32_767) >> 3
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 4, 0)
    mantissa = np.where(exponent > 0, magnitude >> exponent, magnitude >> 1) & 0x0F
    segment = np.where(magnitude >= 32, exponent, 0)
    sign = np.where(pcm < 0, 0, 0x80)
    return bytes(((sign | (segment << 4) | mantissa) ^ 0x55).astype(np.uint8))


def frames(data: bytes, size: int = FRAME) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# --- Twilio and Telnyx -----------------------------------------------------------------------------------------------

CONNECTED = '{"event":"connected","protocol":"Call","version":"1.0.0"}'


def twilio_start(*tracks: str, call_id: str = CALL_ID, **parameters: str) -> str:
    start = {
        "accountSid": "AC0000000000000000000000000000000a",
        "streamSid": STREAM_ID,
        "callSid": call_id,
        "tracks": list(tracks),
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
        "customParameters": parameters,
    }
    return json.dumps({"event": "start", "sequenceNumber": "1", "start": start, "streamSid": STREAM_ID})


def twilio_media(track: str, number: int, at_ms: int, payload: bytes) -> str:
    encoded = base64.b64encode(payload).decode()
    media = {"track": track, "chunk": str(number), "timestamp": str(at_ms), "payload": encoded}
    return json.dumps({"event": "media", "sequenceNumber": str(number + 1), "media": media, "streamSid": STREAM_ID})


def twilio_call(tracks: dict[str, bytes], start_ms: int = 0) -> list[str]:
    """The media messages of tracks of mu-law, side by side as they happen."""
    pieces = [
        (start_ms + index * FRAME_MS, track, index + 1, piece)
        for track, data in tracks.items()
        for index, piece in enumerate(frames(data))
    ]
    return [twilio_media(track, number, at_ms, piece) for at_ms, track, number, piece in sorted(pieces)]


def twilio_key(digit: str) -> str:
    key = {"track": "inbound_track", "digit": digit}
    return json.dumps({"event": "dtmf", "streamSid": STREAM_ID, "sequenceNumber": "5", "dtmf": key})


TWILIO_STOP = json.dumps({"event": "stop", "sequenceNumber": "9", "streamSid": STREAM_ID, "stop": {"callSid": CALL_ID}})


def telnyx_start(encoding: str = "PCMU", rate_hz: int = RATE_HZ, call_id: str = "v2:call", **parameters: str) -> str:
    start = {
        "user_id": "3e6f995f-85f7-4705-9741-53b116d28237",
        "call_control_id": call_id,
        "call_session_id": "ff55a038-6f5d-11ef-9692-02420aeffb1f",
        "from": "+13122010094",
        "to": "+13122123456",
        "client_state": "aGF2ZSBhIG5pY2UgZGF5ID1d",
        "custom_parameters": parameters,
        "media_format": {"encoding": encoding, "sample_rate": rate_hz, "channels": 1},
    }
    return json.dumps({"event": "start", "sequence_number": "1", "stream_id": "32de0dea", "start": start})


def telnyx_media(number: int, payload: bytes, track: str = "inbound", frame_ms: int = FRAME_MS) -> str:
    encoded = base64.b64encode(payload).decode()
    media = {"track": track, "chunk": str(number), "timestamp": str((number - 1) * frame_ms), "payload": encoded}
    return json.dumps({"event": "media", "sequence_number": str(number + 1), "stream_id": "32de0dea", "media": media})


TELNYX_STOP = '{"event":"stop","sequence_number":"99","stream_id":"32de0dea","stop":{"call_control_id":"v2:call"}}'


# --- AudioSocket -----------------------------------------------------------------------------------------------------


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BH", kind, len(payload)) + payload


def asterisk_call(call_id: uuid.UUID, audio: bytes, kind: int = 0x10, size: int = 320) -> list[bytes]:
    return [frame(0x01, call_id.bytes), *(frame(kind, piece) for piece in frames(audio, size))]


# --- AudioHook -------------------------------------------------------------------------------------------------------


@dataclass
class Genesys:
    """The exchange's side of a session: numbers its messages as the protocol wants it."""

    seq: int = 0
    server_seq: int = 0
    position_s: float = 0.0
    heard: list[Event] = field(default_factory=list)

    def message(self, kind: str, **parameters: Any) -> str:
        self.seq += 1
        return json.dumps(
            {
                "version": "2",
                "type": kind,
                "id": SESSION_ID,
                "seq": self.seq,
                "serverseq": self.server_seq,
                "position": f"PT{self.position_s:.3f}S",
                "parameters": parameters,
            }
        )

    def open(self, *channels: str, **parameters: Any) -> str:
        offers = [list(channels), *([name] for name in channels)] if len(channels) > 1 else [list(channels)]
        media = [{"type": "audio", "format": "PCMU", "channels": offer, "rate": 8000} for offer in offers]
        participant = {
            "id": CONVERSATION_ID,
            "ani": "+1-555-555-1234",
            "aniName": "John Doe",
            "dnis": "+1-800-555-6789",
        }
        given = {"organizationId": SESSION_ID, "conversationId": CONVERSATION_ID, "participant": participant}
        return self.message("open", **given, media=media, **parameters)

    def take(self, text: str | bytes) -> Event:
        """Checks the numbers of a message of the service."""
        event: Event = json.loads(text)
        assert (event["version"], event["id"]) == ("2", SESSION_ID)
        assert event["seq"] == self.server_seq + 1
        assert 0 <= event["clientseq"] <= self.seq
        self.server_seq = event["seq"]
        self.heard.append(event)
        return event


# --- who follows -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def exchange(server: Server, path: str, **headers: str) -> AsyncIterator[ClientConnection]:
    address = f"ws://127.0.0.1:{server.port}{path}"
    async with connect(address, proxy=None, additional_headers=headers) as connection:
        yield connection


async def send_all(connection: ClientConnection, messages: Iterable[str | bytes]) -> None:
    for message in messages:
        await connection.send(message)


async def closed(connection: ClientConnection) -> tuple[int | None, list[str | bytes]]:
    """The close code, and what was sent before."""
    heard: list[str | bytes] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            heard.append(await connection.recv())
    return connection.close_code, heard


async def follow(server: Server, call_id: str, *, wait_s: float = 5, until: str = "", **headers: str) -> list[Event]:
    """A call's events to its end, or to the first of the type ``until``."""
    events: list[Event] = []
    url = server.url(f"/v1/calls/{call_id}/events?wait_s={wait_s}")
    async with httpx.AsyncClient(timeout=20) as client, client.stream("GET", url, headers=headers) as answer:
        if answer.status_code != 200:
            return [{"type": "refused", "status": answer.status_code, **json.loads(await answer.aread())["error"]}]
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["type"] == until:
                    break
    return events


def of_type(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def texts(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Who said what, in the order of the finals."""
    return [(event["label"], event["text"]) for event in of_type(events, "final")]
