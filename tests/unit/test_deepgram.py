"""Deepgram's live dialect without a socket: recorded conversations replayed byte for byte, and what always holds.

tests/golden/deepgram/*.jsonl are conversations, one message a line: what the client sends (``client`` text, ``audio``
as the words that it says, ``bytes`` in base64) and what the service answers to it (``server``). They are played with
the scripted engine, whose answers come at once. ``python -m tests.unit.test_deepgram`` writes the service's lines anew.
"""

import base64
import hashlib
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dialect import Action, Audio, Close, Commit, Complaint, Eof, Gap, Lag, Marked, Say, Start, ToClient
from app.offset import Offset
from app.wire.deepgram import IDLE_REASON, DeepgramDialect, Identity
from app.wire.deepgram_query import MIN_PAUSE_MS, ListenRequest, parse_live, parse_recorded
from app.wire.deepgram_text import bare
from app.wire.native import StreamParameters
from app.wire.wav import WavHead, wav_head
from models.scripted import VOCABULARY, ScriptedConfig, ScriptedDetector, encode_words
from streaming.audio import SAMPLE_RATE, decode_samples
from streaming.config import AudioFormat, Encoding
from streaming.errors import BadAudio, BadMessage, ClientError, Overloaded, RecognizerFailed, SttError
from streaming.events import CancelDecode, Decode, FinalTranscript, Output, SessionDone, SpeechStarted
from streaming.session import Session
from streaming.types import DecodeRequest, Word

GOLDEN = Path(__file__).parents[1] / "golden" / "deepgram"
LANGUAGES = frozenset({"de", "en", "fr", "zh"})
IDENTITY = Identity("11111111-2222-3333-4444-555555555555", "2026-12-01T12:00:00.000Z", "scripted")
PLAIN = "encoding=linear16&sample_rate=16000"
FINALIZE, CLOSE, KEEPALIVE = '{"type":"Finalize"}', '{"type":"CloseStream"}', '{"type":"KeepAlive"}'
PAUSE: tuple[None, ...] = (None,) * 8
Words = Sequence[str | None]


def request_of(query: str) -> ListenRequest:
    return parse_live(parse_qsl(query, keep_blank_values=True), LANGUAGES)


def encoded(audio: AudioFormat, *channels: Words) -> bytes:
    """These words, channel by channel, as the client's bytes."""
    step = SAMPLE_RATE // audio.sample_rate_hz
    pcm = np.stack([encode_words(words)[::step] for words in channels], axis=1).reshape(-1)
    if audio.encoding is Encoding.LINEAR16:
        return pcm.tobytes()
    table = decode_samples(bytes(range(256)), audio.encoding)
    order = np.argsort(table)
    found = order[np.searchsorted(table[order], pcm / 32768).clip(0, 255)]
    return found.astype(np.uint8).tobytes()


def say(*words: str | None) -> bytes:
    return encoded(AudioFormat(), words)


