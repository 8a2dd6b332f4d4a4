"""The dialects of telephony without a model: recorded conversations, and what their senders may do wrong.

tests/golden/telephony/*.jsonl are conversations, one message a line. ``client`` (text) and ``frame`` (bytes as hex) are
what the exchange sends, ``event`` is a session's event of EVENTS; everything after such a line is what comes of it:
``action`` for the session, ``server`` for the exchange, ``follower`` for who follows the call. ``python -m
tests.unit.test_telephony_wire`` writes what comes anew, to be looked at before it is kept.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dialect import Action, Audio, Complaint, Dialect, Eof, Gap, Lag, Marked, Say, Start, ToClient
from app.errors import close_code
from app.wire import media_streams
from app.wire.audiohook import AudioHook
from app.wire.audiosocket import AudioSocket, Frames
from app.wire.calls import HANG_UP, Surroundings
from app.wire.media_streams import TELNYX, TWILIO, ByteOrder, MediaStreams
from app.wire.native import StreamParameters
from streaming.config import SessionConfig
from streaming.errors import BadMessage, Overloaded, RecognizerFailed, SttError
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import RecognizerInfo, Word
from tests.support.telephony import (
    CONVERSATION_ID,
    Genesys,
    asterisk_call,
    frame,
    telnyx_media,
    telnyx_start,
    twilio_key,
    twilio_media,
    twilio_start,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "telephony"
WORDS = (Word(" good", 3_200, 6_400, 0.9), Word(" morning", 6_400, 12_800, 0.8))
EVENTS: dict[str, ToClient] = {
    "started": SpeechStarted(0, 0, 3_200),
    "partial": PartialTranscript(0, 0, "good", " morning", 3_200, 9_600),
    "stopped": SpeechStopped(0, 0, 12_800),
    "final": FinalTranscript(0, 0, "Good morning.", WORDS, "en", 0.97, 0.85, 3_200, 12_800),
    "empty": FinalTranscript(1, 0, "", (), "en", 0.5, 0.0, 16_000, 17_600),
    "failed": TranscriptFailed(2, 0, 20_000, 30_000, RecognizerFailed("the engine gave no answer")),
    "lag": Lag(16_000, 12_800),
    "complaint": Complaint(BadMessage("that was wrong")),
    "done": SessionDone(32_000),
}


@dataclass
class Log:
    """A CallLog that remembers."""

    ids: tuple[str, ...] = ()
    events: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)

    def put(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def around(log: Log) -> Surroundings:
    info = RecognizerInfo("scripted", frozenset({"de", "en", "fr"}), 1)
    return Surroundings(log, "5e55", StreamParameters(), lambda: info, close_code)


MAKERS: dict[str, Callable[[Log], Dialect]] = {
    "twilio": lambda log: MediaStreams(TWILIO, around(log)),
    "telnyx": lambda log: MediaStreams(TELNYX, around(log)),
    "audiosocket": lambda log: AudioSocket(around(log), {"language": "de"}),
    "audiohook": lambda log: AudioHook(around(log)),
}


# --- recorded conversations ------------------------------------------------------------------------------------------


def told(action: Action) -> dict[str, Any]:
    match action:
        case Audio(data):
            return {"audio": data.hex()}
        case Gap(samples):
            return {"gap": samples}
        case Start(config):
            audio = config.audio
            shown = f"{audio.encoding.value} {audio.sample_rate_hz} Hz {audio.channels} ch {config.options.language}"
            return {"start": shown, "pause_ms": config.endpointer.pause_ms, "hotwords": list(config.options.hotwords)}
        case Say(message):
            return {"say": message}
        case Complaint(error):
            return {"complaint": error.code, "message": error.message}
        case Eof():
            return {"eof": True}
        case _:
            raise AssertionError(f"telephony has no {action}")


def replay(name: str, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with what comes of each of the exchange's lines."""
    log = Log()
    dialect = MAKERS[name](log)
    numbered: Callable[[Any], Any] = dialect.number if isinstance(dialect, AudioHook) else lambda message: message
    played: list[dict[str, Any]] = []
    for line in lines:
        if not line.keys() & {"client", "frame", "event", "end"}:
            continue
        played.append(line)
        seen = len(log.events)
        sent: Sequence[Any] = ()
        if "event" in line:
            sent = dialect.render(EVENTS[line["event"]])
        elif "end" in line:
            sent, code, _ = dialect.farewell(going_down=line["end"] == "going down")
            played.append({"code": code})
        else:
            actions = dialect.receive(line["client"] if "client" in line else bytes.fromhex(line["frame"]))
            played += [{"action": told(action)} for action in actions if not isinstance(action, Say)]
            sent = [action.message for action in actions if isinstance(action, Say)]
        played += [
            {"server": message.hex() if isinstance(message, bytes) else message} for message in map(numbered, sent)
        ]
        played += [{"follower": event} for event in log.events[seen:]]
    return played


