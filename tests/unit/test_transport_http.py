"""The file endpoints on a real server and the real decoder, with a recognizer that answers from a script."""

import asyncio
import contextlib
import io
import json
import socket
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import uvicorn
from fastapi import FastAPI, Request

from app.access import Access, AccessConfig, Grant, TooManyRequests
from app.admission import Admission
from app.errors import install_error_handlers, surface
from app.media import MediaLimits
from app.recordings import FileService
from app.transports import http
from app.transports.http import routes
from streaming.audio import SAMPLE_RATE
from streaming.config import SessionConfig
from streaming.errors import BadAudio, BadMessage, ClientError, Overloaded, RecognizerFailed, SttError
from streaming.events import FinalTranscript, TranscriptFailed
from streaming.types import DecodeOptions, Task, Word
from tests.unit.test_media import tone

MAX_UPLOAD = 300_000
Result = FinalTranscript | TranscriptFailed


def final(text: str, start_s: float = 0.0, end_s: float = 1.0) -> FinalTranscript:
    a, b = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
    return FinalTranscript(1, 0, text, (Word(f" {text}", a, b, 0.9),) if text else (), "en", 0.9, 0.9, a, b)


def failed(start_s: float = 1.0, end_s: float = 2.0) -> TranscriptFailed:
    span = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
    return TranscriptFailed(2, 0, *span, RecognizerFailed("the engine gave no answer"))


@dataclass
class ScriptedTranscriber:
    """Takes the audio, then answers with ``results``. ``hold``: never answers; ``began`` and ``gave_up`` tell."""

    results: list[Result] = field(default_factory=lambda: [final("Hello.")])
    error: Exception | None = None
    fails_once: Exception | None = None
    hold: bool = False
    seconds: float = 0.0
    options: DecodeOptions | None = None
    config: SessionConfig | None = None
    between: asyncio.Event | None = None  # waited for before the last of ``results``
    began: asyncio.Event = field(default_factory=asyncio.Event)
    gave_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def transcribe(
        self,
        pcm_chunks: AsyncIterator[bytes],
        options: DecodeOptions,
        progress: Callable[[Result], None],
        adjust: Callable[[SessionConfig], SessionConfig],
    ) -> list[Result]:
        if self.fails_once is not None:
            error, self.fails_once = self.fails_once, None
            raise error
        self.options = options
        self.config = adjust(SessionConfig())
        async for chunk in pcm_chunks:
            self.seconds += len(chunk) / 2 / SAMPLE_RATE
            if self.hold:
                self.began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.gave_up.set()
        for result in self.results[:-1]:
            progress(result)
        if self.between is not None:
            self.began.set()
            try:
                await self.between.wait()
            except asyncio.CancelledError:
                self.gave_up.set()
                raise
        if self.error is not None:
            raise self.error
        progress(self.results[-1])
        return self.results


@dataclass
class Running:
    transcriber: ScriptedTranscriber
    files: Admission
    client: httpx.AsyncClient
    port: int

    async def post(self, path: str = "/v1/audio/transcriptions", **data: object) -> httpx.Response:
        upload = ("a.wav", wav_bytes(), "audio/wav")
        return await self.client.post(path, files={"file": upload}, data=data)


def wav_bytes(seconds: float = 2.0) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(tone(seconds).tobytes())
    return out.getvalue()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    transcriber, files = ScriptedTranscriber(), Admission(2, "file slots")
    access = Access(AccessConfig())

    @contextlib.contextmanager
    def admit(request: Request) -> Iterator[Grant]:
        with files.slot(), access.recording(request) as grant:
            yield grant

    app = FastAPI()
    install_error_handlers(app)
    service = FileService(
        transcriber, admit, lambda: ["hub/whisper-base"], MediaLimits(max_duration_s=60.0), MAX_UPLOAD
    )
    app.include_router(routes(service))

    @app.get("/v1/bug")
    async def bug() -> None:
        raise ZeroDivisionError

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield Running(transcriber, files, client, port)
    server.should_exit = True
    await serving
    listener.close()
    assert files.open == 0, "every slot is given back"


