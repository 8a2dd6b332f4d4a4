"""Hark's own protocol: what every parameter takes, that nothing a client sends does more harm than BadMessage, and the
messages as clients see them."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.wire.native import (
    MAX_HOTWORD_CHARS,
    MAX_HOTWORDS,
    MAX_PROMPT_CHARS,
    Configure,
    Control,
    StreamParameters,
    parse_message,
    parse_parameters,
    query_parameters,
    render,
    render_error,
    render_lag,
    render_ready,
)
from streaming.config import Encoding
from streaming.errors import BadMessage, Overloaded, RecognizerFailed
from streaming.events import (
    ClientEvent,
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import Task, Word

LANGUAGES = frozenset({"en", "de", "fr", "zh", "yue"})
NAMES = [field.name for field in fields(StreamParameters)]


def parse(**given: object) -> StreamParameters:
    return parse_parameters(StreamParameters(), given, LANGUAGES)


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("language", "en", "en"),
        ("language", "EN", "en"),
        ("language", "en-US", "en"),
        ("language", "zh_Hans", "zh"),
        ("language", " de ", "de"),
        ("language", "auto", None),
        ("language", "", None),
        ("language", None, None),
        ("languages", "en,de", ("en", "de")),
        ("languages", ["en", "fr-CA"], ("en", "fr")),
        ("languages", [], ()),
        ("languages", "", ()),
        ("task", "transcribe", Task.TRANSCRIBE),
        ("task", "Translate", Task.TRANSLATE),
        ("prompt", "", ""),
        ("prompt", "x" * MAX_PROMPT_CHARS, "x" * MAX_PROMPT_CHARS),
        ("hotwords", "Hark, Whisper ,,", ("Hark", "Whisper")),
        ("hotwords", ["a b", " c "], ("a b", "c")),
        ("hotwords", ["x" * MAX_HOTWORD_CHARS] * MAX_HOTWORDS, ("x" * MAX_HOTWORD_CHARS,) * MAX_HOTWORDS),
        ("encoding", "linear16", Encoding.LINEAR16),
        ("encoding", "MULAW", Encoding.MULAW),
        ("encoding", "alaw", Encoding.ALAW),
        ("encoding", "float32", Encoding.FLOAT32),
        ("sample_rate", "8000", 8_000),
        ("sample_rate", 48_000, 48_000),
        ("sample_rate", 4_000, 4_000),
        ("sample_rate", 192_000, 192_000),
        ("channels", "2", 2),
        ("partials", True, True),
        ("partials", "false", False),
        ("partials", "0", False),
        ("words", "no", False),
        ("words", 1, True),
        ("partial_interval_ms", 32, 32),
        ("pause_ms", "10000", 10_000),
        ("max_utterance_ms", 1_000, 1_000),
        ("max_utterance_ms", "26000", 26_000),
        ("threshold", "0.3", 0.3),
        ("threshold", 0.9, 0.9),
    ],
)
def test_good_values(name: str, value: object, expected: object) -> None:
    assert getattr(parse(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("language", "xx"),
        ("language", "english"),
        ("language", ["en"]),
        ("language", 7),
        ("languages", "en,xx"),
        ("languages", [["en"]]),
        ("languages", {"en": 1}),
        ("languages", 5),
        ("task", "summarize"),
        ("task", None),
        ("prompt", "x" * (MAX_PROMPT_CHARS + 1)),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", ["a"]),
        ("prompt", "half a pair: \ud83d"),
        ("hotwords", ["\udc00"]),
        ("hotwords", ["x" * (MAX_HOTWORD_CHARS + 1)]),
        ("hotwords", ["x"] * (MAX_HOTWORDS + 1)),
        ("hotwords", [1]),
        ("hotwords", 1),
        ("hotwords", None),
        ("encoding", "opus"),
        ("encoding", ""),
        ("encoding", ["linear16"]),
        ("sample_rate", "fast"),
        ("sample_rate", "16 kHz"),
        ("sample_rate", 16_000.5),
        ("sample_rate", 0),
        ("sample_rate", -16_000),
        ("sample_rate", 3_999),
        ("sample_rate", 192_001),
        ("sample_rate", "9" * 4_000),
        ("sample_rate", "9" * 5_000),
        ("sample_rate", True),
        ("sample_rate", None),
        ("sample_rate", ["16000", "8000"]),
        ("channels", 0),
        ("channels", 3),
        ("channels", "two"),
        ("partials", "maybe"),
        ("partials", 2),
        ("partials", None),
        ("words", []),
        ("partial_interval_ms", 31),
        ("partial_interval_ms", 10_001),
        ("pause_ms", 31),
        ("pause_ms", 10_001),
        ("pause_ms", "1e3"),
        ("max_utterance_ms", 999),
        ("max_utterance_ms", 26_001),
        ("threshold", 0),
        ("threshold", 1),
        ("threshold", "nan"),
        ("threshold", float("nan")),
        ("threshold", "inf"),
        ("threshold", -0.5),
        ("threshold", {}),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadMessage) as raised:
        parse(**{name: value})
    assert raised.value.code in ("bad_parameter", "unknown_language")
    first = raised.value.message.split()[0]
    assert first in name or first == "thresholds"  # the core says interval_ms, and speaks of both thresholds
    assert len(raised.value.message) < 300


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(BadMessage) as raised:
        parse(samplerate=16_000)
    assert raised.value.code == "unknown_parameter"
    assert all(name in raised.value.message for name in NAMES)


def test_what_hosting_platforms_add_is_ignored() -> None:
    assert parse(__sign="abc", __theme="dark") == StreamParameters()


def test_every_parameter_is_parsed_and_what_is_not_named_is_kept() -> None:
    base = parse(prompt="kept", sample_rate=8_000)
    for name in NAMES:
        with pytest.raises(BadMessage):
            parse_parameters(base, {name: {"no": "such"}}, LANGUAGES)
    assert parse_parameters(base, {"pause_ms": 300}, LANGUAGES) == parse(prompt="kept", sample_rate=8_000, pause_ms=300)


def test_a_session_is_configured_as_asked() -> None:
    config = parse(
        encoding="mulaw",
        sample_rate=8_000,
        channels=2,
        threshold=0.6,
        pause_ms=700,
        max_utterance_ms=1_000,
        partials=False,
    ).session_config()
    assert (config.audio.encoding, config.audio.sample_rate_hz, config.audio.channels) == (Encoding.MULAW, 8_000, 2)
    assert (config.endpointer.threshold, config.endpointer.pause_ms) == (0.6, 700)
    assert config.endpointer.release_threshold == pytest.approx(0.45)
    assert (config.segmenter.max_utterance_ms, config.segmenter.cut_zone_ms) == (1_000, 500)
    assert not config.partials.enabled


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from([*NAMES, "__x", "type", ""]) | st.text(max_size=10), VALUES, max_size=6))
def test_any_parameters_give_a_session_that_can_be_and_can_be_shown_or_bad_message(given: dict[str, Any]) -> None:
    try:
        parameters = parse_parameters(StreamParameters(), given, LANGUAGES)
    except BadMessage as error:
        json.dumps(render_error(error, fatal=True), ensure_ascii=False).encode()
        return
    parameters.session_config()
    shown = json.dumps(render_ready("id", parameters, "base"), ensure_ascii=False).encode()
    assert parse_parameters(StreamParameters(), json.loads(shown)["config"], LANGUAGES) == parameters


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.text(max_size=3)), max_size=10))
def test_a_querys_repeated_names_give_lists(pairs: list[tuple[str, str]]) -> None:
    given_ = query_parameters(pairs)
    for name in {name for name, _ in pairs}:
        values = [value for other, value in pairs if other == name]
        assert given_[name] == (values if len(values) > 1 else values[0])


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", Control)
def test_controls(control: Control) -> None:
    assert parse_message(json.dumps({"type": control.value})) is control
    assert parse_message(json.dumps({"type": control.value, "more": 1})) is control


def test_config_brings_the_other_names() -> None:
    assert parse_message('{"type":"config","language":"en","pause_ms":300}') == Configure(
        {"language": "en", "pause_ms": 300}
    )


BAD = [
    "",
    " ",
    "eof",
    "{",
    "[]",
    "null",
    "5",
    '"eof"',
    "{}",
    '{"type":null}',
    '{"type":"EOF"}',
    '{"type":["eof"]}',
    '{"type":{"eof":1}}',
    '{"type":"start"}',
    '{"type":"config"',
    "\ufeff{}",
    "1" * 5_000,
    '{"type":' + "1" * 5_000 + "}",
    '{"type":"' + "x" * 100_000 + '"}',
    "[" * 100_000,
    '{"type":' * 2_000 + "1" + "}" * 2_000,
    "\0",
    "Infinity",
]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_no_message_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(BadMessage) as raised:
        parse_message(text)
    assert len(raised.value.message) < 200
    raised.value.message.encode()


def configure(text: str) -> StreamParameters:
    message = parse_message(text)
    assert isinstance(message, Configure)
    return parse_parameters(StreamParameters(), message.parameters, LANGUAGES)


@pytest.mark.parametrize("name", ["type", *NAMES])
@pytest.mark.parametrize("open_close", ["[]", "{}"])
def test_values_nested_as_deep_as_can_be_parsed_are_only_bad(name: str, open_close: str) -> None:
    """Python shows a nested value less deep than it parses one."""
    for depth in range(50, 1_000, 50):
        inner = open_close[0] if open_close == "[]" else '{"a":'
        nested = inner * depth + "1" + open_close[1] * depth
        kind = "" if name == "type" else '"type":"config",'
        with pytest.raises(BadMessage):
            configure(f'{{{kind}"{name}":{nested}}}')


@settings(max_examples=100)
@given(st.text(max_size=50) | VALUES.map(json.dumps) | st.dictionaries(st.just("type"), VALUES).map(json.dumps))
@example('{"type":"\\ud800"}')
def test_any_text_is_a_message_or_bad_message(text: str) -> None:
    try:
        assert isinstance(parse_message(text), Control | Configure)
    except BadMessage as error:
        json.dumps(render_error(error, fatal=False), ensure_ascii=False).encode()


# --- what clients see ------------------------------------------------------------------------------------------------

WORDS = (Word(" Hello", 1_600, 8_000, 0.98765), Word(" world.", 8_000, 16_000, 0.5))
FINAL = FinalTranscript(3, 1, "Hello world.", WORDS, "en", 0.98765, 0.74382, 1_600, 16_000, continues=True)

GOLDEN: list[tuple[ClientEvent, dict[str, object]]] = [
    (SpeechStarted(3, 1, 1_600), {"type": "speech_started", "utterance": 3, "channel": 1, "at_ms": 100}),
    (SpeechStopped(3, 1, 16_000), {"type": "speech_stopped", "utterance": 3, "channel": 1, "at_ms": 1_000}),
    (
        PartialTranscript(3, 1, "Hello", " wor", 1_600, 12_000),
        {
            "type": "partial",
            "utterance": 3,
            "channel": 1,
            "start_ms": 100,
            "end_ms": 750,
            "committed": "Hello",
            "tentative": " wor",
        },
    ),
    (
        FINAL,
        {
            "type": "final",
            "utterance": 3,
            "channel": 1,
            "start_ms": 100,
            "end_ms": 1_000,
            "text": "Hello world.",
            "language": "en",
            "language_probability": 0.988,
            "confidence": 0.744,
            "continues": True,
            "words": [
                {"word": "Hello", "start_ms": 100, "end_ms": 500, "probability": 0.988},
                {"word": "world.", "start_ms": 500, "end_ms": 1_000, "probability": 0.5},
            ],
        },
    ),
    (
        TranscriptFailed(3, 1, 1_600, 16_000, RecognizerFailed("it died")),
        {
            "type": "failed",
            "utterance": 3,
            "channel": 1,
            "start_ms": 100,
            "end_ms": 1_000,
            "code": "recognizer_failed",
            "message": "it died",
        },
    ),
    (SessionDone(16_000), {"type": "done", "audio_ms": 1_000}),
]


@pytest.mark.parametrize(("event", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_events(event: ClientEvent, expected: dict[str, object]) -> None:
    assert render(event) == expected


def test_a_final_without_its_words_where_they_are_not_wanted() -> None:
    assert render(FINAL, words=False) == {k: v for k, v in render(FINAL).items() if k != "words"}


def test_ready_tells_the_session_and_everything_that_is_in_force() -> None:
    assert render_ready("abc", parse(language="de", hotwords="Hark"), "base") == {
        "type": "ready",
        "session": "abc",
        "model": "base",
        "config": {
            "language": "de",
            "languages": (),
            "task": "transcribe",
            "prompt": "",
            "hotwords": ("Hark",),
            "encoding": "linear16",
            "sample_rate": 16_000,
            "channels": 1,
            "partials": True,
            "partial_interval_ms": 400,
            "pause_ms": 500,
            "max_utterance_ms": 20_000,
            "threshold": 0.5,
            "words": True,
        },
    }


def test_lag_and_errors() -> None:
    assert render_lag(32_000, 8_000) == {"type": "lag", "audio_ms": 2_000, "lag_ms": 1_500}
    assert render_error(Overloaded("full"), fatal=True) == {
        "type": "error",
        "code": "overloaded",
        "message": "full",
        "fatal": True,
    }
