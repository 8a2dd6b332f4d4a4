"""OpenAI's Realtime transcription sessions: every event against the SDK's own types, whole transcripts of what is sent
and heard, and the rules that clients rely on, over any order of what the engine answers."""

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel

from app.dialect import Action, Audio, Commit, Complaint, Lag, Mark, Marked, Say, Start, ToClient
from app.wire.native import StreamParameters
from app.wire.openai_realtime import OpenAIRealtime
from streaming.config import AudioFormat, Encoding
from streaming.errors import BadMessage, ClientError, Overloaded, RecognizerFailed, SttError
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import RecognizerInfo, Word

Json = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "golden" / "openai_realtime.jsonl"
INFO = RecognizerInfo(model="base", languages=frozenset({"en", "de", "fr", "zh"}), capacity=1)
CLASSES = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(RealtimeServerEvent)[0])
}
# What OpenAI's server sends, and its SDK's type for a session that is asked for does not list.
UNLISTED = {"session.id", "session.object"}


def unlisted(model: BaseModel, path: str = "") -> Iterator[str]:
    """Fields that the SDK's type does not have, whatever their depth."""
    yield from (path + name for name in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                yield from unlisted(item, f"{path}{name}.")


def checked(text: str | bytes) -> Json:
    """The event, which must be one of the SDK's."""
    body: Json = json.loads(text)
    if not body["type"].startswith("transcription_session."):  # the beta's, which the SDK has no more
        event = CLASSES[body["type"]].model_validate(body)
        assert set(unlisted(event)) <= UNLISTED
    return body


class Client:
    """A dialect with nothing behind it: what is sent to it, and what it is told of."""

    def __init__(self, **options: Any) -> None:
        self.dialect = OpenAIRealtime(
            "0123456789abcdef", StreamParameters(), lambda: INFO, lambda error: 4000, **options
        )
        self.heard: list[Json] = []
        self.actions: list[Action] = []
        self._do(self.dialect.open())

    def send(self, kind: str, **fields: Any) -> list[Action]:
        return self.send_text(json.dumps({"type": kind, **fields}))

    def send_text(self, text: str | bytes) -> list[Action]:
        return self._do(self.dialect.receive(text))

    def _do(self, actions: Sequence[Action]) -> list[Action]:
        """Marks come back at once, as where the session has nothing to say."""
        for action in actions:
            match action:
                case Say(message):
                    self.heard.append(checked(message))
                case Mark(mark) | Commit(mark):
                    self.tell(Marked(mark))
        self.actions += actions
        return list(actions)

    def append(self, audio: bytes = bytes(4_800)) -> list[Action]:
        return self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())

    def update(self, **sound: Any) -> list[Action]:
        return self.send("session.update", session={"type": "transcription", "audio": {"input": sound}})

    def tell(self, *events: ToClient) -> list[Json]:
        new = [checked(text) for event in events for text in self.dialect.render(event)]
        self.heard += new
        return new

    def of_type(self, kind: str) -> list[Json]:
        return [body for body in self.heard if body["type"].endswith(kind)]

    @property
    def sound(self) -> Json:
        shown: Json = self.of_type("session.updated")[-1]["session"]["audio"]["input"]
        return shown

    @property
    def error(self) -> Json:
        shown: Json = self.heard[-1]
        assert shown["type"] == "error"
        return dict(shown["error"])


def manual(**options: Any) -> Client:
    client = Client(**options)
    client.update(turn_detection=None)
    client.append()
    return client


def started(utterance: int, at_s: float = 1.0) -> SpeechStarted:
    return SpeechStarted(utterance, 0, int(at_s * 16_000))


def stopped(utterance: int, at_s: float = 2.0) -> SpeechStopped:
    return SpeechStopped(utterance, 0, int(at_s * 16_000))


def partial(utterance: int, committed: str) -> PartialTranscript:
    return PartialTranscript(utterance, 0, committed, "maybe", 0, 16_000)


