"""Genesys Cloud's AudioHook, version 2: JSON messages for control, mu-law in binary ones. Pure.

Source: the message types and the session of github.com/purecloudlabs/audiohook-reference-implementation, which is the
exchange's own. Finals go back to it as ``event`` messages with a transcript entity; those who follow the call get all.
Genesys limits how many messages a server may send, so partials are not among them.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from app.dialect import Action, Audio, Complaint, Eof, Gap, Say, Start, ToClient, Wire
from app.wire.calls import (
    AGENT,
    CLOSE_DONE,
    CLOSE_RESTART,
    CUSTOMER,
    HANG_UP,
    Call,
    Channel,
    Surroundings,
    Teller,
    object_in,
    parse_object,
    text_in,
)
from app.wire.native import parse_parameters
from streaming.audio import SAMPLE_RATE
from streaming.config import AudioFormat, Encoding, SessionConfig
from streaming.errors import BadMessage, ClientError, SttError
from streaming.events import FinalTranscript
from streaming.types import Word

_VERSION = "2"
_RATE_HZ = 8_000
_MAX_TEXT_CHARS = 65_535  # the protocol's own limit
_LABELS = {"external": CUSTOMER, "internal": AGENT}
_NO_CONVERSATION = str(uuid.UUID(int=0))  # of a connection that only tries whether the service is there
_TOLERANCE_MS = 100
_MAX_GAP_MS = 3_600_000
_UNAUTHORIZED = ("unauthorized", "forbidden_origin", "too_many_requests", "too_many_streams", "audio_limit")


class _State(Enum):
    PREPARING = "before 'open'"
    ACTIVE = "active"
    PAUSED = "paused"
    CLOSING = "closing"


class AudioHook:
    """One session as app/dialect.py's Dialect.

    Its messages leave without ``seq`` and ``clientseq``: those are given by ``number`` where they are sent, since
    between being said and being sent one may be overtaken by others.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._teller = Teller(around)
        self._state = _State.PREPARING
        self._id = ""
        self._seq = self._client_seq = 0  # the last of ours, and of the client's
        self._channels: tuple[str, ...] = ()
        self._config: SessionConfig | None = None
        self._heard_ms = 0.0  # on the client's clock, with what was discarded

    def number(self, message: Wire) -> Wire:
        """The message as it is sent. Called once for each, in the order in which they are."""
        self._seq += 1
        return _text({**json.loads(message), "seq": self._seq, "clientseq": self._client_seq})

    def open(self) -> Sequence[Action]:
        return []

    # Incoming ------------------------------------------------------------------------------------------------

    def receive(self, message: Wire) -> Sequence[Action]:
        """Raises BadMessage for what breaks the protocol's rules, as the exchange's own server does."""
        if message == HANG_UP:
            return self._close()
        if isinstance(message, bytes):
            return self._audio(message)
        if len(message) > _MAX_TEXT_CHARS:
            raise BadMessage(f"a text message may have {_MAX_TEXT_CHARS} characters")
        parsed = parse_object(message)
        self._check(parsed)
        return self._on_message(parsed, object_in(parsed, "parameters"))

    def _check(self, message: Mapping[str, Any]) -> None:
        """What every message must have. Raises BadMessage."""
        if message.get("version") != _VERSION:
            raise BadMessage(f"the version must be {_VERSION!r}")
        seq, server_seq, session_id = message.get("seq"), message.get("serverseq"), text_in(message, "id")
        if seq != self._client_seq + 1:
            raise BadMessage(f"seq must be {self._client_seq + 1}")
        self._client_seq += 1
        if not isinstance(server_seq, int) or not 0 <= server_seq <= self._seq:
            raise BadMessage("serverseq is of no message that was sent")
        if not session_id.isascii() or not session_id or session_id != (self._id or session_id):
            raise BadMessage("id must be the session's")
        self._id = session_id

    def _on_message(self, message: Mapping[str, Any], parameters: Mapping[str, Any]) -> Sequence[Action]:
        kind = message.get("type")
        if self._state is _State.PREPARING and kind not in ("open", "ping", "close", "error"):
            raise BadMessage("a session begins with 'open'")
        match kind:
            case "open":
                return self._open(parameters)
            case "ping":
                return [Say(self._message("pong"))]
            case "update":
                return self._update(parameters)
            case "paused" if self._state is _State.ACTIVE:
                self._state = _State.PAUSED
                return []
            case "resumed" | "discarded":
                return self._skip(message)
            case "dtmf":
                self._teller.key_pressed(0, text_in(parameters, "digit"), int(self._heard_ms))
                return []
            case "error":
                what = f"{parameters.get('code')}: {parameters.get('message')}"
                return [Complaint(ClientError(f"the exchange reports an error: {what[:300]}"))]
            case "close":
                return self._close()
            case str():  # 'paused' again, playback_started; and what may be added to the protocol
                return []
            case _:
                raise BadMessage("a message must have a 'type'")

    def _open(self, parameters: Mapping[str, Any]) -> Sequence[Action]:
        if self._state is not _State.PREPARING:
            raise BadMessage("a session has one 'open'")
        media = _choose(parameters.get("media"))
        self._channels = tuple(media["channels"])
        self._config = self._teller.begin(self._call(parameters), _format(self._channels))
        self._state = _State.ACTIVE
        opened: dict[str, Any] = {"startPaused": False, "media": [media]}
        if parameters.get("supportedLanguages") is True:
            opened["supportedLanguages"] = sorted(self._around.info().languages)
        return [Start(self._config), Say(self._message("opened", opened))]

    def _call(self, parameters: Mapping[str, Any]) -> Call:
        conversation = text_in(parameters, "conversationId")
        is_probe = conversation in ("", _NO_CONVERSATION)
        language = text_in(parameters, "language")
        given = object_in(parameters, "customConfig") | ({"language": language} if language else {})
        told = ("organizationId", "conversationId", "participant")
        return Call(
            "audiohook",
            () if is_probe else (conversation, self._id),
            tuple(Channel(name, _LABELS[name]) for name in self._channels),
            given,
            {"id": self._id, **{name: parameters[name] for name in told if name in parameters}},
        )

    def _update(self, parameters: Mapping[str, Any]) -> Sequence[Action]:
        """The language has changed; what is said from here on is heard in it."""
        assert self._config is not None
        if self._state is _State.CLOSING:
            return []
        given, languages = {"language": text_in(parameters, "language")}, self._around.info().languages
        try:
            language = parse_parameters(self._around.defaults, given, languages).language
        except BadMessage as error:
            return [Complaint(error), Say(self._message("updated"))]
        self._config = replace(self._config, options=replace(self._config.options, language=language))
        return [Start(self._config), Say(self._message("updated"))]

    def _audio(self, data: bytes) -> Sequence[Action]:
        if self._state is _State.CLOSING:
            return []
        if self._state is not _State.ACTIVE or len(data) % len(self._channels):
            raise BadMessage(f"audio of {len(data)} bytes came to a session that is {self._state.value}")
        self._heard_ms += len(data) * 1000 / len(self._channels) / _RATE_HZ
        return [Audio(data)]

    def _skip(self, message: Mapping[str, Any]) -> Sequence[Action]:
        """Audio was left out. How much counts, the client's clock says: it stands still in a pause, and does not where
        audio is discarded."""
        if self._state is _State.PAUSED and message.get("type") == "resumed":
            self._state = _State.ACTIVE
        missing_ms = _duration_ms(message.get("position")) - self._heard_ms
        if missing_ms > _MAX_GAP_MS:
            raise BadMessage(f"position leaves more than {_MAX_GAP_MS // 1000} s out")
        if missing_ms <= _TOLERANCE_MS or self._state is _State.CLOSING:
            return []
        self._heard_ms += missing_ms
        return [Gap(round(missing_ms * SAMPLE_RATE / 1000))]

    def _close(self) -> Sequence[Action]:
        if self._state is _State.CLOSING:
            return []
        self._state = _State.CLOSING
        return [Eof()]

    # Outgoing ------------------------------------------------------------------------------------------------

    def render(self, event: ToClient) -> Sequence[Wire]:
        self._teller.event(event)
        if isinstance(event, FinalTranscript) and event.text:
            entity = {"type": "transcript", "data": self._transcript(event)}
            return [self._message("event", {"entities": [entity]})]
        return []

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        self._teller.error(error, fatal=True)
        reason = "unauthorized" if error.code in _UNAUTHORIZED else "error"
        return [self._message("disconnect", {"reason": reason, "info": error.message})], self._around.close_code(error)

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        """A client that is asked to connect again does so, perhaps to another instance."""
        if not going_down:
            return [self._message("closed")], CLOSE_DONE, ""
        self._teller.going_down()
        return [self._message("reconnect", {"info": "service restart"})], CLOSE_RESTART, "service restart"

    def _message(self, kind: str, parameters: Mapping[str, Any] | None = None) -> str:
        return _text({"version": _VERSION, "type": kind, "id": self._id, "parameters": parameters or {}})

    def _transcript(self, final: FinalTranscript) -> dict[str, Any]:
        words = [_token(word) for word in final.words]
        interpretation = {"type": "display", "transcript": final.text, **({"tokens": words} if words else {})}
        languages = {"languages": [final.language]} if final.language else {}
        alternative = {"confidence": round(final.confidence, 3), **languages, "interpretations": [interpretation]}
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._id}/{final.utterance_id}")),
            "channel": self._channels[final.channel],
            "isFinal": True,
            "offset": _duration(final.start_sample),
            "duration": _duration(final.end_sample - final.start_sample),
            "alternatives": [alternative],
        }