@dataclass
class Line:
    """A connection without sockets and tasks. ``answers_at_once``: else decodes wait for ``answer``."""

    dialect: DeepgramDialect
    answers_at_once: bool = True
    fail_on: str = ""
    sent: list[str] = field(default_factory=list)
    close: tuple[int, str] | None = None
    config: Any = None
    waiting: list[DecodeRequest] = field(default_factory=list)
    _session: Session | None = None
    _offset: Offset = field(default_factory=Offset)
    _utterances: int = 0
    _beats: int = 0

    def __post_init__(self) -> None:
        self._carry_out(self.dialect.open())

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.sent]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    @property
    def finals(self) -> list[dict[str, Any]]:
        return [message for message in self.of_type("Results") if message["is_final"]]

    @property
    def texts(self) -> list[str]:
        return [transcript(final) for final in self.finals]

    def receive(self, *messages: str | bytes) -> "Line":
        for message in messages:
            self._carry_out(self.dialect.receive(message))
        return self

    def answer(self, index: int = 0) -> None:
        self._answer(self.waiting.pop(index))

    def answer_all(self) -> None:
        while self.waiting:
            self.answer()

    # As app/conversation.py does ---------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Say(message):
                    assert isinstance(message, str)
                    self.sent.append(message)
                case Start(config):
                    self._restart(config)
                case Commit(mark):
                    if self._session is not None:
                        self._take(self._session.receive_commit())
                    self._tell(Marked(mark))
                case Complaint():
                    self._tell(action)
                case Audio(data):
                    self._hear(data)
                case Eof():
                    self._end()
                case Gap() | Close():
                    raise AssertionError(action)

    def _restart(self, config: Any) -> None:
        self.config = config
        if self._session is not None:
            before, self._session = self._session, None
            self._take(before.receive_eof(), before)
            self.answer_all()  # a conversation waits for what came before
            self._offset = Offset(self._offset.samples + before.received_samples, self._utterances)
        self._session = Session(config, [ScriptedDetector() for _ in range(config.audio.channels)])

    def _hear(self, data: bytes) -> None:
        assert self._session is not None
        slice_bytes = self._session._config.audio.sample_rate_hz // 10 * self._session._config.audio.frame_bytes
        for start in range(0, len(data), slice_bytes):
            self._take(self._session.receive_audio(data[start : start + slice_bytes]))
            received = self._session.received_samples
            if (self._offset.samples + received) // SAMPLE_RATE > self._beats:
                self._beats += 1
                self._tell(Lag(received, self._session.covered_samples))

    def _end(self) -> None:
        if self._session is not None:
            self._take(self._session.receive_eof())
            self.answer_all()
            received = self._offset.samples + self._session.received_samples
        else:
            received = 0
        self.sent += [str(message) for message in self.dialect.render(SessionDone(received))]
        messages, *closing = self.dialect.farewell(going_down=False)
        assert not messages
        self.close = (int(closing[0]), str(closing[1]))

    def _take(self, outputs: Sequence[Output], session: Session | None = None) -> None:
        for output in outputs:
            match output:
                case Decode(request):
                    self.waiting.append(request)
                case CancelDecode(request_id):
                    self.waiting = [request for request in self.waiting if request.request_id != request_id]
                case SessionDone():
                    pass
                case _:
                    self._tell(output)
        self._answering = session or self._session
        if self.answers_at_once:
            self.answer_all()

    def _answer(self, request: DecodeRequest) -> None:
        session = self._answering
        assert session is not None
        try:
            outputs = session.receive_hypothesis(ScriptedConfig(fail_on=self.fail_on).answer(request))
        except RecognizerFailed as error:
            outputs = session.receive_failure(request.request_id, error)
        self._take(outputs, session)

    def _tell(self, event: ToClient) -> None:
        event = self._offset.apply(event)
        if isinstance(event, SpeechStarted):
            self._utterances = event.utterance_id + 1
        self.sent += [str(message) for message in self.dialect.render(event)]


def connect(query: str = PLAIN, **kwargs: Any) -> Line:
    return Line(DeepgramDialect(request_of(query), StreamParameters(), IDENTITY), **kwargs)


def transcript(result: dict[str, Any]) -> str:
    text: str = result["channel"]["alternatives"][0]["transcript"]
    return text


def finalized(line: Line) -> list[tuple[str, bool]]:
    return [(transcript(final), final["from_finalize"]) for final in line.finals]


# --- recorded conversations ------------------------------------------------------------------------------------------