def final(utterance: int, text: str, language: str = "en") -> FinalTranscript:
    words = tuple(Word(f" {word}", 0, 1_600, 0.5) for word in text.split())
    return FinalTranscript(utterance, 0, text, words, language, 0.9, 0.5, 16_000, 32_000)


def failed(utterance: int) -> TranscriptFailed:
    return TranscriptFailed(utterance, 0, 0, 16_000, RecognizerFailed("no answer"))


def kinds(bodies: Sequence[Json]) -> list[str]:
    return [body["type"].removeprefix("input_audio_buffer.").removeprefix("conversation.item.") for body in bodies]


COMMITTED = ["committed", "added", "done"]
DELTA, COMPLETED = "input_audio_transcription.delta", "input_audio_transcription.completed"


# --- the session -----------------------------------------------------------------------------------------------------


def test_the_session_is_shown_before_anything_is_sent() -> None:
    [created] = Client(model="gpt-4o-transcribe").heard
    assert created["session"] == {
        "type": "transcription",
        "object": "realtime.transcription_session",
        "id": "sess_0123456789abcdef",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24_000},
                "transcription": {"model": "gpt-4o-transcribe"},
                "noise_reduction": None,
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.5,
                    "prefix_padding_ms": 300,
                    "silence_duration_ms": 500,
                    "idle_timeout_ms": None,
                },
            }
        },
        "include": None,
    }


def test_without_a_model_the_one_that_is_served_is_shown() -> None:
    assert Client().heard[0]["session"]["audio"]["input"]["transcription"] == {"model": "base"}


