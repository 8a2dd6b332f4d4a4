"""``/v1/realtime`` with OpenAI's own client, unmodified, against the running service."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from models.scripted import encode_words
from tests.support.server import PAUSE, Server, serving, wait_for

RATE_HZ = 24_000
TWO = ("alpha", "bravo", *PAUSE, "charlie", *PAUSE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """With a key, little room and little patience."""
    with serving(api_keys="secret", max_sessions=1, idle_timeout_s=1.0) as running:
        yield running


def pcm(*words: str | None) -> bytes:
    """24 kHz linear16: a held level survives any resampling."""
    samples = encode_words(words)
    return samples[np.arange(samples.size * RATE_HZ // 16_000) * 16_000 // RATE_HZ].tobytes()


def alaw(*words: str | None) -> bytes:
    """8 kHz A-law: G.711's table searched for the nearest value."""
    codes = np.arange(256)
    flipped = codes ^ 0x55
    exponent, mantissa = (flipped >> 4) & 7, flipped & 15
    levels = np.where(exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 264) << np.maximum(exponent - 1, 0))
    levels = np.where(flipped & 0x80, levels, -levels)
    samples = encode_words(words)[::2].astype(np.int32)
    return bytes(codes[np.abs(samples[:, None] - levels[None, :]).argmin(axis=1)].astype(np.uint8))


def api(server: Server, key: str = "any") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url("/v1"), api_key=key, max_retries=0)


@contextlib.asynccontextmanager
async def talking(server: Server, key: str = "any") -> AsyncIterator[AsyncRealtimeConnection]:
    options: Any = {"proxy": None}
    query = {"intent": "transcription"}
    async with (
        api(server, key) as client,
        client.realtime.connect(extra_query=query, websocket_connection_options=options) as connection,
    ):
        yield connection


async def say(connection: AsyncRealtimeConnection, audio: bytes, size: int = 4_801) -> None:
    """In pieces that respect neither samples nor words."""
    for start in range(0, len(audio), size):
        piece = base64.b64encode(audio[start : start + size]).decode()
        await connection.input_audio_buffer.append(audio=piece)


async def until(connection: AsyncRealtimeConnection, kind: str, count: int = 1) -> list[RealtimeServerEvent]:
    """The events up to the ``count``-th of this kind."""
    events: list[RealtimeServerEvent] = []
    while count:
        events.append(await connection.recv())
        count -= events[-1].type.endswith(kind)
    return events


def of_type(events: Sequence[RealtimeServerEvent], kind: str) -> list[Any]:
    return [event for event in events if event.type.endswith(kind)]


async def configure(connection: AsyncRealtimeConnection, **sound: Any) -> None:
    await connection.session.update(session={"type": "transcription", "audio": {"input": sound}})


async def test_turns_that_the_service_finds(server: Server) -> None:
    async with talking(server) as connection:
        created = await connection.recv()
        assert created.type == "session.created"
        assert created.session.type == "transcription"
        turns = {"type": "server_vad", "threshold": 0.6, "prefix_padding_ms": 100, "silence_duration_ms": 350}
        await configure(connection, transcription={"model": "whisper-1", "language": "en"}, turn_detection=turns)
        await say(connection, pcm(*TWO))
        events = await until(connection, ".completed", 2)
    texts = [event.transcript for event in of_type(events, ".completed")]
    assert texts == ["alpha bravo", "charlie"]
    for name in (".speech_started", ".speech_stopped", ".committed", "item.added", "item.done"):
        assert len(of_type(events, name)) == 2, name
    for done in of_type(events, ".completed"):
        assert "".join(e.delta for e in of_type(events, ".delta") if e.item_id == done.item_id) == done.transcript
    first, second = of_type(events, ".speech_started")
    assert (first.audio_start_ms, second.audio_start_ms) == (0, pytest.approx(900, abs=64))
    assert of_type(events, ".speech_stopped")[0].audio_end_ms == pytest.approx(550, abs=64)
    committed = [event.item_id for event in of_type(events, ".committed")]
    assert committed == [first.item_id, second.item_id]
    assert of_type(events, "error") == []


async def test_turns_that_the_client_ends(server: Server) -> None:
    """However the service cuts what is said between two commits, it is one item, and the empty one is answered too."""
    async with talking(server) as connection:
        await configure(connection, turn_detection=None)
        await connection.input_audio_buffer.commit()
        await say(connection, pcm("alpha", *PAUSE, "bravo", *PAUSE, "charlie", "delta"))
        await connection.input_audio_buffer.commit()
        await say(connection, pcm(*["echo"] * 3, None))
        await connection.input_audio_buffer.clear()
        await say(connection, pcm(*["foxtrot"] * 3, None))
        await connection.input_audio_buffer.commit()
        events = await until(connection, ".completed", 3)
    assert [event.transcript for event in of_type(events, ".completed")] == [
        "",
        "alpha bravo charlie delta",
        "foxtrot foxtrot foxtrot",
    ]
    usage = [event.usage.seconds for event in of_type(events, ".completed")]
    assert usage == [0.0, pytest.approx(2.0), pytest.approx(0.4)]
    assert len(of_type(events, ".cleared")) == 1
    assert of_type(events, ".speech_started") == []


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
async def test_telephone_audio(server: Server, kind: Literal["audio/pcmu", "audio/pcma"]) -> None:
    async with talking(server) as connection:
        await configure(connection, format={"type": kind})
        audio = alaw(*TWO) if kind == "audio/pcma" else mulaw(*TWO)
        await say(connection, audio, 160)
        events = await until(connection, ".completed", 2)
    assert [event.transcript for event in of_type(events, ".completed")] == ["alpha bravo", "charlie"]


