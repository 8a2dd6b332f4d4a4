"""Files through the whole service with real weights: what is said in odd files, in every response format."""

import asyncio
import io
import re
import socket
import wave
from collections.abc import AsyncIterator
from difflib import SequenceMatcher

import httpx
import pytest
import pytest_asyncio
import uvicorn

from app.main import create_app
from app.settings import Settings
from tests.support.corpus import corpus_row
from tests.support.weights import require_weights

pytestmark = [pytest.mark.real, pytest.mark.corpus, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

JFK = "read-en-jfk-jfk"


@pytest.fixture(scope="module")
def settings() -> Settings:
    require_weights("base")
    return Settings(model="base", offline=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="critical"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=120) as client:
        await until_ready(client)
        yield client
    server.should_exit = True
    await serving


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def transcribe(client: httpx.AsyncClient, row_id: str, **fields: object) -> httpx.Response:
    path = corpus_row(row_id).path
    files = {"file": (path.name, path.read_bytes())}
    return await client.post("/v1/audio/transcriptions", files=files, data={"model": "whisper-1", **fields})


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def likeness(text: str, reference: str | None) -> float:
    return SequenceMatcher(None, words(text), words(reference or ""), autojunk=False).ratio()


@pytest.mark.parametrize(
    "row_id",
    [
        JFK,
        "broken-derived-5-1-centre-only-wav",
        "broken-derived-stereo-antiphase-flac",
        "broken-derived-stereo-left-silent-flac",
        "broken-derived-dc-offset-flac",
        "broken-derived-wav-float-over-full-scale-wav",
        "broken-derived-wav-size-zero-wav",
        "broken-derived-wav-ms-adpcm-wav",
    ],
)
async def test_the_speech_is_understood(client: httpx.AsyncClient, row_id: str) -> None:
    response = await transcribe(client, row_id, language="en")
    assert response.status_code == 200, response.text
    assert "x-hark-incomplete" not in response.headers
    assert likeness(response.json()["text"], corpus_row(row_id).text) > 0.8, response.text


async def test_eight_channels_that_name_themselves_are_all_heard(client: httpx.AsyncClient) -> None:
    """All but the low-frequency one, which carries no voice."""
    text = (await transcribe(client, "broken-whisperkit-8-Channel-ID-m4a", language="en")).json()["text"]
    said = "front left front right center back left back right auxiliary left auxiliary right"
    assert likeness(text, said) > 0.85, text


async def test_a_damaged_file_gives_what_it_holds_and_says_so(client: httpx.AsyncClient) -> None:
    response = await transcribe(client, "broken-derived-mp3-garbage-in-the-middle-mp3", language="en")
    assert response.status_code == 200
    assert words(response.json()["text"])
    assert "damaged" in response.headers["x-hark-incomplete"]


@pytest.mark.parametrize(
    "row_id",
    ["broken-derived-html-named-wav-wav", "broken-derived-zero-length-wav", "broken-derived-wav-header-only-wav"],
)
async def test_what_holds_no_audio_is_the_clients_error(client: httpx.AsyncClient, row_id: str) -> None:
    response = await transcribe(client, row_id)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_every_format(client: httpx.AsyncClient) -> None:
    verbose = (
        await transcribe(
            client, JFK, response_format="verbose_json", **{"timestamp_granularities[]": ["word", "segment"]}
        )
    ).json()
    assert verbose["language"] == "english"
    assert verbose["duration"] == pytest.approx(11.0, abs=0.1)
    starts = [word["start"] for word in verbose["words"]]
    assert starts == sorted(starts)
    assert len(starts) == len(verbose["text"].split())
    assert " ".join(segment["text"] for segment in verbose["segments"]) == verbose["text"]
    srt = (await transcribe(client, JFK, response_format="srt")).text
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\n\S", srt)
    assert (await transcribe(client, JFK, response_format="vtt")).text.startswith("WEBVTT\n\n00:00:0")
    assert (await transcribe(client, JFK, response_format="text")).text.strip() == verbose["text"]


async def test_silence_is_an_empty_text(client: httpx.AsyncClient) -> None:
    body = io.BytesIO()
    with wave.open(body, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(32_000 * 5))
    response = await client.post("/v1/audio/transcriptions", files={"file": ("silence.wav", body.getvalue())})
    assert response.json() == {"text": "", "usage": {"type": "duration", "seconds": 5}, "languages": []}