def test_an_update_changes_what_it_names_and_nothing_else() -> None:
    client = Client()
    client.update(transcription={"model": "whisper-1", "language": "de-AT", "prompt": "Grüße", "keywords": ["Hark"]})
    client.update(format={"type": "audio/pcmu"}, turn_detection={"type": "server_vad", "silence_duration_ms": 350})
    client.update(
        transcription={"language": ""}, noise_reduction={"type": "near_field"}, turn_detection={"threshold": 0.6}
    )
    client.send(
        "session.update", session={"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}
    )
    assert client.sound == {
        "format": {"type": "audio/pcmu"},
        "transcription": {"model": "whisper-1", "prompt": "Grüße", "keywords": ["Hark"]},
        "noise_reduction": None,
        "turn_detection": {
            "type": "server_vad",
            "threshold": 0.6,
            "prefix_padding_ms": 300,
            "silence_duration_ms": 350,
            "idle_timeout_ms": None,
        },
    }
    assert client.heard[-1]["session"]["include"] == ["item.input_audio_transcription.logprobs"]
    [start, _, _] = client.append()
    assert isinstance(start, Start)
    assert start.config.audio == AudioFormat(Encoding.MULAW, 8_000)
    assert (start.config.endpointer.threshold, start.config.endpointer.pause_ms) == (0.6, 350)
    assert (start.config.options.language, start.config.options.prompt) == (None, "Grüße")
    assert start.config.options.hotwords == ("Hark",)


@pytest.mark.parametrize(
    ("given", "encoding", "rate_hz"),
    [
        ({"type": "audio/pcm", "rate": 24_000}, Encoding.LINEAR16, 24_000),
        ({"type": "audio/pcm"}, Encoding.LINEAR16, 24_000),
        ({"type": "audio/pcmu"}, Encoding.MULAW, 8_000),
        ({"type": "audio/pcma"}, Encoding.ALAW, 8_000),
    ],
)
def test_formats(given: Json, encoding: Encoding, rate_hz: int) -> None:
    client = Client()
    client.update(format=given)
    start = client.append()[0]
    assert isinstance(start, Start)
    assert start.config.audio == AudioFormat(encoding, rate_hz)


def test_null_turns_semantic_ones_and_back() -> None:
    client = Client()
    client.update(turn_detection=None)
    assert client.sound["turn_detection"] is None
    client.update(turn_detection={"type": "semantic_vad", "eagerness": "high"})
    assert client.sound["turn_detection"] == {"type": "semantic_vad", "eagerness": "high"}
    client.update(turn_detection={"type": "server_vad"})
    assert client.sound["turn_detection"]["silence_duration_ms"] == 500


@pytest.mark.parametrize(
    ("sound", "param"),
    [
        ({"format": {"type": "audio/opus"}}, "format.type"),
        ({"format": {"type": ["audio/pcm"]}}, "format.type"),
        ({"format": {"type": "audio/pcm", "rate": 16_000}}, "format.rate"),
        ({"format": "pcm16"}, "format"),
        ({"transcription": {"language": "xx"}}, "transcription.language"),
        ({"transcription": {"languages": ["en", "xx"]}}, "transcription.languages"),
        ({"transcription": {"languages": "en"}}, "transcription.languages"),
        ({"transcription": {"keywords": [1]}}, "transcription.keywords"),
        ({"transcription": {"keywords": ["x" * 101]}}, "transcription.keywords"),
        ({"transcription": {"prompt": 5}}, "transcription.prompt"),
        ({"transcription": {"prompt": "half a pair: \ud83d"}}, "transcription.prompt"),
        ({"transcription": {"model": {}}}, "transcription.model"),
        ({"transcription": {"delay": "none"}}, "transcription.delay"),
        ({"turn_detection": {"type": "whatever"}}, "turn_detection.type"),
        ({"turn_detection": {"type": "semantic_vad", "eagerness": "very"}}, "turn_detection.eagerness"),
        ({"turn_detection": {"threshold": 1.5}}, "turn_detection.threshold"),
        ({"turn_detection": {"threshold": True}}, "turn_detection.threshold"),
        ({"turn_detection": {"silence_duration_ms": -1}}, "turn_detection.silence_duration_ms"),
        ({"turn_detection": {"prefix_padding_ms": "300"}}, "turn_detection.prefix_padding_ms"),
    ],
)
def test_a_wrong_update_changes_nothing_and_names_the_field(sound: Json, param: str) -> None:
    client = Client()
    client.send("session.update", event_id="mine", session={"type": "transcription", "audio": {"input": sound}})
    assert client.error["param"] == f"session.audio.input.{param}"
    assert (client.error["event_id"], client.error["type"]) == ("mine", "invalid_request_error")
    client.update()
    assert client.sound == Client().heard[0]["session"]["audio"]["input"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        (b"\0\0", "bad_message"),
        ("{}", "invalid_value"),
        ('{"type":["session.update"]}', "invalid_value"),
        ('{"type":"response.create"}', "invalid_value"),
        ('{"type":"session.update"}', "missing_required_parameter"),
        ('{"type":"session.update","session":{"type":"realtime"}}', "invalid_value"),
        ('{"type":"session.update","session":{"input_audio_format":"pcm16"}}', "unknown_parameter"),
        ('{"type":"session.update","session":{"audio":5}}', "invalid_type"),
        ('{"type":"input_audio_buffer.append"}', "invalid_value"),
        ('{"type":"input_audio_buffer.append","audio":"äöü"}', "invalid_value"),
        ('{"type":"input_audio_buffer.append","audio":"a"}', "invalid_value"),
        ('{"type":"conversation.item.delete","item_id":"item_x"}', "item_delete_invalid_item_id"),
        ('{"type":"conversation.item.retrieve","item_id":"item_x"}', "item_retrieve_unsupported"),
    ],
)
def test_a_mistake_is_an_error_and_the_session_goes_on(text: str | bytes, code: str) -> None:
    client = Client()
    client.send_text(text)
    assert client.error["code"] == code
    assert client.update()


def test_an_event_id_that_is_no_text_comes_back_all_the_same() -> None:
    client = Client()
    client.send_text('{"type":"x","event_id":"half a pair: \\ud83d"}')
    assert client.error["event_id"] == "half a pair: ?"


def test_what_a_conversation_or_a_newer_client_sets_is_passed_over() -> None:
    client = Client()
    session = {
        "type": "transcription",
        "instructions": "be kind",
        "audio": {"output": {"voice": "x"}, "input": {"new": 1}},
    }
    client.send("session.update", session=session)
    assert client.heard[-1]["type"] == "session.updated"