def _choose(offered: object) -> dict[str, Any]:
    """Of the media that are offered: mu-law, best with both parties. Raises BadMessage where there is none."""
    usable = [media for media in offered if _is_usable(media)] if isinstance(offered, list) else []
    if not usable:
        raise BadMessage("no media that can be heard are offered: PCMU, 8000 Hz, external or internal")
    best: dict[str, Any] = max(usable, key=lambda media: len(media["channels"]))
    return best


def _is_usable(media: object) -> bool:
    if not isinstance(media, dict):
        return False
    if (media.get("type"), media.get("format"), media.get("rate")) != ("audio", "PCMU", _RATE_HZ):
        return False
    return media.get("channels") in (["external", "internal"], ["internal", "external"], ["external"], ["internal"])


def _format(channels: Sequence[str]) -> AudioFormat:
    return AudioFormat(Encoding.MULAW, _RATE_HZ, len(channels))


def _token(word: Word) -> dict[str, Any]:
    return {
        "type": "word",
        "value": word.text.strip(),
        "confidence": round(word.probability, 3),
        "offset": _duration(word.start_sample),
        "duration": _duration(word.end_sample - word.start_sample),
    }


def _duration(samples: int) -> str:
    """Samples at 16 kHz as ISO 8601 has seconds."""
    return f"PT{max(0, samples) / SAMPLE_RATE:.3f}S"


def _duration_ms(text: object) -> float:
    """Raises BadMessage."""
    found = re.fullmatch(r"PT(\d{1,9}(?:\.\d{1,12})?)S", text) if isinstance(text, str) else None
    if found is None:
        raise BadMessage("a position is written as in 'PT1.5S'")
    return float(found[1]) * 1000


def _text(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