def played(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The client's lines, each followed by what the service answers to it."""
    query = lines[0]["query"]
    yield lines[0]
    line, told = connect(query), 0
    audio = request_of(query).audio or AudioFormat()
    for entry in lines[1:]:
        match entry:
            case {"client": text}:
                line.receive(text)
            case {"audio": words}:
                line.receive(encoded(audio, *(words if isinstance(words[0], list) else [words])))
            case {"bytes": encoded_bytes}:
                line.receive(base64.b64decode(encoded_bytes))
            case _:
                continue
        yield entry
        yield from ({"server": text} for text in line.sent[told:])
        told = len(line.sent)
    if line.close is not None:
        yield {"closed": list(line.close)}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_conversation_goes_as_it_went(path: Path) -> None:
    lines = read(path)
    assert any("server" in line for line in lines)
    assert list(played(lines)) == lines


# --- what always holds -----------------------------------------------------------------------------------------------

DEEDS = st.one_of(
    st.sampled_from([FINALIZE, KEEPALIVE, '{"type":"Configure","keyterms":["Hark"]}', "answer", "nonsense"]),
    st.lists(st.sampled_from([*VOCABULARY[:6], None, *PAUSE]), min_size=1, max_size=12).map(lambda words: say(*words)),
)


@given(st.lists(DEEDS, max_size=14), st.data())
@settings(max_examples=120, deadline=None)
def test_whatever_is_said_each_finalize_is_answered_once_and_the_last_message_is_metadata(
    deeds: list[str | bytes], data: st.DataObject
) -> None:
    line = connect(f"{PLAIN}&interim_results=true&vad_events=true&utterance_end_ms=1000", answers_at_once=False)
    for deed in deeds:
        if deed == "answer":
            if line.waiting:
                line.answer(data.draw(st.integers(0, len(line.waiting) - 1)))
        else:
            line.receive(deed)
    line.receive(CLOSE)
    results = line.of_type("Results")
    assert sum(result["from_finalize"] for result in results) == deeds.count(FINALIZE)
    assert all(result["is_final"] for result in results if result["from_finalize"] or result["speech_final"])
    starts = [final["start"] for final in line.finals if transcript(final)]
    assert starts == sorted(starts)
    ends = [message["last_word_end"] for message in line.of_type("UtteranceEnd")]
    assert ends == sorted(set(ends)), "one for each pause"
    assert line.messages[-1]["type"] == "Metadata"
    assert [message["type"] for message in line.messages].count("Metadata") == 1
    assert line.close == (1000, "")
    # LiveKit drops what lacks one of these.
    for result in results:
        assert result["metadata"]["request_id"] == IDENTITY.request_id
        assert {"transcript", "confidence", "words"} <= set(result["channel"]["alternatives"][0])
        assert 0 <= result["start"] <= line.messages[-1]["duration"]


def test_a_finalize_in_the_middle_of_speech_is_answered_by_the_result_that_it_asks_for() -> None:
    line = connect().receive(say("alpha", "bravo"), FINALIZE)
    assert finalized(line) == [
        ("alpha bravo", False),
        ("", True),
    ]


def test_a_finalize_waits_for_results_that_are_still_out() -> None:
    line = connect(answers_at_once=False).receive(say("alpha", "bravo"), FINALIZE)
    assert line.finals == []
    line.answer_all()
    assert finalized(line) == [("alpha bravo", True)]


def test_two_finalizes_that_wait_for_one_result_get_two_answers() -> None:
    line = connect(answers_at_once=False).receive(say("alpha", "bravo"), FINALIZE, FINALIZE)
    line.answer_all()
    assert finalized(line) == [("alpha bravo", True), ("", True)]


def test_a_finalize_before_any_audio_is_answered_at_once() -> None:
    assert [final["from_finalize"] for final in connect().receive(FINALIZE).finals] == [True]
    assert [final["from_finalize"] for final in connect("").receive(FINALIZE).finals] == [True]


def test_an_utterance_that_was_cut_does_not_end_speech_nor_does_the_next_begin_any() -> None:
    words = list(itertools.islice(itertools.cycle(VOCABULARY[:5]), 230))
    line = connect(f"{PLAIN}&vad_events=true").receive(say(*words, *PAUSE), CLOSE)
    assert [final["speech_final"] for final in line.finals] == [False, True]
    assert len(line.of_type("SpeechStarted")) == 1
    assert " ".join(line.texts).split() == words


def test_a_muted_client_that_speaks_again_begins_to_speak_once() -> None:
    line = connect(f"{PLAIN}&vad_events=true").receive(say("alpha", *PAUSE))
    line.receive(*[KEEPALIVE] * 6, say("bravo", *PAUSE), CLOSE)
    assert len(line.of_type("SpeechStarted")) == 2
    assert line.texts == ["alpha", "bravo"]
    assert [message["type"] for message in line.messages].count("Error") == 0


# --- UtteranceEnd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pause", "count"), [(9, 0), (30, 1)])
def test_an_utterance_end_needs_its_silence_between_words(pause: int, count: int) -> None:
    query = f"{PLAIN}&interim_results=true&utterance_end_ms=1500"
    line = connect(query).receive(say("alpha", *[None] * pause, "bravo", *PAUSE), CLOSE)
    found = line.of_type("UtteranceEnd")
    assert [message["last_word_end"] for message in found] == [0.1][:count]
    assert all(message["channel"] == [0, 1] for message in found)


def test_an_utterance_end_comes_before_the_speech_that_follows_it() -> None:
    query = f"{PLAIN}&vad_events=true&utterance_end_ms=1000"
    line = connect(query).receive(say("alpha", *[None] * 14, "bravo", *PAUSE), CLOSE)
    kinds = [message["type"] for message in line.messages]
    assert kinds[:4] == ["SpeechStarted", "Results", "UtteranceEnd", "SpeechStarted"]


def test_noise_without_words_does_not_move_the_utterance_end() -> None:
    dialect = DeepgramDialect(request_of(f"{PLAIN}&utterance_end_ms=1000"), StreamParameters(), IDENTITY)
    dialect.open()
    told: list[str] = []
    for event in (
        SpeechStarted(0, 0, 0),
        FinalTranscript(0, 0, "Hi.", (Word(" Hi.", 0, 8_000, 0.9),), "en", 1.0, 0.9, 0, 8_000),
        SpeechStarted(1, 0, 20_000),
        Lag(40_000, 8_000),
        FinalTranscript(1, 0, "", (), "en", 1.0, 0.0, 20_000, 24_000),
    ):
        told += [json.loads(message)["type"] for message in dialect.render(event)]
    assert told == ["Results", "Results", "UtteranceEnd"]


def test_speech_that_began_meanwhile_ends_no_utterance() -> None:
    """The final comes late: by then much was heard, but the silence after its last word was short."""
    dialect = DeepgramDialect(request_of(f"{PLAIN}&utterance_end_ms=1000"), StreamParameters(), IDENTITY)
    dialect.open()
    told: list[str] = []
    for event in (
        SpeechStarted(0, 0, 0),
        SpeechStarted(1, 0, 17_600),
        Lag(80_000, 0),
        FinalTranscript(0, 0, "Hi.", (Word(" Hi.", 0, 8_000, 0.9),), "en", 1.0, 0.9, 0, 8_000),
        FinalTranscript(1, 0, "Ho.", (Word(" Ho.", 17_600, 24_000, 0.9),), "en", 1.0, 0.9, 17_600, 24_000),
    ):
        told += [json.loads(message)["type"] for message in dialect.render(event)]
    assert told == ["Results", "Results", "UtteranceEnd"]


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_without_endpointing_no_speech_ends() -> None:
    line = connect(f"{PLAIN}&endpointing=false").receive(say("alpha", *PAUSE), CLOSE)
    assert [(final["is_final"], final["speech_final"]) for final in line.finals] == [(True, False)]


@pytest.mark.parametrize(
    ("asked", "pause_ms"), [("10", MIN_PAUSE_MS), ("25", MIN_PAUSE_MS), ("700", 700), ("true", 500), ("99999", 10_000)]
)
def test_endpointing_is_the_pause_within_what_whisper_can_use(asked: str, pause_ms: int) -> None:
    assert connect(f"{PLAIN}&endpointing={asked}").config.endpointer.pause_ms == pause_ms


def test_partials_come_only_where_they_are_asked_for_and_say_how_sure_they_are() -> None:
    words = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel"]
    assert len(connect().receive(say(*words)).of_type("Results")) == 0
    interims = connect(f"{PLAIN}&interim_results=true").receive(say(*words)).of_type("Results")
    assert interims
    assert not any(interim["is_final"] for interim in interims)
    for interim in interims:
        found = interim["channel"]["alternatives"][0]
        assert found["confidence"] == 0.9
        assert [word["word"] for word in found["words"]] == found["transcript"].split()
        assert all(word["start"] < word["end"] <= interim["start"] + interim["duration"] for word in found["words"])


def test_two_channels_are_heard_apart_or_mixed() -> None:
    stereo = AudioFormat(channels=2)
    left, right = ["alpha", "bravo", *[None] * 16], [*[None] * 9, "charlie", *PAUSE]
    apart = connect(f"{PLAIN}&channels=2&multichannel=true").receive(encoded(stereo, left, right), CLOSE)
    found = [(final["channel_index"], transcript(final), final["start"] > 0.5) for final in apart.finals]
    assert found == [([0, 2], "alpha bravo", False), ([1, 2], "charlie", True)]
    assert apart.messages[-1]["channels"] == 2
    louder = np.frombuffer(encoded(stereo, left, right), np.int16) * 2  # mixing two channels halves each
    mixed = connect(f"{PLAIN}&channels=2").receive(louder.tobytes(), CLOSE)
    assert mixed.texts == ["alpha bravo", "charlie"]
    assert mixed.finals[0]["channel_index"] == [0, 1]


@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
def test_telephone_audio_is_8_khz_unless_said_otherwise(encoding: str) -> None:
    audio = AudioFormat(Encoding(encoding), 8_000)
    line = connect(f"encoding={encoding}").receive(encoded(audio, ["alpha", "bravo", *PAUSE]), CLOSE)
    assert line.texts == ["alpha bravo"]


WORDS = (Word(" Good", 0, 1_600, 0.9), Word(" morning,", 1_600, 3_200, 0.9), Word(" Dr. O'Hara!", 3_200, 4_800, 0.6))


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (PLAIN, "Good morning, Dr. O'Hara!"),
        (f"{PLAIN}&punctuate=true", "Good morning, Dr. O'Hara!"),
        (f"{PLAIN}&punctuate=false", "good morning dr. o'hara"),
        (f"{PLAIN}&punctuate=false&smart_format=true", "Good morning, Dr. O'Hara!"),
    ],
)
def test_punctuation_stays_unless_it_is_not_wanted(query: str, text: str) -> None:
    dialect = DeepgramDialect(request_of(query), StreamParameters(), IDENTITY)
    dialect.open()
    final = FinalTranscript(0, 0, "Good morning, Dr. O'Hara!", WORDS, "en", 0.9, 0.8, 0, 4_800)
    (message,) = dialect.render(final)
    found = json.loads(message)["channel"]["alternatives"][0]
    assert found["transcript"] == text
    assert [(word["word"], word["punctuated_word"]) for word in found["words"]] == [
        ("good", "Good"),
        ("morning", "morning,"),
        ("dr. o'hara", "Dr. O'Hara!"),
    ]
    assert (found["confidence"], found["words"][2]["confidence"]) == (0.8, 0.6)
    assert "languages" not in found


