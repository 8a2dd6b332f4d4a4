"""Hark's own protocol, ``/v1/stream``: JSON text for control and results, binary for audio. See docs/protocol.md.

Pure: names and values in, frozen requests out; session outputs in, JSON-ready dictionaries out. ``NativeDialect`` puts
these together for one connection.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from app.dialect import Action, Audio, Commit, Complaint, Eof, Lag, Marked, Say, Start, ToClient, Wire
from streaming.audio import samples_to_ms
from streaming.config import (
    AudioFormat,
    Encoding,
    EndpointerConfig,
    PartialConfig,
    SegmenterConfig,
    SessionConfig,
    cut_zone_ms,
)
from streaming.errors import BadMessage, SttError
from streaming.events import (
    ClientEvent,
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import DecodeOptions, RecognizerInfo, Task, Word

MAX_PROMPT_CHARS = 1_000  # Whisper looks back at 224 tokens at most
MAX_HOTWORDS = 200
MAX_HOTWORD_CHARS = 100
CLOSE_DONE = 1000
CLOSE_RESTART = 1012  # "service restart": SDKs connect again
_LONGEST_NUMBER = 12  # digits; so many are out of every range, and short enough for an error message


class Control(Enum):
    """A control message without content."""

    COMMIT = "commit"
    EOF = "eof"
    KEEPALIVE = "keepalive"


@dataclass(frozen=True, slots=True)
class Configure:
    """A ``config`` message: the parameters it names."""

    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamParameters:
    """What a client may ask of a stream; each name is the parameter's name on the wire."""

    language: str | None = None
    languages: tuple[str, ...] = ()
    task: Task = Task.TRANSCRIBE
    prompt: str = ""
    hotwords: tuple[str, ...] = ()
    encoding: Encoding = Encoding.LINEAR16
    sample_rate: int = 16_000
    channels: int = 1
    partials: bool = True
    partial_interval_ms: int = 400
    pause_ms: int = 500
    max_utterance_ms: int = 20_000
    threshold: float = 0.5
    words: bool = field(default=True)

    def session_config(self) -> SessionConfig:
        """Raises BadMessage where a value is out of range."""
        return SessionConfig(
            audio=AudioFormat(self.encoding, self.sample_rate, self.channels),
            endpointer=EndpointerConfig(
                threshold=self.threshold, release_threshold=max(0.05, self.threshold - 0.15), pause_ms=self.pause_ms
            ),
            segmenter=SegmenterConfig(
                max_utterance_ms=self.max_utterance_ms, cut_zone_ms=cut_zone_ms(self.max_utterance_ms)
            ),
            partials=PartialConfig(enabled=self.partials, interval_ms=self.partial_interval_ms),
            options=DecodeOptions(
                language=self.language,
                languages=self.languages,
                task=self.task,
                prompt=self.prompt,
                hotwords=self.hotwords,
            ),
        )


def _wrong(name: str, value: object, expected: str) -> BadMessage:
    return BadMessage(f"{name} must be {expected}, not {_shown(value)}", code="bad_parameter")


def _shown(value: object) -> str:
    """The value for an error message; a container's contents can be nested too deep to be shown."""
    return repr(_plain(value)[:80]) if _is_plain(value) else f"a {type(value).__name__}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _plain(value: object) -> str:
    """A JSON scalar or a query's text as text; "" for anything else."""
    return str(value) if _is_plain(value) else ""


def _to_bool(name: str, value: object) -> bool:
    truth = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
    found = truth.get(_plain(value).lower())
    if found is None:
        raise _wrong(name, value, "true or false")
    return found


def _to_int(name: str, value: object) -> int:
    try:
        return int(_plain(value)[:_LONGEST_NUMBER])
    except ValueError:
        raise _wrong(name, value, "a whole number") from None


def _to_float(name: str, value: object) -> float:
    try:
        return float(_plain(value))
    except ValueError:
        raise _wrong(name, value, "a number") from None


