"""The language of the gateway and its engine process: frames on a stream socket. Pure; moves no bytes itself.

A frame is two little-endian uint32 (header bytes, payload bytes), a JSON header, then the payload. Only Ask has a
payload: its audio as raw little-endian int16, so that a second of speech costs 32,000 bytes and no parsing.

The parent sends Ask, Cancel and Ping. The child sends Ready once, then exactly one of Answer, Failure, Fault or
Dropped for every Ask, and Pong for every Ping. ``key`` names an Ask on its connection (a ``request_id`` is unique in
its session only).
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streaming.errors import (
    BadAudio,
    BadMessage,
    ClientError,
    Overloaded,
    RecognizerFailed,
    ServerError,
    SttError,
)
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Priority, RecognizerInfo, Task, Word

MAX_AUDIO_SAMPLES = 30 * 16_000  # Whisper's window
MAX_HEADER_BYTES = 1 << 20  # 448 tokens of words are some 40 kB; prompts and hotwords have limits of their own
MAX_PAYLOAD_BYTES = 2 * MAX_AUDIO_SAMPLES

_SIZES = struct.Struct("<II")
_PCM = np.dtype("<i2")
_ERRORS: dict[str, type[SttError]] = {
    kind.__name__: kind
    for kind in (SttError, ClientError, BadMessage, BadAudio, ServerError, RecognizerFailed, Overloaded)
}


class FramingError(Exception):
    """The other side sent what the protocol does not allow; the connection is of no further use."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Decode this."""

    key: int
    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer to this Ask is not wanted any more. It still gets its one reply."""

    key: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded, warm and right."""

    info: RecognizerInfo


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said."""

    key: int
    hypothesis: Hypothesis


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine refused, with a typed error. Asking again gives the same."""

    key: int
    error: SttError


@dataclass(frozen=True, slots=True)
class Fault:
    """The engine broke on this Ask with an error that nobody foresaw. Another try may go well."""

    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The Ask was cancelled, and the engine has not begun with it or has stopped."""

    key: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to Ping."""


Message = Ask | Cancel | Ready | Answer | Failure | Fault | Dropped | Ping | Pong


def encode(message: Message) -> bytes:
    """The message as one frame. Raises BadAudio for audio that is not int16, shape (1..480,000,).

    Raises BadMessage where the text that goes along (prompt, hotwords) makes the header larger than 1 MiB.
    """
    header, payload = _to_json(message), b""
    if isinstance(message, Ask):
        payload = _audio_bytes(message.request)
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MAX_HEADER_BYTES:
        raise BadMessage(f"the request's text is too long: {len(head)} bytes, at most {MAX_HEADER_BYTES}")
    return _SIZES.pack(len(head), len(payload)) + head + payload


class Parser:
    """Frames out of a byte stream that may be cut anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes, return the messages they complete. Raises FramingError; then the parser is of no further use.

        At most one frame of the largest size is retained.
        """
        self._buffer += data
        messages: list[Message] = []
        at = 0
        while (end := self._frame_end(at)) is not None:
            messages.append(self._parse(at, end))
            at = end
        del self._buffer[:at]
        return messages

    def _frame_end(self, at: int) -> int | None:
        if len(self._buffer) - at < _SIZES.size:
            return None
        header_bytes, payload_bytes = _SIZES.unpack_from(self._buffer, at)
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise FramingError(f"a frame of {header_bytes} + {payload_bytes} bytes is too large")
        end: int = at + _SIZES.size + header_bytes + payload_bytes
        return end if len(self._buffer) >= end else None

    def _parse(self, at: int, end: int) -> Message:
        header_bytes, _ = _SIZES.unpack_from(self._buffer, at)
        body = at + _SIZES.size
        head = bytes(self._buffer[body : body + header_bytes])
        payload = bytes(self._buffer[body + header_bytes : end])
        try:
            header = json.loads(head)
            return _READERS[header["type"]](header, payload)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FramingError(f"a frame that cannot be read: {error!r}") from error


# --- values to JSON --------------------------------------------------------------------------------------------------


def _to_json(message: Message) -> dict[str, Any]:
    match message:
        case Ask(key, request):
            return {"type": "ask", "key": key, "request": _request_to_json(request)}
        case Ready(info):
            return {"type": "ready", "info": _info_to_json(info)}
        case Answer(key, hypothesis):
            return {"type": "answer", "key": key, "hypothesis": _hypothesis_to_json(hypothesis)}
        case Failure(key, error):
            return {"type": "failure", "key": key, "error": _error_to_json(error)}
        case Fault(key, reason):
            return {"type": "fault", "key": key, "reason": reason}
        case Cancel(key):
            return {"type": "cancel", "key": key}
        case Dropped(key):
            return {"type": "dropped", "key": key}
        case Ping():
            return {"type": "ping"}
        case Pong():
            return {"type": "pong"}