def test_languages_are_named_where_any_may_be_spoken() -> None:
    dialect = DeepgramDialect(request_of(f"{PLAIN}&language=multi"), StreamParameters(), IDENTITY)
    dialect.open()
    (message,) = dialect.render(FinalTranscript(0, 0, "Guten Tag.", WORDS[:1], "de", 0.9, 0.8, 0, 4_800))
    found = json.loads(message)["channel"]["alternatives"][0]
    assert (found["languages"], found["words"][0]["language"]) == (["de"], "de")


@pytest.mark.parametrize("text", ["...", "Ärger?", "50%", "“Ja,”", "O'Hara's", "今日は。", "-", ""])
def test_a_bare_word_is_never_lost(text: str) -> None:
    assert bool(bare(text)) == bool(text.strip())
    assert bare(bare(text)) == bare(text)


# --- the query -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "language"),
    [("", "en"), ("language=en-US", "en"), ("language=zh-Hant", "zh"), ("language=multi", None),
     ("detect_language=true", None), ("detect_language=false&language=fr", "fr")],
)  # fmt: skip
def test_languages(query: str, language: str | None) -> None:
    assert request_of(query).language == language


def test_languages_to_choose_among() -> None:
    assert request_of("detect_language=de&detect_language=fr-CA").languages == ("de", "fr")