def mulaw(*words: str | None) -> bytes:
    linear = np.minimum(encode_words(words)[::2].astype(np.int32), 32_635) + 132
    exponent = np.floor(np.log2(linear)).astype(np.int32) - 7
    mantissa = (linear >> (exponent + 3)) & 0x0F
    return bytes((~(exponent << 4 | mantissa) & 0xFF | 0x80).astype(np.uint8))


async def test_a_new_format_while_the_socket_is_open(server: Server) -> None:
    """As where a socket is taken from a pool: what came before is answered, and item ids and clock go on."""
    async with talking(server) as connection:
        await say(connection, pcm("alpha", "bravo"))
        await configure(connection, format={"type": "audio/pcma"})
        await say(connection, alaw(*TWO[:1], *PAUSE))
        events = await until(connection, ".completed", 2)
    assert [event.transcript for event in of_type(events, ".completed")] == ["alpha bravo", "alpha"]
    assert of_type(events, ".speech_started")[1].audio_start_ms <= 200
    assert of_type(events, ".speech_stopped")[1].audio_end_ms > 700
    assert len({event.item_id for event in of_type(events, ".committed")}) == 2


async def test_a_mistake_is_told_with_its_event_and_the_session_goes_on(server: Server) -> None:
    async with talking(server) as connection:
        await connection.send({"type": "response.create", "event_id": "mine"})
        [error] = of_type(await until(connection, "error"), "error")
        assert (error.error.event_id, error.error.code) == ("mine", "invalid_value")
        await say(connection, pcm(*TWO))
        events = await until(connection, ".completed")
    assert of_type(events, ".completed")[0].transcript == "alpha bravo"


async def test_logprobs_where_they_are_asked_for(server: Server) -> None:
    async with talking(server) as connection:
        await connection.session.update(
            session={"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}
        )
        await say(connection, pcm(*TWO))
        [done] = of_type(await until(connection, ".completed"), ".completed")
    assert [token.token for token in done.logprobs] == ["alpha", " bravo"]
    assert done.logprobs[0].logprob == pytest.approx(np.log(0.9), abs=1e-3)


# --- who may come in, and how it ends --------------------------------------------------------------------------------


async def close_of(connection: ClientConnection) -> tuple[list[str], int | None]:
    """What it is told until the service closes: types, or the codes of errors."""
    said = []
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            event = json.loads(message)
            said.append(event["error"]["code"] if event["type"] == "error" else event["type"])
    return said, connection.close_code


def knocking(server: Server, **options: Any) -> Any:
    return connect(f"ws://127.0.0.1:{server.port}/v1/realtime?intent=transcription", proxy=None, **options)


async def test_a_key_may_come_as_a_subprotocol(locked: Server) -> None:
    async with knocking(locked, subprotocols=["realtime", "openai-insecure-api-key.secret"]) as connection:
        assert connection.subprotocol == "realtime"
        assert json.loads(await connection.recv())["type"] == "session.created"
        async with knocking(locked, additional_headers={"Authorization": "Bearer secret"}) as second:
            assert await close_of(second) == ([], CloseCode.TRY_AGAIN_LATER)
        assert await close_of(connection) == ([], CloseCode.GOING_AWAY)  # it says nothing
    async with knocking(locked) as keyless:
        assert await close_of(keyless) == (["unauthorized"], 4401)
    wait_for(lambda: locked.metric("hark_sessions_open") == 0)


async def test_a_client_secret_brings_its_settings(locked: Server) -> None:
    with OpenAI(base_url=locked.url("/v1"), api_key="secret", max_retries=0) as client:
        made = client.realtime.client_secrets.create(
            expires_after={"anchor": "created_at", "seconds": 60},
            session={"type": "transcription", "audio": {"input": {"transcription": {"language": "de"}}}},
        )
    assert made.value.startswith("ek_")
    assert made.session.type == "transcription"
    async with talking(locked, made.value) as connection:
        created: Any = await connection.recv()
        assert created.session.audio.input.transcription.language == "de"
    wait_for(lambda: locked.metric("hark_sessions_open") == 0)


def test_who_may_make_client_secrets_and_of_what(locked: Server) -> None:
    url, secret = locked.url("/v1/realtime/client_secrets"), {"Authorization": "Bearer secret"}
    assert httpx.post(url).status_code == 401
    made = httpx.post(url, headers=secret).json()
    assert made["session"]["type"] == "transcription"
    assert httpx.post(url, headers={"Authorization": f"Bearer {made['value']}"}).status_code == 403
    for body in (
        {"session": {"type": "realtime"}},
        {"session": 5},
        {"session": {"audio": {"input": {"transcription": {"prompt": "x" * 4_000}}}}},
        {"expires_after": {"seconds": 9}},
        {"expires_after": {"anchor": "now"}},
    ):
        refused = httpx.post(url, headers=secret, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value"), body


async def test_a_restart_lets_what_was_said_out_first() -> None:
    with serving() as ending:
        async with knocking(ending) as connection:
            audio = base64.b64encode(pcm(*["alpha"] * 5)).decode()
            await connection.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            while json.loads(await connection.recv())["type"] != "input_audio_buffer.speech_started":
                pass
            ending.signal()
            said, code = await close_of(connection)
            assert said[-1] == "conversation.item.input_audio_transcription.completed"
            assert code == CloseCode.SERVICE_RESTART
        ending.wait_exit()