def _to_text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_PROMPT_CHARS or not _is_unicode(value):
        raise _wrong(name, value, f"text of at most {MAX_PROMPT_CHARS} characters")
    return value


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can escape and no UTF-8 can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _to_list(name: str, value: object) -> tuple[str, ...]:
    """A JSON list, or one text with commas, as a query has it."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and _is_unicode(item) for item in items):
        raise _wrong(name, value, "a list of texts")
    kept = tuple(item.strip() for item in items if item.strip())
    if len(kept) > MAX_HOTWORDS or any(len(item) > MAX_HOTWORD_CHARS for item in kept):
        raise _wrong(name, value, f"at most {MAX_HOTWORDS} texts of at most {MAX_HOTWORD_CHARS} characters")
    return kept


def _to_choice(name: str, value: object, choices: type[Enum]) -> Any:
    try:
        return choices(_plain(value).lower())
    except ValueError:
        known = ", ".join(str(choice.value) for choice in choices)
        raise _wrong(name, value, f"one of {known}") from None


def _to_language(name: str, value: object, known: frozenset[str]) -> str:
    code = _plain(value).strip().lower().replace("_", "-").split("-")[0]  # "en-US" names a language too
    if code not in known:
        raise BadMessage(f"{name} {_shown(value)} is not one that this model knows", code="unknown_language")
    return code


def parse_parameters(
    base: StreamParameters, given: Mapping[str, object], languages: frozenset[str]
) -> StreamParameters:
    """The base with what a query or a ``config`` message names; ``languages`` are the codes that the model knows.

    Raises BadMessage for an unknown name or a bad value. Names that begin with two underscores are ignored: hosting
    platforms add such.
    """
    changes: dict[str, Any] = {}
    for name, value in given.items():
        match name:
            case "language":
                is_auto = value is None or value in ("", "auto")
                changes[name] = None if is_auto else _to_language(name, value, languages)
            case "languages":
                changes[name] = tuple(_to_language(name, code, languages) for code in _to_list(name, value))
            case "hotwords":
                changes[name] = _to_list(name, value)
            case "prompt":
                changes[name] = _to_text(name, value)
            case "task":
                changes[name] = _to_choice(name, value, Task)
            case "encoding":
                changes[name] = _to_choice(name, value, Encoding)
            case "partials" | "words":
                changes[name] = _to_bool(name, value)
            case "sample_rate" | "channels" | "pause_ms" | "partial_interval_ms" | "max_utterance_ms":
                changes[name] = _to_int(name, value)
            case "threshold":
                changes[name] = _to_float(name, value)
            case _ if name.startswith("__"):
                pass
            case _:
                known = ", ".join(StreamParameters.__dataclass_fields__)
                raise BadMessage(f"unknown parameter {name[:40]!r}; known are {known}", code="unknown_parameter")
    parameters = replace(base, **changes)
    parameters.session_config()  # checks the ranges
    return parameters


def parse_message(text: str) -> Control | Configure:
    """A text message. Raises BadMessage when it is none of the protocol's."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # an integer of thousands of digits is a plain ValueError
        raise BadMessage('a text message must be JSON such as {"type":"eof"}; audio goes in binary messages') from None
    kind = message.get("type") if isinstance(message, dict) else None
    if kind == "config":
        return Configure({name: value for name, value in message.items() if name != "type"})
    try:
        return Control(kind)
    except ValueError:
        known = ", ".join(["config", *(control.value for control in Control)])
        raise BadMessage(f"unknown message type {_shown(kind)}; known are {known}") from None


def query_parameters(pairs: Iterable[tuple[str, str]]) -> dict[str, object]:
    """A query's pairs; a name that comes more than once gives a list."""
    given: dict[str, object] = {}
    for name, value in pairs:
        if name in given:
            before = given[name]
            given[name] = [*before, value] if isinstance(before, list) else [before, value]
        else:
            given[name] = value
    return given


def render_ready(session_id: str, parameters: StreamParameters, model: str) -> dict[str, Any]:
    config = {name: getattr(parameters, name) for name in StreamParameters.__dataclass_fields__}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in config.items()}
    return {"type": "ready", "session": session_id, "model": model, "config": plain}


def render_lag(received_samples: int, covered_samples: int) -> dict[str, Any]:
    """How much audio came, and how far behind it the newest answer is."""
    lag_samples = received_samples - covered_samples
    return {"type": "lag", "audio_ms": samples_to_ms(received_samples), "lag_ms": samples_to_ms(lag_samples)}


def render_error(error: SttError, *, fatal: bool) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": error.message, "fatal": fatal}


def _render_word(word: Word) -> dict[str, Any]:
    return {
        "word": word.text.strip(),
        "start_ms": samples_to_ms(word.start_sample),
        "end_ms": samples_to_ms(word.end_sample),
        "probability": round(word.probability, 3),
    }


def _span(event: PartialTranscript | FinalTranscript | TranscriptFailed) -> dict[str, int]:
    return {
        "utterance": event.utterance_id,
        "channel": event.channel,
        "start_ms": samples_to_ms(event.start_sample),
        "end_ms": samples_to_ms(event.end_sample),
    }