def test_the_same_settings_again_begin_nothing_anew() -> None:
    """A client that takes a socket from its pool sends them first."""
    client = Client()
    client.update(transcription={"language": "en"})
    assert [type(action) for action in client.append()] == [Start, Mark, Audio]
    client.update(transcription={"language": "en"})
    assert [type(action) for action in client.append()] == [Mark, Audio]
    assert [type(action) for action in client.append()] == [Audio]
    client.update(transcription={"language": "de"})
    assert [type(action) for action in client.append()] == [Start, Mark, Audio]


def test_the_beta_is_understood() -> None:
    client = Client()
    session = {
        "input_audio_format": "g711_alaw",
        "input_audio_transcription": {"language": "de"},
        "turn_detection": None,
    }
    client.send("transcription_session.update", session=session)
    assert client.heard[-1]["type"] == "transcription_session.updated"
    assert client.heard[-1]["session"]["input_audio_format"] == "g711_alaw"
    assert client.heard[-1]["session"]["turn_detection"] is None
    client.append()
    client.send("input_audio_buffer.commit")
    assert kinds(client.heard[2:]) == ["committed", "created", COMPLETED]
    client.send("transcription_session.update", session={"input_audio_format": "opus"})
    assert client.error["param"] == "session.input_audio_format"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SOUND_NAMES = ["format", "transcription", "turn_detection", "type", "rate", "audio", "input", "include", "eagerness"]
TEXT_NAMES = ["model", "language", "languages", "keywords", "prompt", "delay"]
TURN_NAMES = ["threshold", "prefix_padding_ms", "silence_duration_ms"]
NAMES = st.sampled_from([*SOUND_NAMES, *TEXT_NAMES, *TURN_NAMES])


@given(
    st.dictionaries(NAMES, json_values | st.dictionaries(NAMES, json_values), max_size=4),
    st.sampled_from(["session", "audio", "input"]),
)
def test_any_update_is_taken_or_refused(values: Json, depth: str) -> None:
    session: Json = {"session": values, "audio": {"audio": values}, "input": {"audio": {"input": values}}}[depth]
    client = Client()
    client.send("session.update", session=session)
    assert client.heard[-1]["type"] in ("session.updated", "error")
    client.append()


@given(st.text() | st.binary() | json_values.map(json.dumps))
def test_any_message_is_answered_or_an_error(text: str | bytes) -> None:
    Client().send_text(text)


# --- turns that the service finds ------------------------------------------------------------------------------------


def test_a_turn_from_its_start_to_its_text() -> None:
    client = Client()
    client.append(bytes(48_000 * 3))
    assert kinds(client.tell(started(0, 1.0))) == ["speech_started"]
    assert client.heard[-1]["audio_start_ms"] == 700
    assert client.tell(partial(0, "")) == []
    [delta] = client.tell(partial(0, "Good"))
    assert delta["delta"] == "Good"
    assert client.tell(partial(0, "Good")) == []
    news = client.tell(stopped(0, 2.0))
    assert kinds(news) == ["speech_stopped", *COMMITTED]
    assert news[0]["audio_end_ms"] == 2_500
    assert news[1]["previous_item_id"] is None
    delta, completed = client.tell(final(0, "Good morning."))
    assert delta["delta"] == " morning."
    assert completed["transcript"] == "Good morning."
    assert completed["usage"] == {"type": "duration", "seconds": 1.8}
    assert completed["languages"] == [{"code": "en"}]
    assert "logprobs" not in completed
    assert len({body["item_id"] for body in client.heard[1:] if "item_id" in body}) == 1


def test_the_next_item_names_the_one_before_it() -> None:
    client = Client()
    client.append()
    client.tell(started(0), stopped(0), started(1), stopped(1), final(0, "One."), final(1, "Two."))
    first, second = client.of_type("committed")
    assert (first["previous_item_id"], second["previous_item_id"]) == (None, first["item_id"])


