"""Deepgram's protocol on the running service: its own unmodified SDK, and what that does not show."""

import asyncio
import contextlib
import importlib.util
import io
import json
import threading
import wave
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.wire.deepgram import IDLE_REASON
from models.scripted import encode_words
from tests.support.server import PAUSE, Server, pieces, say, serving
from tests.unit.test_stream_media import contained

FINALIZE, CLOSE, KEEPALIVE = '{"type":"Finalize"}', '{"type":"CloseStream"}', '{"type":"KeepAlive"}'
PLAIN = {"model": "nova-3", "encoding": "linear16", "sample_rate": 16_000}
TOKEN = {"Authorization": "Token first"}

needs_sdk = pytest.mark.skipif(importlib.util.find_spec("deepgram") is None, reason="deepgram-sdk is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(api_keys="first, second", allowed_origins="https://app.example") as running:
        yield running


def url_of(server: Server, **query: object) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/listen?{urlencode(PLAIN | query, doseq=True)}"


def live(server: Server, headers: dict[str, str] | None = None, **query: object) -> connect:
    return connect(url_of(server, **query), additional_headers=headers or TOKEN, proxy=None)


async def read(connection: ClientConnection) -> list[dict[str, Any]]:
    """Every message until the service closes."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            found.append(json.loads(await connection.recv()))
    return found


def transcripts(messages: list[dict[str, Any]]) -> list[str]:
    finals = [message for message in messages if message["type"] == "Results" and message["is_final"]]
    return [final["channel"]["alternatives"][0]["transcript"] for final in finals]


def recording(*words: str | None) -> bytes:
    """A WAV file that says these words. The sign changes from sample to sample: a file's constant level is removed."""
    pcm = encode_words(words) * np.resize(np.array([1, -1], np.int16), len(words) * 1_600)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(pcm.tobytes())
    return out.getvalue()


# --- Deepgram's SDK --------------------------------------------------------------------------------------------------


def sdk(server: Server, key: str = "first") -> Any:
    from deepgram import DeepgramClient
    from deepgram.environment import DeepgramClientEnvironment

    http, ws = server.url(""), f"ws://127.0.0.1:{server.port}"
    return DeepgramClient(
        api_key=key, environment=DeepgramClientEnvironment(base=http, production=ws, agent=ws, agent_rest=http)
    )


@needs_sdk
def test_the_sdk_streams(server: Server) -> None:
    from deepgram.core.events import EventType
    from deepgram.listen.v1.types import ListenV1Configure

    messages: list[Any] = []
    finalized, closed = threading.Event(), threading.Event()

    def on_message(message: Any) -> None:
        messages.append(message)
        if message.type == "Results" and message.from_finalize:
            finalized.set()

    query = {**PLAIN, "interim_results": True, "vad_events": True, "utterance_end_ms": 1000, "keyterm": ["Hark", "Mia"]}
    with sdk(server).listen.v1.connect(**query) as connection:
        connection.on(EventType.MESSAGE, on_message)
        connection.on(EventType.CLOSE, lambda _: closed.set())
        threading.Thread(target=connection.start_listening, daemon=True).start()
        connection.send_keep_alive()
        connection.send_configure(ListenV1Configure(keyterms=["Hark"]))
        for piece in pieces(say("alpha", "bravo", *[None] * 20, "charlie", "delta")):
            connection.send_media(piece)
        connection.send_finalize()
        assert finalized.wait(10)
        connection.send_close_stream()
        assert closed.wait(10)

    assert {type(message).__name__ for message in messages} == {
        "ListenV1Results", "ListenV1SpeechStarted", "ListenV1UtteranceEnd", "ListenV1Metadata",
        "ListenV1ConfigureSuccess",
    }  # fmt: skip
    finals = [message for message in messages if message.type == "Results" and message.is_final]
    said = [final.channel.alternatives[0] for final in finals]
    assert [text for alternative in said if (text := alternative.transcript)] == ["alpha bravo", "charlie delta"]
    assert sum(bool(final.from_finalize) for final in finals) == 1
    assert [(word.word, word.punctuated_word, word.confidence) for word in said[0].words] == [
        ("alpha", "alpha", 0.9),
        ("bravo", "bravo", 0.9),
    ]
    assert messages[-1].duration == 2.4
    assert {final.metadata.request_id for final in finals} == {messages[-1].request_id}


@needs_sdk
def test_the_sdk_transcribes_a_recording(server: Server) -> None:
    audio = recording("alpha", "bravo", *[None] * 12, "charlie", *PAUSE)
    response = sdk(server).listen.v1.media.transcribe_file(
        request=audio, model="nova-3", utterances=True, paragraphs=True, detect_language=True
    )
    (channel,) = response.results.channels
    assert channel.alternatives[0].transcript == "alpha bravo charlie"
    assert [word.word for word in channel.alternatives[0].words] == ["alpha", "bravo", "charlie"]
    assert channel.alternatives[0].confidence == pytest.approx(0.9)
    assert channel.detected_language == "en"
    assert [utterance.transcript for utterance in response.results.utterances] == ["alpha bravo", "charlie"]
    paragraphs = channel.alternatives[0].paragraphs
    assert [paragraph.sentences[0].text for paragraph in paragraphs.paragraphs] == ["alpha bravo", "charlie"]
    assert response.metadata.duration == pytest.approx(2.3)
    assert response.metadata.channels == 1


@needs_sdk
def test_the_sdk_is_told_what_is_wrong(server: Server) -> None:
    from deepgram.core.api_error import ApiError

    with pytest.raises(ApiError) as caught:
        sdk(server).listen.v1.media.transcribe_url(url="http://127.0.0.1/secret", model="nova-3")
    assert (caught.value.status_code, caught.value.body["code"]) == (400, "bad_message")
    # Which of the two depends on the version of websockets.
    with pytest.raises((ApiError, InvalidStatus), match="401"), sdk(server, "wrong").listen.v1.connect(**PLAIN):
        pass


# --- what the SDK does not show --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "subprotocols", "query"),
    [
        ({"Authorization": "Token first"}, None, {}),
        ({"Authorization": "token second"}, None, {}),
        ({"Authorization": "Bearer first"}, None, {}),
        ({}, ["token", "first"], {}),
        ({"Origin": "https://app.example"}, ["bearer", "second"], {}),
        ({}, None, {"key": "first"}),
    ],
)
async def test_a_key_comes_in_many_places(
    server: Server, headers: dict[str, str], subprotocols: list[Any] | None, query: dict[str, str]
) -> None:
    url = url_of(server, **query)
    async with connect(url, additional_headers=headers, subprotocols=subprotocols, proxy=None) as connection:
        assert connection.subprotocol == (subprotocols[0] if subprotocols else None)
        await connection.send(CLOSE)
        messages = await read(connection)
    assert [message["type"] for message in messages] == ["Metadata"]
    assert connection.response is not None
    assert connection.response.headers["dg-request-id"] == messages[0]["request_id"]
    assert connection.close_code == 1000