def test_keyterms_and_keywords_are_words_to_expect() -> None:
    request = request_of(
        "keyterm=Hark&keyterm=New+York&keywords=whisper:1.5&keywords=Hark&keywords=10:30&keywords=a:-2"
    )
    assert request.keyterms == ("Hark", "New York", "whisper", "10", "a")
    assert request.options.hotwords == request.keyterms


@pytest.mark.parametrize(
    "query",
    [
        "encoding=g729", "encoding=linear16", f"{PLAIN}0000", f"{PLAIN}&channels=3", "channels=x", "channels=-1",
        "language=xx",
        "interim_results=maybe", "endpointing=soon", "endpointing=-5", "utterance_end_ms=0", "utterance_end_ms=1e9",
        "sample_rate=²", "redact=pci", "redact=false&redact=numbers", "callback=http://example.org",
        "&".join(f"keyterm=word{number}" for number in range(201)), "keyterm=" + "x" * 101,
        "detect_language=de&detect_language=xx", "utt_split=0.1", "utt_split=nan", "utt_split=soon",
    ],
)  # fmt: skip
def test_a_bad_value_of_a_known_parameter_is_refused(query: str) -> None:
    with pytest.raises(BadMessage) as caught:
        request_of(query)
    assert caught.value.code in ("bad_parameter", "unknown_language")