def test_deltas_of_an_item_wait_until_the_one_before_is_complete() -> None:
    client = Client()
    client.append()
    client.tell(started(0), partial(0, "One"), stopped(0), started(1))
    assert client.tell(partial(1, "Three")) == []
    news = client.tell(final(0, "One two."))
    assert kinds(news) == [DELTA, COMPLETED, DELTA]
    assert [body.get("delta") for body in news] == [" two.", None, "Three"]


def test_a_failure_is_the_items_own() -> None:
    client = Client()
    client.append()
    client.tell(started(0), stopped(0), started(1), partial(1, "Fine"))
    news = client.tell(failed(0))
    assert kinds(news) == ["input_audio_transcription.failed", DELTA]
    assert news[0]["error"] == {
        "type": "server_error",
        "code": "recognizer_failed",
        "message": "no answer",
        "param": None,
    }


def test_logprobs_on_request() -> None:
    client = Client()
    client.send("session.update", session={"include": ["item.input_audio_transcription.logprobs"]})
    client.append()
    client.tell(started(0), stopped(0), final(0, "Good morning."))
    tokens = client.heard[-1]["logprobs"]
    assert "".join(token["token"] for token in tokens) == "Good morning."
    assert {token["logprob"] for token in tokens} == {-0.6931}
    assert bytes(tokens[0]["bytes"]).decode() == tokens[0]["token"]


def test_a_commit_of_the_client_ends_the_turn_and_is_no_second_item() -> None:
    client = Client()
    client.append()
    client.tell(started(0))
    marks = client.dialect.receive('{"type":"input_audio_buffer.commit"}')
    assert isinstance(marks[0], Mark)
    assert isinstance(marks[1], Commit)
    assert client.tell(Marked(marks[0].mark)) == []
    assert kinds(client.tell(stopped(0))) == ["speech_stopped", *COMMITTED]
    assert client.tell(Marked(marks[1].mark)) == []
    client.send("input_audio_buffer.commit")  # of nothing
    assert kinds(client.heard[-3:]) == COMMITTED
    assert kinds(client.tell(final(0, "One."))) == [DELTA, COMPLETED, COMPLETED]
    assert client.heard[-1]["transcript"] == ""


def test_what_is_cleared_while_it_is_spoken_is_never_said() -> None:
    client = Client()
    client.append()
    client.tell(started(0), partial(0, "One"))
    marks = client.dialect.receive('{"type":"input_audio_buffer.clear"}')
    assert isinstance(marks[0], Mark)
    assert isinstance(marks[1], Commit)
    client.tell(Marked(marks[0].mark))
    assert kinds(client.tell(stopped(0))) == ["speech_stopped"]
    assert kinds(client.tell(Marked(marks[1].mark))) == ["cleared"]
    assert client.tell(final(0, "One two.")) == []
    assert kinds(client.tell(started(1), stopped(1), final(1, "Three."))) == [
        "speech_started",
        "speech_stopped",
        *COMMITTED,
        DELTA,
        COMPLETED,
    ]


def test_clearing_nothing_is_answered() -> None:
    client = Client()
    client.send("input_audio_buffer.clear")
    assert kinds(client.heard[1:]) == ["cleared"]


# --- turns that the client ends --------------------------------------------------------------------------------------


def test_one_item_is_all_that_was_said_between_two_commits() -> None:
    client = manual()
    assert client.tell(started(0), stopped(0)) == []
    news = client.tell(final(0, "One."), started(1), partial(1, "Two"), stopped(1))
    assert [body["delta"] for body in news] == ["One.", " Two"]
    client.send("input_audio_buffer.commit")
    assert kinds(client.heard[-3:]) == COMMITTED
    news = client.tell(started(2), partial(2, "Not yours"), final(1, "Two three."))
    assert kinds(news) == [DELTA, COMPLETED, DELTA]
    assert news[1]["transcript"] == "One. Two three."
    assert "".join(body["delta"] for body in client.of_type("delta")[:-1]) == "One. Two three."
    assert news[2]["item_id"] != news[1]["item_id"]
    client.send("input_audio_buffer.commit")
    client.tell(final(2, "Not yours."))
    assert client.heard[-1]["transcript"] == "Not yours."
    assert [body["usage"]["seconds"] for body in client.of_type("completed")] == [0.1, 0.0]