def _audio_bytes(request: DecodeRequest) -> bytes:
    audio = request.audio
    if audio.dtype != np.int16 or audio.ndim != 1 or not 1 <= len(audio) <= MAX_AUDIO_SAMPLES:
        raise BadAudio(f"a request's audio must be int16, 1 to {MAX_AUDIO_SAMPLES} samples")
    return audio.astype(_PCM, copy=False).tobytes()


def _request_to_json(request: DecodeRequest) -> dict[str, Any]:
    options = request.options
    return {
        "request_id": request.request_id,
        "utterance_id": request.utterance_id,
        "channel": request.channel,
        "priority": int(request.priority),
        "start_sample": request.start_sample,
        "speech_samples": request.speech_samples,
        "committed": request.committed,
        "context": request.context,
        "context_language": request.context_language,
        "options": {
            "language": options.language,
            "languages": list(options.languages),
            "task": options.task.value,
            "prompt": options.prompt,
            "hotwords": list(options.hotwords),
            "language_hint": options.language_hint,
            "temperature": options.temperature,
        },
    }


def _hypothesis_to_json(hypothesis: Hypothesis) -> dict[str, Any]:
    return {
        "request_id": hypothesis.request_id,
        "text": hypothesis.text,
        "words": [[w.text, w.start_sample, w.end_sample, w.probability] for w in hypothesis.words],
        "language": hypothesis.language,
        "language_probability": hypothesis.language_probability,
        "average_logprob": hypothesis.average_logprob,
        "no_speech_probability": hypothesis.no_speech_probability,
        "compression_ratio": hypothesis.compression_ratio,
        "temperature": hypothesis.temperature,
        "full_window": hypothesis.full_window,
        "rejected": hypothesis.rejected,
        "decode_s": hypothesis.decode_s,
        "decoder_steps": hypothesis.decoder_steps,
        "decoder_steps_saved": hypothesis.decoder_steps_saved,
    }


def _info_to_json(info: RecognizerInfo) -> dict[str, Any]:
    return {
        "model": info.model,
        "languages": sorted(info.languages),
        "capacity": info.capacity,
        "workers": info.workers,
    }


def _error_to_json(error: SttError) -> dict[str, Any]:
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
    fields: dict[str, Any] = {"kind": kind, "code": error.code, "message": error.message}
    if isinstance(error, Overloaded):
        fields["retry_after_s"] = error.retry_after_s
    return fields


# --- JSON to values --------------------------------------------------------------------------------------------------


def _request(fields: dict[str, Any], payload: bytes) -> DecodeRequest:
    options = fields["options"]
    return DecodeRequest(
        request_id=fields["request_id"],
        utterance_id=fields["utterance_id"],
        channel=fields["channel"],
        priority=Priority(fields["priority"]),
        audio=np.frombuffer(payload, _PCM).astype(np.int16, copy=False),
        start_sample=fields["start_sample"],
        speech_samples=fields["speech_samples"],
        committed=fields["committed"],
        context=fields["context"],
        context_language=fields["context_language"],
        options=DecodeOptions(
            language=options["language"],
            languages=tuple(options["languages"]),
            task=Task(options["task"]),
            prompt=options["prompt"],
            hotwords=tuple(options["hotwords"]),
            language_hint=options["language_hint"],
            temperature=options["temperature"],
        ),
    )


def _hypothesis(fields: dict[str, Any]) -> Hypothesis:
    words = tuple(Word(text, start, end, probability) for text, start, end, probability in fields["words"])
    return Hypothesis(**{**fields, "words": words})


def _info(fields: dict[str, Any]) -> RecognizerInfo:
    return RecognizerInfo(fields["model"], frozenset(fields["languages"]), fields["capacity"], fields["workers"])


def _error(fields: dict[str, Any]) -> SttError:
    kind = _ERRORS[fields["kind"]]
    if issubclass(kind, Overloaded):
        return kind(fields["message"], code=fields["code"], retry_after_s=fields["retry_after_s"])
    return kind(fields["message"], code=fields["code"])


_READERS: dict[str, Callable[[dict[str, Any], bytes], Message]] = {
    "ask": lambda header, payload: Ask(header["key"], _request(header["request"], payload)),
    "cancel": lambda header, _: Cancel(header["key"]),
    "ready": lambda header, _: Ready(_info(header["info"])),
    "answer": lambda header, _: Answer(header["key"], _hypothesis(header["hypothesis"])),
    "failure": lambda header, _: Failure(header["key"], _error(header["error"])),
    "fault": lambda header, _: Fault(header["key"], header["reason"]),
    "dropped": lambda header, _: Dropped(header["key"]),
    "ping": lambda _header, _: Ping(),
    "pong": lambda _header, _: Pong(),
}