LIVEKIT = (
    "model=nova-3&punctuate=true&smart_format=false&no_delay=true&interim_results=true&encoding=linear16"
    "&vad_events=true&sample_rate=16000&channels=1&endpointing=25&filler_words=true&profanity_filter=false"
    "&numerals=false&mip_opt_out=false&language=en-US"
)


def test_what_livekit_always_sends_is_understood() -> None:
    request = request_of(LIVEKIT)
    assert (request.interim_results, request.vad_events, request.pause_ms) == (True, True, MIN_PAUSE_MS)


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=6))
def test_unknown_parameters_are_ignored(given_parameters: dict[str, str]) -> None:
    known = set(ListenRequest.__dataclass_fields__) | {"keyterm", "keywords", "redact", "callback", "punctuate"}
    known |= {"sample_rate", "endpointing", "smart_format", "detect_language"}
    pairs = [(name, value) for name, value in given_parameters.items() if name not in known]
    assert parse_live(pairs, LANGUAGES) == ListenRequest()


@given(st.sampled_from(["encoding", "sample_rate", "channels", "endpointing", "utterance_end_ms", "keywords",
                        "language", "detect_language", "multichannel", "redact"]), st.text(max_size=20))  # fmt: skip
def test_no_value_breaks_the_parser(name: str, value: str) -> None:
    try:
        request = parse_live([(name, value)], LANGUAGES)
    except BadMessage:
        return
    assert isinstance(request, ListenRequest)