def render(event: ClientEvent, *, words: bool = True) -> dict[str, Any]:
    """A session output in the protocol's form; ``words`` leaves the word list of finals in."""
    match event:
        case SpeechStarted(utterance, channel, at):
            kind, at_ms = "speech_started", samples_to_ms(at)
            return {"type": kind, "utterance": utterance, "channel": channel, "at_ms": at_ms}
        case SpeechStopped(utterance, channel, at):
            kind, at_ms = "speech_stopped", samples_to_ms(at)
            return {"type": kind, "utterance": utterance, "channel": channel, "at_ms": at_ms}
        case PartialTranscript():
            text = {"committed": event.committed, "tentative": event.tentative}
            return {"type": "partial", **_span(event), **text}
        case FinalTranscript():
            final = {
                "type": "final",
                **_span(event),
                "text": event.text,
                "language": event.language,
                "language_probability": round(event.language_probability, 3),
                "confidence": round(event.confidence, 3),
                "continues": event.continues,
            }
            return final | ({"words": [_render_word(word) for word in event.words]} if words else {})
        case TranscriptFailed():
            return {"type": "failed", **_span(event), "code": event.error.code, "message": event.error.message}
        case SessionDone(received):
            return {"type": "done", "audio_ms": samples_to_ms(received)}


class NativeDialect:
    """The protocol as app/dialect.py's Dialect, for one connection."""

    def __init__(
        self,
        session_id: str,
        parameters: StreamParameters,
        info: Callable[[], RecognizerInfo],
        close_code: Callable[[SttError], int],
        *,
        given: Mapping[str, object] | None = None,
        audio: AudioFormat | None = None,
    ) -> None:
        """``parameters``: the service's defaults; ``given``: what the opening asks for, taken when the client can be
        told what is wrong with it. ``info`` raises Overloaded while the engine starts. ``audio``: the only format there
        is; None where the client chooses.
        """
        self._id = session_id
        self._parameters = parameters
        self._info = info
        self._close_code = close_code
        self._given = given or {}
        self._audio = audio
        self._is_hearing = False

    def configure(self, given: Mapping[str, object]) -> None:
        """Take parameters, before the first audio. Raises BadMessage, or Overloaded while the engine starts."""
        parameters = parse_parameters(self._parameters, given, self._info().languages)
        if self._audio is not None and parameters.session_config().audio != self._audio:
            only = f"{self._audio.encoding.value}, {self._audio.sample_rate_hz} Hz, {self._audio.channels} channel"
            raise BadMessage(f"the audio of this connection is always {only}", code="bad_parameter")
        self._parameters = parameters

    def open(self) -> Sequence[Action]:
        self.configure(self._given)
        return [self._ready()]

    def receive(self, message: Wire) -> Sequence[Action]:
        """Before the first audio a wrong message is the end of it; later it is complained of."""
        if isinstance(message, bytes):
            return [*self._begin(), Audio(message)]
        if not self._is_hearing:
            return self._on_message(parse_message(message))
        try:
            return self._on_message(parse_message(message))
        except BadMessage as error:
            return [Complaint(error)]

    def _on_message(self, message: Control | Configure) -> Sequence[Action]:
        match message:
            case Configure() if self._is_hearing:
                raise BadMessage("config must come before the first audio", code="late_config")
            case Configure(parameters):
                self.configure(parameters)
                return [self._ready()]
            case Control.COMMIT:
                return [*self._begin(), Commit()]
            case Control.EOF:
                return [*self._begin(), Eof()]
            case Control.KEEPALIVE:
                return []

    def _begin(self) -> Sequence[Action]:
        if self._is_hearing:
            return []
        self._is_hearing = True
        return [Start(self._parameters.session_config())]

    def _ready(self) -> Say:
        return Say(_text(render_ready(self._id, self._parameters, self._info().model)))

    def render(self, event: ToClient) -> Sequence[Wire]:
        match event:
            case Lag(received, covered):
                return [_text(render_lag(received, covered))]
            case Complaint(error):
                return [_text(render_error(error, fatal=False))]
            case Marked():  # no Commit of this protocol has a mark
                return []
            case _:
                return [_text(render(event, words=self._parameters.words))]

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        return [_text(render_error(error, fatal=True))], self._close_code(error)

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        if not going_down:
            return [], CLOSE_DONE, ""
        error = SttError("the service is going down; all audio so far is transcribed", code="shutting_down")
        return [_text(render_error(error, fatal=True))], CLOSE_RESTART, "service restart"


def _text(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
