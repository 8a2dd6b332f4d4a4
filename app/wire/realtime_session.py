"""OpenAI's Realtime transcription session: what can be set of it, as ``session.update`` merges it. Pure.

The names, defaults and the rule that only fields which are present change are those of OpenAI's GA interface (types of
openai-python 3.57). A field that this service has no use for is passed over, so that a client which sends it goes on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.wire.native import MAX_HOTWORD_CHARS, MAX_HOTWORDS, MAX_PROMPT_CHARS, StreamParameters
from app.wire.openai_http import BadField
from streaming.config import (
    Encoding,
    PartialConfig,
    SegmenterConfig,
    SessionConfig,
)

LOGPROBS = "item.input_audio_transcription.logprobs"
_ENCODINGS = {"audio/pcm": Encoding.LINEAR16, "audio/pcmu": Encoding.MULAW, "audio/pcma": Encoding.ALAW}
_NAMES = {encoding: name for name, encoding in _ENCODINGS.items()}
_PCM_RATE_HZ, _G711_RATE_HZ = 24_000, 8_000
# How long words are held back before they are committed; "medium" is what the service does unasked.
_HOLD_BACK_MS = {"minimal": 0, "low": 400, "medium": 800, "high": 1_500, "xhigh": 3_000}
# Nothing here judges meaning; an eager listener is one that waits less.
_PAUSE_MS = {"low": 1_000, "medium": 700, "auto": 700, "high": 400}
_MAX_PAUSE_MS, _MAX_PADDING_MS = 10_000, 2_000  # what the endpointer and the segmenter take
_SHORTEST_PAUSE_MS = 32  # a window of the detector
# The beta's names, which would be passed over silently: then the audio would be taken for something that it is not.
_BETA_NAMES = ("input_audio_format", "input_audio_transcription", "turn_detection", "input_audio_noise_reduction")
_BETA_FORMATS = {
    "pcm16": {"type": "audio/pcm", "rate": _PCM_RATE_HZ},
    "g711_ulaw": {"type": "audio/pcmu"},
    "g711_alaw": {"type": "audio/pcma"},
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turns:
    """How the service finds the end of a turn. ``eagerness``: of "semantic_vad"; "" for "server_vad"."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: str = ""

    def as_json(self) -> Json:
        if self.eagerness:
            return {"type": "semantic_vad", "eagerness": self.eagerness}
        return {
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
            "idle_timeout_ms": None,
        }