def test_a_recording_cannot_be_heard_channel_by_channel() -> None:
    with pytest.raises(BadMessage, match="multichannel"):
        parse_recorded([("multichannel", "true")], LANGUAGES)
    assert parse_recorded([("encoding", "opus")], LANGUAGES).encoding is None  # its container says what it is


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "x", "[]", "null", '{"type":"Finalise"}', "9" * 5_000, "[" * 100_000,
                                  '{"type":"Configure","keyterms":"x"}', '{"type":"Configure","keyterms":["\\ud800"]}',
                                  '{"type":"Configure","features":{"numerals":1}}'])  # fmt: skip
def test_a_message_that_is_none_is_complained_of_and_the_stream_goes_on(text: str) -> None:
    line = connect().receive(text, say("alpha", *PAUSE), CLOSE)
    (error,) = line.of_type("Error")
    assert (error["variant"], error["message"]) == ("SchemaError", text[:1_000])
    assert line.texts == ["alpha"]


def test_configure_replaces_keyterms_from_the_next_utterance_on() -> None:
    line = connect(f"{PLAIN}&keyterm=old").receive(say("alpha", "bravo", "charlie"))
    line.receive('{"type":"Configure","keyterms":["Hark"],"features":{"numerals":true}}', say("delta"))
    assert line.of_type("ConfigureSuccess")[0]["keyterms"] == ["Hark"]
    assert line.config.options.hotwords == ("old",), "the utterance is not cut"
    line.receive(say(*PAUSE), say("echo", *PAUSE), CLOSE)
    assert line.config.options.hotwords == ("Hark",)
    assert line.texts == ["alpha bravo charlie delta", "echo"]
    assert line.finals[1]["start"] == pytest.approx(1.2, abs=0.04), "the clock goes on"


def test_the_words_of_partials_are_on_the_connections_clock_too() -> None:
    line = connect(f"{PLAIN}&interim_results=true").receive(say("alpha", *PAUSE))
    line.receive('{"type":"Configure","keyterms":["Hark"]}', say(*VOCABULARY[:7]))
    interim = next(result for result in line.of_type("Results") if result["start"] > 0.5)
    found = interim["channel"]["alternatives"][0]["words"]
    assert [(word["word"], word["start"]) for word in found[:2]] == [("alpha", 0.9), ("bravo", 1.0)]


def test_configure_never_begins_in_the_middle_of_a_sample() -> None:
    line = connect().receive(say("alpha", *PAUSE) + b"\0", '{"type":"Configure","keyterms":["Hark"]}')
    odd = b"\0" + say(None, "bravo", *PAUSE)[:-1]
    line.receive(odd, b"\0", CLOSE)
    assert line.texts == ["alpha", "bravo"]


def test_configure_with_too_many_keyterms_fails_and_changes_nothing() -> None:
    terms = json.dumps([f"word{number}" for number in range(201)])
    line = connect(f"{PLAIN}&keyterm=old").receive(f'{{"type":"Configure","keyterms":{terms}}}', say("alpha"), CLOSE)
    (failure,) = line.of_type("ConfigureFailure")
    assert (failure["code"], failure["request_id"]) == ("CONFIGURE_KEYTERM_LIMIT_EXCEEDED", IDENTITY.request_id)
    assert line.config.options.hotwords == ("old",)


def test_configure_turns_punctuation_off_and_on() -> None:
    line = connect()
    final = FinalTranscript(0, 0, "Hi!", (Word(" Hi!", 0, 1_600, 0.9),), "en", 0.9, 0.9, 0, 1_600)
    for wanted, text in ((False, "hi"), (True, "Hi!")):
        line.receive(json.dumps({"type": "Configure", "features": {"punctuate": wanted}}))
        assert transcript(json.loads(line.dialect.render(final)[0])) == text
    assert len(line.of_type("ConfigureSuccess")) == 2


def test_an_empty_message_ends_the_stream_as_it_once_did() -> None:
    line = connect().receive(say("alpha"), b"")
    assert line.texts == ["alpha"]
    assert line.close == (1000, "")