def test_text_waits_for_the_utterance_before_it_in_the_same_item() -> None:
    client = manual()
    assert client.tell(started(0), stopped(0), started(1), partial(1, "Two")) == []
    assert [body["delta"] for body in client.tell(final(0, "One."))] == ["One. Two"]


def test_where_no_spaces_are_written_none_are_put() -> None:
    client = manual()
    client.tell(started(0), stopped(0), final(0, "你好。", "zh"), started(1), stopped(1), final(1, "再见。", "zh"))
    client.send("input_audio_buffer.commit")
    assert client.heard[-1]["transcript"] == "你好。再见。"
    assert client.heard[-1]["languages"] == [{"code": "zh"}]


def test_an_empty_commit_is_answered_with_an_empty_text() -> None:
    client = Client()
    client.update(turn_detection=None)
    client.send("input_audio_buffer.commit")  # before any audio
    client.append()
    client.send("input_audio_buffer.commit")  # of silence
    assert kinds(client.heard[2:]) == [*COMMITTED, COMPLETED] * 2
    assert [body["transcript"] for body in client.of_type("completed")] == ["", ""]
    assert [body["usage"]["seconds"] for body in client.of_type("completed")] == [0.0, 0.1]


def test_a_clear_forgets_what_was_said_since_the_last_commit() -> None:
    client = manual()
    client.tell(started(0), stopped(0), final(0, "One."), started(1), stopped(1))
    client.send("input_audio_buffer.clear")
    assert client.heard[-1]["type"] == "input_audio_buffer.cleared"
    assert client.tell(final(1, "Two."), started(2), stopped(2)) == []
    client.send("input_audio_buffer.commit")
    client.tell(final(2, "Three."))
    assert client.heard[-1]["transcript"] == "Three."
    assert client.heard[-1]["usage"]["seconds"] == 0.0  # no audio came after the clear


def test_an_item_with_a_hole_has_failed() -> None:
    client = manual()
    client.tell(started(0), stopped(0), final(0, "One."), started(1), stopped(1), failed(1))
    client.send("input_audio_buffer.commit")
    assert kinds(client.heard[-1:]) == ["input_audio_transcription.failed"]


def test_a_change_to_the_services_turns_commits_what_the_client_had_not() -> None:
    client = manual()
    client.tell(started(0), stopped(0), final(0, "One."))
    client.update(turn_detection={"type": "server_vad"})
    client.append()
    assert kinds(client.heard[-4:]) == [*COMMITTED, COMPLETED]
    assert client.heard[-1]["usage"]["seconds"] == 0.1
    assert kinds(client.tell(started(1))) == ["speech_started"]


def test_when_the_service_goes_down_what_was_not_committed_is_said() -> None:
    client = manual()
    client.tell(started(0), stopped(0), final(0, "One."), SessionDone(16_000))
    assert client.heard[-1]["transcript"] == "One."
    assert Client().tell(SessionDone(0)) == []


def test_a_client_that_never_commits_gets_its_text_all_the_same() -> None:
    client = manual()
    for utterance in range(1_001):
        client.tell(started(utterance), stopped(utterance), final(utterance, "x"))
    [completed] = client.of_type("completed")
    assert completed["transcript"] == " ".join("x" * 1_000)


def test_an_item_can_be_deleted_and_another_not() -> None:
    client = manual()
    client.send("input_audio_buffer.commit")
    item_id = client.of_type("committed")[0]["item_id"]
    client.send("conversation.item.delete", item_id=item_id)
    assert client.heard[-1]["item_id"] == item_id
    for other in (item_id[:-1] + "7", item_id + "0" * 5_000, "item_1"):
        client.send("conversation.item.delete", item_id=other)
        assert client.error["param"] == "item_id"


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (ClientError("no key", code="unauthorized"), True, 4000),
        (Overloaded("full"), False, 4000),
        (SttError("a bug"), False, 4000),
        (ClientError("quiet", code="idle"), False, 1001),
    ],
)
def test_only_what_is_no_use_to_try_again_is_an_error_event(error: SttError, says: bool, code: int) -> None:
    messages, closed = Client().dialect.refuse(error)
    assert [checked(message)["error"]["code"] for message in messages] == [error.code] * says
    assert closed == code