@pytest.mark.parametrize(
    ("headers", "query", "status", "name"),
    [
        ({"Authorization": "Token wrong"}, {}, 401, "INVALID_AUTH"),
        (TOKEN | {"Origin": "https://evil.example"}, {}, 403, "INSUFFICIENT_PERMISSIONS"),
        (TOKEN, {"encoding": "g729"}, 400, "Bad Request"),
        (TOKEN, {"language": "xx"}, 400, "Bad Request"),
        (TOKEN, {"redact": ["pci", "numbers"]}, 400, "Bad Request"),
    ],
)
async def test_what_is_wrong_is_said_before_the_handshake(
    server: Server, headers: dict[str, str], query: dict[str, Any], status: int, name: str
) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with live(server, headers, **query):
            pass
    response = caught.value.response
    body = json.loads(response.body or b"")
    assert (response.status_code, body["err_code"]) == (status, name)
    assert response.headers["dg-error"] == body["err_msg"]
    assert response.headers["dg-request-id"] == body["request_id"]


async def test_a_full_service_says_come_again() -> None:
    with serving(max_sessions=1) as server:
        async with live(server) as first:
            with pytest.raises(InvalidStatus) as caught:
                async with live(server):
                    pass
            assert caught.value.response.status_code == 503
            assert int(caught.value.response.headers["Retry-After"]) > 0
            await first.send(CLOSE)
            await read(first)
        async with live(server) as second:  # the place is free again
            await second.send(CLOSE)
            assert len(await read(second)) == 1