def test_the_metadata_is_of_the_audio_that_came() -> None:
    metadata = connect().receive(b"\0" * 32_000, CLOSE).messages[-1]
    assert metadata["sha256"] == hashlib.sha256(b"\0" * 32_000).hexdigest()
    assert (metadata["duration"], metadata["channels"]) == (1.0, 1)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_speech_that_could_not_be_understood_is_said_and_settles_its_finalize() -> None:
    line = connect(answers_at_once=False, fail_on="bravo").receive(say("alpha", "bravo"), FINALIZE)
    line.answer_all()
    assert line.of_type("Error")[0]["variant"] == "recognizer_failed"
    assert finalized(line) == [("", True)]


class Idle(ClientError):
    code = "idle"


@pytest.mark.parametrize(
    ("error", "code", "count"),
    [
        (Idle(IDLE_REASON), 1011, 0),
        (BadAudio("noise"), 1008, 1),
        (BadMessage("too many"), 1008, 1),
        (Overloaded("full"), 1013, 1),
        (SttError("a bug"), 1011, 1),
    ],
)
def test_close_codes(error: SttError, code: int, count: int) -> None:
    messages, found = connect().dialect.refuse(error)
    assert (found, len(messages)) == (code, count)
    assert len(error.message.encode()) <= 123, "a close frame holds no more"


def test_a_service_that_stops_says_come_again() -> None:
    assert connect().dialect.farewell(going_down=True)[1] == 1012


# --- WAV streams -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), max_size=6))
def test_a_wav_head_is_read_however_it_is_cut(cuts: list[int]) -> None:
    audio, samples = AudioFormat(Encoding.MULAW, 8_000, 2), b"0123"
    extra = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    head = wav_head(audio, 0xFFFFFFFF)
    whole, reader, found = head[:12] + extra + head[12:] + samples, WavHead(), None
    places = [0, *itertools.accumulate(cuts), len(whole)]
    rest = b""
    for start, end in itertools.pairwise(min(place, len(whole)) for place in places):
        if found is None:
            found = reader.push(whole[start:end])
        else:
            rest += whole[start:end]
    assert found is not None
    assert (found[0], found[1] + rest) == (audio, samples)


def test_a_wav_stream_says_itself_what_it_is() -> None:
    audio = AudioFormat(sample_rate_hz=8_000, channels=2)
    stream = wav_head(audio, 0) + encoded(audio, ["alpha", *PAUSE], ["bravo", *PAUSE])
    line = connect("multichannel=true").receive(stream[:20], stream[20:], CLOSE)
    assert sorted(line.texts) == ["alpha", "bravo"]
    assert line.finals[0]["channel_index"][1] == 2


@pytest.mark.parametrize(
    "stream",
    [
        b"OggS" + b"\0" * 100,
        b"\x1aE\xdf\xa3" + b"\0" * 100,
        b"RIFF\0\0\0\0AVI " + b"\0" * 100,
        b"RIFF\0\0\0\0WAVEdata" + b"\0" * 100,
        b"RIFF\0\0\0\0WAVEfmt \x04\0\0\0abcd" + b"\0" * 100,
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + struct.pack("<HHIIHH", 1, 1, 16_000, 0, 3, 24),
        b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff",
    ],
)
def test_a_stream_that_is_neither_declared_nor_wav_is_refused(stream: bytes) -> None:
    with pytest.raises(BadAudio) as caught:
        connect("").receive(stream)
    assert caught.value.code == "unsupported_media"


def test_a_wav_stream_of_three_channels_is_refused() -> None:
    head = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + struct.pack("<HHIIHH", 1, 3, 16_000, 0, 6, 16) + b"data\0\0\0\0"
    with pytest.raises(BadMessage):
        connect("").receive(head)


def _write_golden() -> None:
    for path in sorted(GOLDEN.glob("*.jsonl")):
        lines = [json.dumps(line, ensure_ascii=False) for line in played(read(path))]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write_golden()