def assert_error(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


class TestAnswers:
    @pytest.mark.parametrize("prefix", ["/v1", "/api/v1"])
    async def test_json(self, running: Running, prefix: str) -> None:
        response = await running.post(f"{prefix}/audio/transcriptions", model="whisper-1", language="en")
        assert response.json() == {
            "text": "Hello.",
            "usage": {"type": "duration", "seconds": 2},
            "languages": [{"code": "en"}],
        }
        assert running.transcriber.seconds == pytest.approx(2.0)
        assert running.transcriber.options == DecodeOptions(language="en")

    async def test_bare_bodies(self, running: Running) -> None:
        text = await running.post(response_format="text")
        assert (text.text, text.headers["content-type"]) == ("Hello.\n", "text/plain; charset=utf-8")
        vtt = await running.post(response_format="vtt")
        assert vtt.text == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello.\n"
        assert vtt.headers["content-type"].startswith("text/vtt")

    async def test_translation(self, running: Running) -> None:
        response = await running.post("/v1/audio/translations", response_format="verbose_json")
        assert (response.json()["task"], response.json()["language"]) == ("translate", "english")
        assert running.transcriber.options is not None
        assert running.transcriber.options.task is Task.TRANSLATE

    async def test_any_model_name_is_taken(self, running: Running) -> None:
        assert (await running.post(model="gpt-4o-transcribe")).status_code == 200

    async def test_stream_answers_with_events(self, running: Running) -> None:
        response = await running.post(stream="true")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [event["type"] for event in events(response.text)] == ["transcript.text.delta", "transcript.text.done"]

    async def test_models(self, running: Running) -> None:
        listed = (await running.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["hub/whisper-base", "whisper-1"]
        assert (await running.client.get("/api/v1/models/hub/whisper-base")).json()["object"] == "model"
        assert_error(await running.client.get("/v1/models/other"), 404, "model_not_found", "model")


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


class TestEvents:
    """``stream=true``: the answer grows as the recording is transcribed."""

    async def test_an_utterance_is_sent_before_the_next_is_ready(self, running: Running) -> None:
        running.transcriber.results = [final("Hello."), final("", 1, 2), final("Goodbye.", 2, 3)]
        running.transcriber.between = asyncio.Event()
        upload, url = {"file": ("a.wav", wav_bytes())}, "/v1/audio/transcriptions"
        async with running.client.stream("POST", url, files=upload, data={"stream": "true"}) as response:
            lines = response.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert not running.transcriber.between.is_set()
            assert (first["delta"], first["segment"]["end"]) == ("Hello.", 1.0)
            assert first["segment"]["words"][0]["word"] == "Hello."
            running.transcriber.between.set()
            rest = events("\n".join([line async for line in lines]))
        assert [event.get("delta") for event in rest] == [" Goodbye.", None]
        assert rest[-1]["text"] == "Hello. Goodbye."

    async def test_what_fails_before_the_first_event_has_its_status(self, running: Running) -> None:
        running.transcriber.error = Overloaded("busy", retry_after_s=2.2)
        assert_error(await running.post(stream="true"), 503, "overloaded")
        upload = {"file": ("a.wav", b"<html>no</html>" * 50)}
        response = await running.client.post("/v1/audio/transcriptions", files=upload, data={"stream": "true"})
        assert_error(response, 400, "unsupported_media")

    async def test_what_fails_later_is_an_error_event(self, running: Running) -> None:
        running.transcriber.results = [final("Hello."), final("never", 1, 2)]
        running.transcriber.error = RecognizerFailed("the engine gave no answer")
        response = await running.post(stream="true")
        assert response.status_code == 200
        [delta, error] = events(response.text)
        assert (delta["delta"], error["error"]["code"]) == ("Hello.", "recognizer_failed")

    async def test_silence_is_kept_alive(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http, "KEEPALIVE_S", 0.01)
        running.transcriber.between = asyncio.Event()
        posting = asyncio.create_task(running.post(stream="true"))
        await asyncio.wait_for(running.transcriber.began.wait(), 20)
        asyncio.get_running_loop().call_later(0.1, running.transcriber.between.set)
        body = (await posting).text
        assert body.startswith(": ")
        assert [event["type"] for event in events(body)] == ["transcript.text.delta", "transcript.text.done"]

    async def test_a_client_that_leaves_ends_the_work(self, running: Running) -> None:
        running.transcriber.results = [final("Hello."), final("never", 1, 2)]
        running.transcriber.between = asyncio.Event()
        upload, url = {"file": ("a.wav", wav_bytes())}, "/v1/audio/transcriptions"
        async with running.client.stream("POST", url, files=upload, data={"stream": "true"}) as response:
            await anext(response.aiter_lines())
        await asyncio.wait_for(running.transcriber.gave_up.wait(), 10)
        await eventually(lambda: running.files.open == 0)


class TestFailures:
    async def test_an_engine_that_failed_is_never_an_empty_text(self, running: Running) -> None:
        running.transcriber.results = [final(""), failed()]
        assert_error(await running.post(), 500, "recognizer_failed")

    async def test_what_is_missing_beside_good_text_is_said(self, running: Running) -> None:
        running.transcriber.results = [final("Hello."), failed()]
        response = await running.post(response_format="text")
        assert response.text == "Hello.\n"
        assert "1.00-2.00 s" in response.headers["x-hark-incomplete"]
        assert (await running.post()).json()["warnings"]

    async def test_a_complete_answer_has_no_warning(self, running: Running) -> None:
        assert "x-hark-incomplete" not in (await running.post()).headers

    async def test_no_capacity_says_when_to_come_back(self, running: Running) -> None:
        running.transcriber.error = Overloaded("busy", retry_after_s=2.2)
        response = await running.post()
        assert_error(response, 503, "overloaded")
        assert response.headers["retry-after"] == "3"

    async def test_no_slot(self, running: Running) -> None:
        with running.files.slot(), running.files.slot():
            assert_error(await running.post(), 503, "overloaded")

    async def test_what_is_no_media(self, running: Running) -> None:
        url = "/v1/audio/transcriptions"
        response = await running.client.post(url, files={"file": ("a.wav", b"<html>no</html>" * 50)})
        assert_error(response, 400, "unsupported_media")

    async def test_too_long(self, running: Running) -> None:
        silence = np.zeros(SAMPLE_RATE * 61 // 8, np.int8).tobytes()
        fmt = b"fmt \x10\0\0\0\x01\0\x01\0\xd0\x07\0\0\xd0\x07\0\0\x01\0\x08\0"
        body = b"RIFF\xff\xff\xff\xffWAVE" + fmt + b"data\xff\xff\xff\xff" + silence
        response = await running.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", body)})
        assert_error(response, 400, "audio_too_long")

    async def test_bad_requests(self, running: Running) -> None:
        url = "/v1/audio/transcriptions"
        assert_error(await running.post(language="xx"), 400, "unsupported_language", "language")
        assert_error(await running.post(response_format="xml"), 400, "invalid_value", "response_format")
        assert_error(await running.client.post(url, json={"file": "x"}), 415, "not_multipart")
        no_file = await running.client.post(url, files={"other": ("a", b"b")})
        assert_error(no_file, 400, "missing_file", "file")
        text_file = await running.client.post(url, files={"file": (None, b"no file name")})
        assert_error(text_file, 400, "missing_file", "file")
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert_error(await running.client.post(url, content=b"--y\r\n", headers=broken), 400, "bad_form")
        no_boundary = {"content-type": "multipart/form-data"}
        assert_error(await running.client.post(url, content=b"--y\r\n", headers=no_boundary), 400, "bad_form")

    async def test_every_error_under_the_api_has_the_same_shape(self, running: Running) -> None:
        assert_error(await running.client.get("/v1/nothing"), 404, "not_found")
        assert_error(await running.client.get("/v1/audio/transcriptions"), 405, None)
        assert_error(await running.client.get("/v1/bug"), 500, "internal_error")
        assert (await running.client.get("/elsewhere")).json() == {"detail": "Not Found"}


@pytest.mark.parametrize(
    ("error", "status", "close_code", "retry_after_s"),
    [
        (BadMessage("no"), 400, 1008, None),
        (BadAudio("no"), 400, 1007, None),
        (ClientError("no", code="upload_too_large"), 413, 1008, None),
        (RecognizerFailed("no"), 500, 1011, None),
        (Overloaded("no", retry_after_s=0.1), 503, 1013, 1),
    ],
)
def test_the_table_says_whose_fault_it_is(
    error: SttError, status: int, close_code: int, retry_after_s: int | None
) -> None:
    shown = surface(error)
    assert (shown.http_status, shown.close_code, shown.retry_after_s) == (status, close_code, retry_after_s)


class TestUploads:
    async def test_a_declared_size_beyond_the_limit_is_refused_unread(self, running: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 5000000000\r\n\r\n"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()

    async def test_a_chunked_upload_is_counted(self, running: Running) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
            for _ in range(10):
                yield bytes(65_536)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        response = await running.client.post("/v1/audio/transcriptions", content=body(), headers=headers)
        assert_error(response, 413, "upload_too_large")
        assert running.transcriber.options is None, "nothing was transcribed"

    async def test_a_field_cannot_be_a_file(self, running: Running) -> None:
        assert_error(await running.post(prompt="x" * 100_000), 400, "bad_form")

    async def test_a_client_that_leaves_ends_the_work(self, running: Running) -> None:
        running.transcriber.hold = True
        before = {child.pid for child in psutil.Process().children()}
        posting = asyncio.create_task(running.post())
        await asyncio.wait_for(running.transcriber.began.wait(), 20)
        posting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await posting
        await asyncio.wait_for(running.transcriber.gave_up.wait(), 10)
        await eventually(lambda: running.files.open == 0)
        assert {child.pid for child in psutil.Process().children()} <= before, "the decoder is gone"

    async def test_a_client_that_leaves_in_mid_upload_leaves_no_slot_taken(self, running: Running) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 100000\r\n\r\n--b\r\n"
        )
        await eventually(lambda: running.files.open == 1)
        writer.close()
        await eventually(lambda: running.files.open == 0)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - another process's and the kernel's state has no event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "error", [Overloaded("no room now", retry_after_s=1), TooManyRequests("too often", retry_after_s=0.7)]
)
async def test_openais_library_tries_again_when_it_is_told_to(running: Running, error: SttError) -> None:
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=1)
    running.transcriber.fails_once = error
    clock = asyncio.get_running_loop()
    begun_s = clock.time()
    answer = await client.audio.transcriptions.create(file=("a.wav", wav_bytes()), model="whisper-1")
    assert answer.text == "Hello."
    assert clock.time() - begun_s >= 1.0, "by itself it would have waited for half a second at most"


async def test_how_speech_is_cut_arrives(running: Running) -> None:
    await running.post(chunking_strategy='{"type":"server_vad","threshold":0.3,"silence_duration_ms":900}')
    assert running.transcriber.config is not None
    cut = running.transcriber.config.endpointer
    assert (cut.threshold, round(cut.release_threshold, 2), cut.pause_ms) == (0.3, 0.15, 900)
    await running.post()
    assert running.transcriber.config == SessionConfig()