def recorded() -> list[Path]:
    return sorted(GOLDEN.glob("*.jsonl"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_recorded_conversations_go_as_they_were_recorded(path: Path) -> None:
    lines = read(path)
    assert any("follower" in line for line in lines)
    assert replay(path.stem.split("_")[0], lines) == lines


def test_every_dialect_has_a_recorded_conversation() -> None:
    assert {path.stem.split("_")[0] for path in recorded()} == set(MAKERS)


# --- what all have in common -----------------------------------------------------------------------------------------


def started(actions: Sequence[Action]) -> SessionConfig:
    [config] = [action.config for action in actions if isinstance(action, Start)]
    return config


BEGINNINGS: dict[str, list[Any]] = {
    "twilio": [twilio_start("inbound")],
    "telnyx": [telnyx_start()],
    "audiosocket": [frame(0x01, uuid.UUID(int=7).bytes)],
    "audiohook": [Genesys().open("external")],
}
dialects = pytest.mark.parametrize("name", sorted(MAKERS))


def begun(name: str) -> tuple[Dialect, Log]:
    log = Log()
    dialect = MAKERS[name](log)
    assert not dialect.open()
    for message in BEGINNINGS[name]:
        dialect.receive(message)
    return dialect, log


@dialects
def test_followers_get_every_event_with_its_speaker(name: str) -> None:
    dialect, log = begun(name)
    for event in EVENTS.values():
        dialect.render(event)
    assert [event["type"] for event in log.events] == [
        *("call", "speech_started", "partial", "speech_stopped", "final", "final", "failed", "lag", "error", "done")
    ]
    assert {event["label"] for event in log.events if "channel" in event} == {"customer"}
    assert not dialect.render(Marked("of none"))


def test_keys_are_told_to_nobody_where_card_numbers_are_not() -> None:
    log = Log()
    dialect = MediaStreams(TWILIO, replace(around(log), hides_keys=True))
    dialect.receive(twilio_start("inbound"))
    dialect.receive(twilio_key("5"))
    assert [key["digit"] for key in log.of_type("dtmf")] == [""]


@dialects
def test_a_hang_up_ends_a_call_once_even_one_that_never_began(name: str) -> None:
    assert MAKERS[name](Log()).receive(HANG_UP)[-1:] == [Eof()]
    dialect, _ = begun(name)
    assert [action for _ in range(3) for action in dialect.receive(HANG_UP)] == [Eof()]


@dialects
def test_a_refusal_is_told_to_who_follows(name: str) -> None:
    dialect, log = begun(name)
    _, code = dialect.refuse(Overloaded("all places are taken"))
    assert code == 1013
    assert [(error["code"], error["fatal"]) for error in log.of_type("error")] == [("overloaded", True)]


@dialects
def test_a_restart_is_told_to_who_follows(name: str) -> None:
    dialect, log = begun(name)
    _, code, _ = dialect.farewell(going_down=True)
    assert (code, log.of_type("error")[0]["code"]) == (1012, "shutting_down")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = {
    "twilio": ("event", "start", "media", "dtmf", "stop", "streamSid", "callSid", "tracks", "mediaFormat", "encoding"),
    "telnyx": ("event", "start", "media", "dtmf", "stop", "stream_id", "call_control_id", "media_format", "payload"),
    "audiohook": ("version", "type", "id", "seq", "serverseq", "position", "parameters", "media", "language", "digit"),
    "audiosocket": (),
}


@dialects
@given(st.data())
def test_nonsense_is_a_mistake_of_the_client_and_nothing_worse(name: str, data: st.DataObject) -> None:
    """Whatever JSON or bytes come, the answer is actions or an SttError."""
    dialect, _ = begun(name)
    kinds = st.sampled_from(["start", "media", "dtmf", "stop", "open", "update", "paused", "resumed", "close", "ping"])
    objects = st.dictionaries(st.sampled_from(NAMES[name] or ("x",)), json_values | kinds, max_size=5)
    nested = st.dictionaries(st.sampled_from(NAMES[name] or ("x",)), json_values | kinds | objects, max_size=6)
    for message in data.draw(
        st.lists(nested.map(json.dumps) | st.text(max_size=20) | st.binary(max_size=40), max_size=8)
    ):
        try:
            dialect.receive(message)
        except SttError:
            return


@pytest.mark.parametrize("name", ["twilio", "telnyx", "audiohook"])
@pytest.mark.parametrize(("parameter", "value"), [("language", "xx"), ("pause_ms", "1"), ("hotwords", 5)])
def test_a_parameter_that_is_wrong_ends_the_call(name: str, parameter: str, value: object) -> None:
    opening = json.loads(BEGINNINGS[name][0])
    where = {"twilio": ("start", "customParameters"), "telnyx": ("start", "custom_parameters")}
    outer, inner = where.get(name, ("parameters", "customConfig"))
    opening[outer][inner] = {parameter: value}
    log = Log()
    with pytest.raises(BadMessage):
        MAKERS[name](log).receive(json.dumps(opening))
    assert [event["type"] for event in log.events] == ["call"], "they shall learn whose error it is"


@pytest.mark.parametrize("name", ["twilio", "telnyx", "audiohook"])
def test_what_comes_along_is_bounded_and_keys_are_told_to_nobody(name: str) -> None:
    opening = json.loads(BEGINNINGS[name][0])
    where = {"twilio": ("start", "customParameters"), "telnyx": ("start", "custom_parameters")}
    outer, inner = where.get(name, ("parameters", "customConfig"))
    opening[outer][inner] = {"order": "4711", "key": "secret", "token": "secret", "api_key": "secret", "channels": "9"}
    log = Log()
    MAKERS[name](log).receive(json.dumps(opening))
    assert log.events[0]["parameters"] == {"order": "4711", "channels": "9"}
    assert "secret" not in json.dumps(log.events)
    opening[outer][inner]["order"] = "4" * 20_000
    with pytest.raises(BadMessage, match="16384"):
        MAKERS[name](Log()).receive(json.dumps(opening))


# --- Twilio and Telnyx -----------------------------------------------------------------------------------------------


def test_keys_are_found_in_the_first_message() -> None:
    assert media_streams.credentials_in(twilio_start("inbound", token="b", key="a"), TWILIO) == ("a", "b")
    assert media_streams.credentials_in(telnyx_start(key="a"), TELNYX) == ("a",)
    for message in ("", "[]", b"", '{"start":5}', '{"start":{"customParameters":[]}}', twilio_start("inbound")):
        assert media_streams.credentials_in(message, TWILIO) == ()


def test_who_sends_less_than_twilio_does_is_heard_too() -> None:
    """As clients do that copy its messages: no track, no chunk, no timestamp, no format."""
    log = Log()
    dialect = MediaStreams(TWILIO, around(log))
    start = {"event": "start", "streamSid": "MZ1", "start": {"callSid": "CA1", "tracks": ["inbound"]}}
    assert started(dialect.receive(json.dumps(start))).audio.channels == 1
    payload = "//8A"
    assert dialect.receive(json.dumps({"event": "media", "media": {"payload": payload}})) == [Audio(b"\xff\xff\x00")]
    assert log.ids == ("CA1", "MZ1")


def test_one_track_alone_has_its_speaker() -> None:
    log = Log()
    MediaStreams(TWILIO, around(log)).receive(twilio_start("outbound"))
    assert log.events[0]["channels"] == [{"channel": 0, "track": "outbound", "label": "agent"}]


def test_nothing_is_heard_after_stop() -> None:
    dialect, _ = begun("twilio")
    assert dialect.receive('{"event":"stop"}') == [Eof()]
    assert not dialect.receive(twilio_media("inbound", 1, 0, b"\0"))


def test_telnyx_stop_brings_what_waited_for_its_turn() -> None:
    dialect, _ = begun("telnyx")
    assert not dialect.receive(telnyx_media(3, b"\x03" * 160))
    assert not dialect.receive(telnyx_media(2, b"\x02" * 160))
    *placed, end = dialect.receive(HANG_UP)
    assert end == Eof()
    [audio] = [one for one in placed if isinstance(one, Audio) and 3 in one.data]
    assert isinstance(placed[0], Audio | Gap)
    assert audio.data.count(3) == 160


@pytest.mark.parametrize("order", ["<i2", ">i2"])
def test_the_byte_order_of_16_bit_audio_is_heard(order: str) -> None:
    """RFC 3551 says big-endian; those who send it do not agree."""
    time_s = np.arange(1_600) / 16_000
    sound = np.round(2_000 * np.sin(2 * np.pi * 200 * time_s) + np.random.default_rng(1).normal(0, 100, 1_600))
    pieces = np.concatenate([np.zeros(320), sound]).astype(np.int16).reshape(-1, 320)
    listener = ByteOrder()
    heard = np.concatenate(
        [np.frombuffer(listener.to_little(piece.astype(order).tobytes()), "<i2") for piece in pieces]
    )
    assert heard.tolist() == pieces.ravel().tolist()


# --- AudioSocket -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=30)), max_size=10), st.integers(1, 20))
def test_frames_do_not_depend_on_how_tcp_cuts_them(sent: list[tuple[int, bytes]], size: int) -> None:
    data = b"".join(frame(kind, payload) for kind, payload in sent)
    frames = Frames()
    taken = [one for start in range(0, len(data), size) for one in frames.take(data[start : start + size])]
    assert taken == sent


def test_a_call_of_asterisk_has_the_settings_parameters() -> None:
    log = Log()
    dialect = AudioSocket(around(log), {"language": "de"})
    call_id = uuid.UUID(int=7)
    actions = [action for data in asterisk_call(call_id, b"\1\0" * 160) for action in dialect.receive(data)]
    assert started(actions).options.language == "de"
    assert actions[1:] == [Audio(b"\1\0" * 160)]
    assert log.ids == (str(call_id),)


def test_an_error_of_asterisk_is_told_to_who_follows() -> None:
    dialect, _ = begun("audiosocket")
    [complaint] = dialect.receive(frame(0xFF, b"\2"))
    assert isinstance(complaint, Complaint)
    assert "02" in complaint.error.message
    assert not dialect.receive(frame(0x7F, b"new"))


# --- AudioHook -------------------------------------------------------------------------------------------------------


def hooked(*channels: str) -> tuple[AudioHook, Genesys, Log]:
    log, genesys = Log(), Genesys()
    hook = AudioHook(around(log))
    actions = hook.receive(genesys.open(*channels))
    [opened] = [action.message for action in actions if isinstance(action, Say)]
    genesys.take(hook.number(opened))
    return hook, genesys, log


def test_messages_are_numbered_where_they_leave() -> None:
    hook, genesys, _ = hooked("external")
    [pong] = hook.receive(genesys.message("ping"))
    [event] = hook.render(EVENTS["final"])
    assert isinstance(pong, Say)
    for message in (event, pong.message):  # the event was said later and overtook
        genesys.take(hook.number(message))


def test_the_exchange_is_not_sent_partials_nor_what_has_no_words() -> None:
    hook, _, _ = hooked("external")
    assert [name for name, event in EVENTS.items() if hook.render(event)] == ["final"]


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"seq": 3},
        {"serverseq": 5},
        {"serverseq": -1},
        {"serverseq": None},
        {"id": "another"},
        {"id": None},
        {"type": None},
        {"type": "open"},
        {"parameters": 5},
        {"type": "resumed", "position": "2 s"},
        {"type": "discarded", "position": "PT9000S"},
    ],
)
def test_rules_of_the_protocol_are_kept(change: dict[str, object]) -> None:
    hook, genesys, _ = hooked("external")
    message = json.loads(genesys.message("ping")) | change
    with pytest.raises(BadMessage):
        hook.receive(json.dumps(message))