async def test_finalize_gives_the_speech_so_far_and_is_answered_once(server: Server) -> None:
    async with live(server) as connection:
        await connection.send(FINALIZE)
        assert json.loads(await connection.recv())["from_finalize"]
        await connection.send(say("alpha", "bravo"))
        await connection.send(FINALIZE)
        messages = [json.loads(await connection.recv())]
        while not messages[-1]["from_finalize"]:
            messages.append(json.loads(await connection.recv()))
        assert [text for text in transcripts(messages) if text] == ["alpha bravo"]
        await connection.send(CLOSE)
        assert [message["type"] for message in await read(connection)] == ["Metadata"]


async def test_two_parties_are_heard_on_their_own_channels(server: Server) -> None:
    left, right = encode_words(["alpha", "bravo", *PAUSE]), encode_words([None, "charlie", "delta", *PAUSE[1:]])
    stereo = np.stack([left, right], axis=1).tobytes()
    async with live(server, channels=2, multichannel="true") as connection:
        await connection.send(stereo)
        await connection.send(CLOSE)
        messages = await read(connection)
    said = {
        tuple(message["channel_index"]): message["channel"]["alternatives"][0]["transcript"]
        for message in messages
        if message["type"] == "Results"
    }
    assert said == {(0, 2): "alpha bravo", (1, 2): "charlie delta"}


@pytest.mark.parametrize(("form", "query"), [("webm", ""), ("ogg", "?encoding=ogg-opus")])
async def test_a_stream_in_a_container_is_heard_live(server: Server, form: str, query: str) -> None:
    data = contained(form, "libopus", ["alpha", "bravo", "charlie", *PAUSE, "golf", "hotel", None, None])
    url = f"ws://127.0.0.1:{server.port}/v1/listen{query}"
    async with connect(url, additional_headers=TOKEN, proxy=None) as connection:
        for piece in pieces(data, 1_000):
            await connection.send(piece)
        await connection.send(FINALIZE)
        await connection.send(CLOSE)
        messages = await read(connection)
    assert [text for text in transcripts(messages) if text] == ["alpha bravo charlie", "golf hotel"]
    assert sum(message["type"] == "Results" and message["from_finalize"] for message in messages) == 1
    assert connection.close_code == 1000


async def test_audio_after_the_end_is_passed_over(server: Server) -> None:
    """As from a browser whose recorder gives its last piece after the stream has been ended."""
    data = contained("webm", "libopus", ["alpha", "bravo", *PAUSE])
    async with connect(f"ws://127.0.0.1:{server.port}/v1/listen", additional_headers=TOKEN, proxy=None) as connection:
        for message in (data, CLOSE, data[-200:]):
            await connection.send(message)
        messages = await read(connection)
    assert transcripts(messages) == ["alpha bravo"]
    assert messages[-1]["type"] == "Metadata"
    assert connection.close_code == 1000


async def test_a_stream_that_cannot_be_heard_ends_with_the_reason(server: Server) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/listen", additional_headers=TOKEN, proxy=None) as connection:
        await connection.send(b"no audio " * 10_000)
        messages = await read(connection)
    assert [(message["type"], message["variant"]) for message in messages] == [("Error", "unsupported_media")]
    assert connection.close_code == 1008