def test_farewells() -> None:
    assert Client().dialect.farewell(going_down=True) == ([], 1012, "service restart")
    assert Client().dialect.farewell(going_down=False) == ([], 1000, "")


def test_complaints_and_heartbeats() -> None:
    client = Client()
    assert client.tell(Lag(0, 0)) == []
    client.tell(Complaint(BadMessage("no")))
    assert client.error["code"] == "bad_message"


# --- any course of events --------------------------------------------------------------------------------------------


@st.composite
def courses(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Utterances one after the other; each is answered at any time after its stop, in their order."""
    course: list[tuple[str, int]] = []
    answers: list[int] = []
    for utterance in range(draw(st.integers(0, 5))):
        course.append(("start", utterance))
        course += [("partial", utterance)] * draw(st.integers(0, 3))
        course.append(("stop", utterance))
        answers.append(utterance)
        while answers and draw(st.booleans()):
            course.append(("answer", answers.pop(0)))
        course += [("commit", 0)] * draw(st.integers(0, 2))
    return [*course, ("commit", 0), *(("answer", utterance) for utterance in answers)]


@given(courses(), st.booleans(), st.lists(st.sampled_from(["one two three", "four", "", None]), min_size=6, max_size=6))
def test_every_item_is_answered_once_in_order_and_its_deltas_add_up(
    course: list[tuple[str, int]], by_client: bool, texts: list[str | None]
) -> None:
    client = manual() if by_client else Client()
    client.append()
    shown = dict.fromkeys(range(6), 0)
    for what, utterance in course:
        words = (texts[utterance] or "").split()
        match what:
            case "start":
                client.tell(started(utterance))
            case "partial":
                shown[utterance] = min(len(words), shown[utterance] + 1)
                client.tell(partial(utterance, " ".join(words[: shown[utterance]])))
            case "stop":
                client.tell(stopped(utterance))
            case "answer":
                text = texts[utterance]
                client.tell(failed(utterance) if text is None else final(utterance, text))
            case _:
                client.send("input_audio_buffer.commit")
    committed = [body["item_id"] for body in client.of_type("committed")]
    outcomes = [body for body in client.heard if body["type"].endswith((".completed", ".failed"))]
    assert [body["item_id"] for body in outcomes] == committed
    assert len(set(committed)) == len(committed)
    for body in outcomes:
        deltas = "".join(delta["delta"] for delta in client.of_type(".delta") if delta["item_id"] == body["item_id"])
        assert deltas == body["transcript"] if "transcript" in body else True
    said = [item for item, _ in itertools.groupby(b["item_id"] for b in client.heard if "content_index" in b)]
    assert len(said) == len(set(said)), "events of two items are mixed"
    event_ids = [body["event_id"] for body in client.heard]
    assert len(set(event_ids)) == len(event_ids)


# --- a whole conversation, as recorded -------------------------------------------------------------------------------


def play(script: Sequence[Json]) -> Iterator[Json]:
    """The script's lines, each that is sent or told followed by what is answered now."""
    client = Client()
    yield from ({"server": body} for body in client.heard)
    say = {"started": started, "stopped": stopped, "partial": partial, "final": final, "failed": failed}
    for line in script:
        before = len(client.heard)
        if "client" in line:
            client.send_text(json.dumps(line["client"]))
        elif "told" in line:
            kind, *rest = line["told"]
            client.tell(say[kind](*rest))
        elif "silence_bytes" in line:  # appended: base64 of them is long to read
            client.append(bytes(line["silence_bytes"]))
        else:
            continue
        yield line
        yield from ({"server": body} for body in client.heard[before:])


def test_a_recorded_conversation_is_answered_as_it_was() -> None:
    script = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]
    assert list(play(script)) == script