def test_audio_is_heard_between_open_and_close_alone() -> None:
    with pytest.raises(BadMessage):
        AudioHook(around(Log())).receive(b"\xff")
    hook, genesys, _ = hooked("external", "internal")
    assert hook.receive(b"\xff\xfe") == [Audio(b"\xff\xfe")]
    with pytest.raises(BadMessage):
        hook.receive(b"\xff")  # half a frame
    hook.receive(genesys.message("paused"))
    with pytest.raises(BadMessage):
        hook.receive(b"\xff\xfe")
    hook.receive(genesys.message("resumed", start="PT0S", discarded="PT1S"))
    assert hook.receive(b"\xff\xfe") == [Audio(b"\xff\xfe")]
    assert hook.receive(genesys.message("close", reason="end")) == [Eof()]
    assert not hook.receive(b"\xff\xfe")


def test_a_new_language_is_heard_from_there_on() -> None:
    hook, genesys, _ = hooked("external")
    [start, said] = hook.receive(genesys.message("update", language="de-DE"))
    assert started([start]).options.language == "de"
    assert isinstance(said, Say)
    assert genesys.take(hook.number(said.message))["type"] == "updated"
    [complaint, _] = hook.receive(genesys.message("update", language="tlh"))
    assert isinstance(complaint, Complaint)


def test_a_connection_that_only_tries_the_service_is_no_call() -> None:
    log, genesys = Log(), Genesys()
    hook = AudioHook(around(log))
    nobody = genesys.open("external").replace(CONVERSATION_ID, str(uuid.UUID(int=0)))
    assert any(isinstance(action, Say) for action in hook.receive(nobody))
    assert log.ids == ()


def test_who_is_not_let_in_is_told_so() -> None:
    hook, genesys, _ = hooked("external")
    for code, reason in (("unauthorized", "unauthorized"), ("bad_message", "error")):
        [message], _ = hook.refuse(BadMessage("no", code=code))
        assert genesys.take(hook.number(message))["parameters"] == {"reason": reason, "info": "no"}


def _record() -> None:
    for path in recorded():
        lines = [json.dumps(line, ensure_ascii=False) for line in replay(path.stem.split("_")[0], read(path))]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
