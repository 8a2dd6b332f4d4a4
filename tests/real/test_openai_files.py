"""OpenAI's own library, unmodified, against the running service: every format, events, errors, retries."""

import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.keys import KeyLimits, add_key
from models.scripted import encode_words
from tests.support.server import Server, serving

openai = pytest.importorskip("openai")

LONG_PAUSE: tuple[None, ...] = (None,) * 12
SHORT_PAUSE: tuple[None, ...] = (None,) * 5  # of half a second, which does not end an utterance of a recording


def recording(*words: str | None) -> tuple[str, bytes]:
    """A WAV that the scripted engine reads as these words."""
    samples = encode_words(words)
    samples[::2] *= -1  # a constant level would be taken for an offset, which a file's decoder removes
    body = io.BytesIO()
    with wave.open(body, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return "talk.wav", body.getvalue()


TALK = recording("alpha", "bravo", *LONG_PAUSE, "charlie", *SHORT_PAUSE, "delta")
TEXT = "alpha bravo charlie delta"


LIMITS = {
    "free": KeyLimits(),
    "slow": KeyLimits(per_minute=1),
    "short": KeyLimits(minutes_a_day=0.05),
}


@dataclass(frozen=True)
class Deployment:
    """A service and the keys that it knows, by their names."""

    server: Server
    keys: dict[str, str]

    def client(self, key: str = "") -> "openai.OpenAI":
        return openai.OpenAI(base_url=self.server.url("/v1"), api_key=key or self.keys["free"], max_retries=0)

    def create(self, key: str = "", **fields: object) -> Any:
        return self.client(key).audio.transcriptions.create(**{"file": TALK, "model": "whisper-1", **fields})

    def make_token(self, key: str, body: object = None) -> httpx.Response:
        return httpx.post(self.server.url("/v1/tokens"), json=body, headers={"X-API-Key": key})


@pytest.fixture(scope="module")
def hark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = {name: add_key(file, name, limits) for name, limits in LIMITS.items()}
    with serving(keys_file=file) as server:
        yield Deployment(server, keys)


def test_every_format(hark: Deployment) -> None:
    plain = hark.create()
    assert (type(plain).__name__, plain.text) == ("Transcription", TEXT)
    assert (plain.usage.type, plain.usage.seconds) == ("duration", 3)
    assert [language.code for language in plain.languages] == ["en"]
    verbose = hark.create(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert (type(verbose).__name__, verbose.text, verbose.language) == ("TranscriptionVerbose", TEXT, "english")
    assert [segment.text for segment in verbose.segments] == ["alpha bravo", "charlie delta"]
    assert [word.word for word in verbose.words] == TEXT.split()
    assert verbose.words[2].start == pytest.approx(1.4, abs=0.05)
    assert hark.create(response_format="text") == TEXT + "\n"
    assert hark.create(response_format="srt").startswith("1\n00:00:0")
    assert hark.create(response_format="vtt").startswith("WEBVTT\n\n00:00:0")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_translation(hark: Deployment) -> None:
    create = hark.client().audio.translations.create
    assert create(file=TALK, model="whisper-1").text == TEXT
    verbose = create(file=TALK, model="whisper-1", response_format="verbose_json")
    assert (type(verbose).__name__, verbose.text, verbose.language) == ("TranslationVerbose", TEXT, "english")
    assert create(file=TALK, model="whisper-1", response_format="text") == TEXT + "\n"


@pytest.mark.parametrize("logprobs", [False, True])
def test_events(hark: Deployment, logprobs: bool) -> None:
    events = list(hark.create(stream=True, **({"include": ["logprobs"]} if logprobs else {})))
    assert [type(event).__name__ for event in events] == [
        "TranscriptionTextDeltaEvent",
        "TranscriptionTextDeltaEvent",
        "TranscriptionTextDoneEvent",
    ]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == TEXT
    assert events[-1].usage.type == "duration"
    if not logprobs:
        assert [event.logprobs for event in events] == [None] * 3
        return
    assert ["".join(item.token for item in event.logprobs) for event in events] == [
        "alpha bravo",
        " charlie delta",
        TEXT,
    ]
    assert all(bytes(item.bytes).decode() == item.token for event in events for item in event.logprobs)
    assert {item.logprob for item in events[-1].logprobs} == {-0.1054}


def test_a_pause_as_short_as_was_asked_for_ends_a_segment(hark: Deployment) -> None:
    chunking = {"type": "server_vad", "silence_duration_ms": 300, "prefix_padding_ms": 100}
    verbose = hark.create(response_format="verbose_json", chunking_strategy=chunking)
    assert [segment.text for segment in verbose.segments] == ["alpha bravo", "charlie", "delta"]
    assert hark.create(chunking_strategy="auto").text == TEXT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"chunking_strategy": {"type": "server_vad", "threshold": 2}}, "chunking_strategy"),
        ({"include": ["logprobs"], "response_format": "verbose_json"}, "include[]"),
    ],
)
def test_a_bad_value_is_named(hark: Deployment, fields: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        hark.create(**fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_who_has_no_key_is_told_so_and_the_key_is_told_nobody(hark: Deployment) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        hark.create("hark_wrong")
    assert caught.value.code == "unauthorized"
    assert "hark_wrong" not in str(caught.value)
    assert "whisper-1" in [model.id for model in hark.client().models.list()]


def test_a_key_that_is_used_too_often_is_told_when_to_come_back(hark: Deployment) -> None:
    hark.create(hark.keys["slow"])
    with pytest.raises(openai.RateLimitError) as caught:
        hark.create(hark.keys["slow"])
    assert caught.value.code == "too_many_requests"
    assert 50 < int(caught.value.response.headers["Retry-After"]) <= 60


def test_a_keys_minutes_end_in_the_middle_of_a_recording(hark: Deployment) -> None:
    """0.05 minutes are 3 s; the recording has 2."""
    hark.create(hark.keys["short"])
    for _ in range(2):
        with pytest.raises(openai.RateLimitError) as caught:
            hark.create(hark.keys["short"])
        assert caught.value.code == "audio_limit"


def test_a_token_is_a_key_for_a_while_and_makes_no_other(hark: Deployment) -> None:
    made = hark.make_token(hark.keys["free"], {"expires_in_s": 60})
    assert made.headers["Cache-Control"] == "no-store"
    token = made.json()["token"]
    assert hark.create(token).text == TEXT
    again = hark.make_token(token)
    assert (again.status_code, again.json()["error"]["code"]) == (403, "key_required")
    assert hark.make_token(hark.keys["free"]).json()["expires_in_s"] == 600
    assert hark.make_token("").status_code == 401


@pytest.mark.parametrize(
    "body", [{"expires_in_s": 5}, {"expires_in_s": 1e9}, {"expires_in_s": "soon"}, {"ttl": 60}, []]
)
def test_a_token_cannot_be_asked_for_wrongly(hark: Deployment, body: object) -> None:
    refused = hark.make_token(hark.keys["free"], body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


def test_nothing_of_this_stands_in_the_log(hark: Deployment) -> None:
    assert hark.server.log
    assert [text for text in (*hark.keys.values(), "hark_tmp_", "hark_wrong", "alpha") if text in hark.server.log] == []