@dataclass(frozen=True, slots=True)
class RealtimeSession:
    """The effective settings of one connection. ``turns``: None where the client commits. ``defaults``: the service's,
    for what this protocol has no word for."""

    defaults: StreamParameters = field(default_factory=StreamParameters)
    turns: Turns | None = field(default_factory=Turns)
    encoding: Encoding = Encoding.LINEAR16
    model: str = ""
    language: str = ""
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    prompt: str = ""
    delay: str = ""
    logprobs: bool = False

    @property
    def rate_hz(self) -> int:
        return _PCM_RATE_HZ if self.encoding is Encoding.LINEAR16 else _G711_RATE_HZ

    @property
    def bytes_per_s(self) -> int:
        return self.rate_hz * (2 if self.encoding is Encoding.LINEAR16 else 1)

    def merged(self, given: Mapping[str, Any], known: frozenset[str]) -> "RealtimeSession":
        """With the fields that are present; ``known``: the language codes of the model. Raises BadField."""
        kind = given.get("type", "transcription")
        if kind != "transcription":
            raise BadField(
                f"this service has transcription sessions only, not {_shown(kind)}: nothing here answers",
                param="session.type",
            )
        for name in _BETA_NAMES:
            if name in given:
                message = f"{name} belongs to 'transcription_session.update'; here it is a field of session.audio.input"
                raise BadField(message, param=f"session.{name}", code="unknown_parameter")
        session = self
        if "include" in given:
            session = replace(session, logprobs=LOGPROBS in _strings(given["include"] or [], "session.include"))
        audio = _object(given.get("audio"), "session.audio")
        sound = _object(audio.get("input"), "session.audio.input")
        if sound.get("format") is not None:
            session = _with_format(session, _object(sound["format"], "session.audio.input.format"))
        if "transcription" in sound:
            path = "session.audio.input.transcription"
            session = _with_transcription(session, _object(sound["transcription"], path), path, known)
        if "turn_detection" in sound:
            session = _with_turns(session, sound["turn_detection"])
        session.config()  # checks the ranges that are the core's
        return session

    def config(self) -> SessionConfig:
        """Without turns the service still cuts at pauses, so that little is left to do when the client commits."""
        pause_ms = self.turns.silence_duration_ms if self.turns else self.defaults.pause_ms
        threshold = self.turns.threshold if self.turns else self.defaults.threshold
        config = replace(
            self.defaults,
            language=self.language or None,
            languages=self.languages,
            prompt=self.prompt[-MAX_PROMPT_CHARS:],  # Whisper itself reads the end of a prompt
            hotwords=self.keywords,
            encoding=self.encoding,
            sample_rate=self.rate_hz,
            pause_ms=max(_SHORTEST_PAUSE_MS, pause_ms),
            threshold=min(0.95, max(0.05, threshold)),  # 0 would call silence speech, 1 nothing
        ).session_config()
        padding_ms = self.turns.prefix_padding_ms if self.turns else 0
        pre_roll_ms = max(SegmenterConfig().pre_roll_ms, padding_ms)  # less is understood worse
        hold_back_ms = _HOLD_BACK_MS.get(self.delay, PartialConfig().hold_back_ms)
        return replace(
            config,
            segmenter=replace(config.segmenter, pre_roll_ms=pre_roll_ms),
            partials=replace(config.partials, hold_back_ms=hold_back_ms),
        )

    def as_json(self, session_id: str) -> Json:
        """As ``session.created`` and ``session.updated`` show it; what is not done stands there as null."""
        sound = {
            "format": self._format(),
            "transcription": self._transcription(),
            "noise_reduction": None,
            "turn_detection": self.turns.as_json() if self.turns else None,
        }
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": session_id,
            "audio": {"input": sound},
            "include": [LOGPROBS] if self.logprobs else None,
        }

    def as_beta_json(self, session_id: str) -> Json:
        names = {Encoding.MULAW: "g711_ulaw", Encoding.ALAW: "g711_alaw"}
        return {
            "object": "realtime.transcription_session",
            "id": session_id,
            "input_audio_format": names.get(self.encoding, "pcm16"),
            "input_audio_transcription": self._transcription(),
            "input_audio_noise_reduction": None,
            "turn_detection": self.turns.as_json() if self.turns else None,
            "include": [LOGPROBS] if self.logprobs else None,
        }

    def _format(self) -> Json:
        name = _NAMES[self.encoding]
        return {"type": name, "rate": self.rate_hz} if name == "audio/pcm" else {"type": name}

    def _transcription(self) -> Json:
        optional = {
            "language": self.language,
            "languages": list(self.languages),
            "keywords": list(self.keywords),
            "prompt": self.prompt,
            "delay": self.delay,
        }
        return {"model": self.model, **{name: value for name, value in optional.items() if value}}


def from_beta(given: Mapping[str, Any]) -> Json:
    """The ``session`` of the beta's ``transcription_session.update``, in the GA form. Raises BadField."""
    sound: Json = {}
    if "input_audio_format" in given:
        name = given["input_audio_format"]
        if not isinstance(name, str) or name not in _BETA_FORMATS:
            raise _wrong("session.input_audio_format", name, _one_of(_BETA_FORMATS))
        sound["format"] = _BETA_FORMATS[name]
    if "input_audio_transcription" in given:
        sound["transcription"] = given["input_audio_transcription"]
    if "turn_detection" in given:
        sound["turn_detection"] = given["turn_detection"]
    return {"audio": {"input": sound}, **({"include": given["include"]} if "include" in given else {})}


def secret_lifetime_s(given: Mapping[str, Any]) -> int:
    """``expires_after`` of a wish for a client secret, with OpenAI's own limits. Raises BadField."""
    after = _object(given.get("expires_after"), "expires_after")
    if after.get("anchor", "created_at") != "created_at":
        raise _wrong("expires_after.anchor", after["anchor"], "'created_at'")
    return round(_number(after.get("seconds", 600), "expires_after.seconds", 10, 7_200))


def _with_format(session: RealtimeSession, given: Mapping[str, Any]) -> RealtimeSession:
    name, rate_hz = given.get("type", "audio/pcm"), given.get("rate")
    if not isinstance(name, str) or name not in _ENCODINGS:
        raise _wrong("session.audio.input.format.type", name, _one_of(_ENCODINGS))
    encoding = _ENCODINGS[name]
    if encoding is Encoding.LINEAR16 and rate_hz not in (None, _PCM_RATE_HZ):
        raise _wrong("session.audio.input.format.rate", rate_hz, str(_PCM_RATE_HZ))
    return replace(session, encoding=encoding)