async def test_a_wav_stream_needs_no_parameters(server: Server) -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(say("alpha", "bravo", *PAUSE))
    async with connect(f"ws://127.0.0.1:{server.port}/v1/listen", additional_headers=TOKEN, proxy=None) as connection:
        for piece in pieces(out.getvalue(), 1_000):
            await connection.send(piece)
        await connection.send(CLOSE)
        assert transcripts(await read(connection)) == ["alpha bravo"]


async def test_a_service_that_stops_sends_what_is_due() -> None:
    with serving() as server:
        async with live(server, vad_events="true") as connection:
            await connection.send(say("alpha", "bravo"))
            assert json.loads(await connection.recv())["type"] == "SpeechStarted"
            server.signal()
            messages = await read(connection)
        assert transcripts(messages) == ["alpha bravo"]
        assert messages[-1]["type"] == "Metadata"
        assert connection.close_code == 1012
        server.wait_exit()


@pytest.mark.slow
async def test_who_is_silent_for_ten_seconds_is_told_so_in_deepgrams_words(server: Server) -> None:
    async with live(server) as quiet, live(server) as muted:
        keeping = asyncio.create_task(_keep_alive(muted))
        assert await read(quiet) == []
        assert (quiet.close_code, quiet.close_reason) == (1011, IDLE_REASON)
        keeping.cancel()
        await muted.send(say("alpha", *PAUSE))
        await muted.send(CLOSE)
        assert transcripts(await read(muted)) == ["alpha"]


async def _keep_alive(connection: ClientConnection) -> None:
    while True:
        await connection.send(KEEPALIVE)
        await asyncio.sleep(4)


# --- recordings ------------------------------------------------------------------------------------------------------


def post(server: Server, content: bytes, headers: dict[str, str] | None = None, **query: object) -> httpx.Response:
    return httpx.post(
        server.url(f"/v1/listen?{urlencode(query)}"), content=content, headers=TOKEN | (headers or {}), timeout=30
    )


@pytest.mark.parametrize(("encoding", "rate"), [("linear16", 16_000), ("", 0)])
def test_a_recording_has_a_head_or_a_declared_encoding(server: Server, encoding: str, rate: int) -> None:
    audio = recording("alpha", *[None] * 12, "bravo", *PAUSE)
    query = {"encoding": encoding, "sample_rate": rate, "punctuate": "false"} if encoding else {}
    response = post(server, audio[44:] if encoding else audio, {"Content-Type": "audio/*"}, **query)
    body = response.json()
    assert response.status_code == 200, body
    assert body["results"]["channels"][0]["alternatives"][0]["transcript"] == "alpha bravo"
    assert "utterances" not in body["results"]
    assert "detected_language" not in body["results"]["channels"][0]
    assert body["metadata"]["request_id"] == response.headers["dg-request-id"]


@pytest.mark.parametrize(
    ("content", "headers", "query", "status", "code"),
    [
        (b"", {}, {}, 400, "empty_file"),
        (b"", {}, {"encoding": "mulaw"}, 400, "empty_file"),
        (b"not audio" * 100, {}, {}, 400, "unsupported_media"),
        (b'{"url":"http://127.0.0.1"}', {"Content-Type": "application/json; charset=utf-8"}, {}, 400, "bad_message"),
        (b"x", {}, {"multichannel": "true"}, 400, "bad_parameter"),
        (b"x", {}, {"callback": "http://example.org"}, 400, "bad_parameter"),
        (b"x", {}, {"language": "xx"}, 400, "unknown_language"),
        (b"x", {"Authorization": "Token wrong"}, {}, 401, "unauthorized"),
    ],
)
def test_what_is_wrong_with_a_recording_is_said(
    server: Server, content: bytes, headers: dict[str, str], query: dict[str, str], status: int, code: str
) -> None:
    response = post(server, content, headers, **query)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.json()["err_msg"]


def test_a_recording_may_be_too_long() -> None:
    with serving(max_upload_bytes=2_000) as server:
        assert post(server, bytes(2_001)).json()["code"] == "upload_too_large"
        assert post(server, recording("alpha")[:2_000]).status_code == 200