def _with_transcription(
    session: RealtimeSession, given: Mapping[str, Any], path: str, known: frozenset[str]
) -> RealtimeSession:
    """null changes nothing: a transcription session has nothing else to do."""
    changes: Json = {}
    if given.get("model") is not None:
        changes["model"] = _text(given["model"], f"{path}.model")
    if "language" in given:
        changes["language"] = _language(given["language"] or "", f"{path}.language", known)
    if "languages" in given:
        names = _strings(given["languages"] or [], f"{path}.languages")
        changes["languages"] = tuple(_language(name, f"{path}.languages", known) for name in names)
    if "keywords" in given:
        words = _strings(given["keywords"] or [], f"{path}.keywords")
        if len(words) > MAX_HOTWORDS or any(len(word) > MAX_HOTWORD_CHARS for word in words):
            raise BadField(
                f"at most {MAX_HOTWORDS} keywords of {MAX_HOTWORD_CHARS} characters are taken", param=f"{path}.keywords"
            )
        changes["keywords"] = tuple(words)
    if "prompt" in given:
        changes["prompt"] = _text(given["prompt"] or "", f"{path}.prompt")
    if "delay" in given:
        delay = given["delay"] or ""
        if not isinstance(delay, str) or delay not in ("", *_HOLD_BACK_MS):
            raise _wrong(f"{path}.delay", delay, _one_of(_HOLD_BACK_MS))
        changes["delay"] = delay
    return replace(session, **changes)


def _with_turns(session: RealtimeSession, given: object) -> RealtimeSession:
    path = "session.audio.input.turn_detection"
    if given is None:
        return replace(session, turns=None)
    turns = _object(given, path)
    before = session.turns or Turns(silence_duration_ms=session.defaults.pause_ms)
    kind = turns.get("type", "semantic_vad" if before.eagerness else "server_vad")
    if kind == "semantic_vad":
        eagerness = turns.get("eagerness") or before.eagerness or "auto"
        if not isinstance(eagerness, str) or eagerness not in _PAUSE_MS:
            raise _wrong(f"{path}.eagerness", eagerness, _one_of(_PAUSE_MS))
        return replace(session, turns=Turns(eagerness=eagerness, silence_duration_ms=_PAUSE_MS[eagerness]))
    if kind != "server_vad":
        raise _wrong(f"{path}.type", kind, "'server_vad' or 'semantic_vad'")
    if before.eagerness:
        before = Turns(silence_duration_ms=session.defaults.pause_ms)
    limits = {"threshold": 1, "prefix_padding_ms": _MAX_PADDING_MS, "silence_duration_ms": _MAX_PAUSE_MS}
    numbers = {
        name: _number(turns[name], f"{path}.{name}", 0, limit)
        for name, limit in limits.items()
        if turns.get(name) is not None
    }
    whole = {name: value if name == "threshold" else round(value) for name, value in numbers.items()}
    return replace(session, turns=replace(before, **whole))  # type: ignore[arg-type]


# Checks ----------------------------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    """For an error message; a container's contents can be nested too deep to be shown."""
    return (
        repr(str(value)[:80]) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
    )


def _one_of(names: Mapping[str, object]) -> str:
    return "one of " + ", ".join(f"'{name}'" for name in names)


def _wrong(path: str, value: object, expected: str) -> BadField:
    return BadField(f"Invalid value for '{path}': expected {expected}, not {_shown(value)}.", param=path)


def _object(value: object, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadField(
            f"Invalid type for '{path}': expected an object, not {_shown(value)}.", param=path, code="invalid_type"
        )
    return value


def _text(value: object, path: str) -> str:
    """Half of a surrogate pair is no text: nobody else could read it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return value
    raise BadField(f"Invalid type for '{path}': expected text, not {_shown(value)}.", param=path, code="invalid_type")


def _strings(value: object, path: str) -> list[str]:
    if not isinstance(value, list):
        raise BadField(
            f"Invalid type for '{path}': expected a list, not {_shown(value)}.", param=path, code="invalid_type"
        )
    return [_text(item, path) for item in value]


def _language(value: object, path: str, known: frozenset[str]) -> str:
    """ "" detects it; "en-US" names a language too."""
    code = _text(value, path).strip().lower().replace("_", "-").split("-")[0]
    if code and code not in known:
        raise BadField(f"{_shown(value)} is not a language that this model knows", param=path)
    return code


def _number(value: object, path: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isnan(value):
        raise _wrong(path, value, f"a number from {low:g} to {high:g}")
    return value
