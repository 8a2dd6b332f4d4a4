"""Twilio Media Streams and Telnyx' media streaming: JSON messages with base64 audio, one track a message. Pure.

Sources: twilio.com/docs/voice/media-streams/websocket-messages, and developers.telnyx.com, "Stream call media over
WebSocket". They differ in names, in codecs, and in that Telnyx does not promise the order of its media messages. Others
speak Twilio's dialect with less in it: a message without track, chunk or timestamp is taken too.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from app.dialect import Action, Complaint, Eof, Start, ToClient, Wire
from app.wire.calls import (
    AGENT,
    CLOSE_DONE,
    CLOSE_RESTART,
    CUSTOMER,
    HANG_UP,
    SECRET_NAMES,
    Call,
    Channel,
    Surroundings,
    Teller,
    object_in,
    parse_object,
    text_in,
)
from app.wire.tracks import Placed, Reorder, Tracks, TracksConfig
from streaming.config import AudioFormat, Encoding
from streaming.errors import BadMessage, SttError

# What is heard of the person on the telephone comes in to the exchange; what that person hears goes out.
_LABELS = {"inbound": CUSTOMER, "outbound": AGENT}
_SILENCE = {Encoding.MULAW: b"\xff", Encoding.ALAW: b"\xd5", Encoding.LINEAR16: b"\x00\x00"}  # one sample of it


@dataclass(frozen=True, slots=True)
class Variant:
    """Whose protocol it is. ``stream``, ``media_format``, ``sample_rate`` and ``parameters`` are names of fields.

    ``ids``: fields of ``start`` under which a call can be followed, besides its stream's. ``window``: media messages of
    a track that may wait for one that is late; 0 where the order is promised.
    """

    protocol: str
    stream: str
    ids: tuple[str, ...]
    media_format: str
    sample_rate: str
    parameters: str
    encodings: Mapping[str, Encoding]
    window: int = 0


TWILIO = Variant(
    protocol="twilio",
    stream="streamSid",
    ids=("callSid",),
    media_format="mediaFormat",
    sample_rate="sampleRate",
    parameters="customParameters",
    encodings={"audio/x-mulaw": Encoding.MULAW},
)
TELNYX = Variant(
    protocol="telnyx",
    stream="stream_id",
    ids=("call_control_id", "call_session_id"),
    media_format="media_format",
    sample_rate="sample_rate",
    parameters="custom_parameters",
    encodings={"PCMU": Encoding.MULAW, "PCMA": Encoding.ALAW, "L16": Encoding.LINEAR16},
    window=5,
)


def is_start(message: Wire) -> bool:
    """Whether it is the message that says whose stream it is."""
    try:
        return isinstance(message, str) and parse_object(message).get("event") == "start"
    except BadMessage:
        return False


def credentials_in(text: Wire, variant: Variant) -> tuple[str, ...]:
    """Keys among the parameters of a ``start`` message: Twilio drops the query of a stream's URL."""
    try:
        start = object_in(parse_object(text if isinstance(text, str) else ""), "start")
        parameters = object_in(start, variant.parameters)
    except BadMessage:
        return ()
    found = [parameters.get(name) for name in sorted(SECRET_NAMES)]
    return tuple(value for value in found if isinstance(value, str) and value)


class ByteOrder:
    """Makes 16-bit audio little-endian. RFC 3551 says that L16 is big-endian, and not everybody who sends it does so.

    Sound is smooth: of both readings, the right one has the smaller steps. All that was heard so far decides.
    """

    def __init__(self) -> None:
        self._big_steps = self._little_steps = 0.0

    def to_little(self, data: bytes) -> bytes:
        """``data``: 16-bit samples in either order."""
        big, little = np.frombuffer(data, ">i2"), np.frombuffer(data, "<i2")
        self._big_steps += _steps(big)
        self._little_steps += _steps(little)
        return data if self._little_steps < self._big_steps else big.astype("<i2").tobytes()


def _steps(samples: npt.NDArray[np.int16]) -> float:
    """How far it is from silence to the first of these samples, and on from each to the next, together."""
    return float(np.abs(np.diff(samples.astype(np.float64), prepend=0.0)).sum())


@dataclass(slots=True)
class _Stream:
    """What goes on from ``start`` to ``stop``."""

    encoding: Encoding
    channels: Mapping[str, int]
    tracks: Tracks
    orders: Mapping[str, Reorder[tuple[int | None, bytes]]]
    byte_order: ByteOrder = field(default_factory=ByteOrder)


class MediaStreams:
    """One stream as app/dialect.py's Dialect. Nothing is sent to the exchange, which would not read it."""

    def __init__(self, variant: Variant, around: Surroundings) -> None:
        self._variant = variant
        self._close_code = around.close_code
        self._teller = Teller(around)
        self._stream: _Stream | None = None
        self._has_ended = False

    def open(self) -> Sequence[Action]:
        return []

    def receive(self, message: Wire) -> Sequence[Action]:
        """What is wrong with a message is complained of; audio without a good ``start`` is the end of it."""
        if message == HANG_UP:
            return self._stop()
        try:
            return self._on_message(parse_object(message if isinstance(message, str) else ""))
        except BadMessage as error:
            if self._stream is None:
                raise
            return [Complaint(error)]

    def _on_message(self, message: Mapping[str, Any]) -> Sequence[Action]:
        match message.get("event"):
            case "start":
                return self._start(message)
            case "media":
                return self._media(object_in(message, "media"))
            case "dtmf":
                return self._key(object_in(message, "dtmf"))
            case "stop":
                return self._stop()
            case str():  # connected, mark; and what may be added to the protocol
                return []
            case _:
                raise BadMessage("a message must have an 'event'")

    def _start(self, message: Mapping[str, Any]) -> Sequence[Action]:
        if self._stream is not None:
            raise BadMessage("a stream has one 'start'")
        start = object_in(message, "start")
        audio, announced = self._format(object_in(start, self._variant.media_format)), _tracks_in(start)
        names = announced or tuple(_LABELS)
        audio = AudioFormat(audio.encoding, audio.sample_rate_hz, len(names))
        config = self._teller.begin(self._call(message, start, names), audio)
        window = self._variant.window
        self._stream = _Stream(
            audio.encoding,
            {name: number for number, name in enumerate(names)},
            Tracks(
                TracksConfig(
                    sample_rate_hz=audio.sample_rate_hz,
                    sample_bytes=audio.sample_bytes,
                    silence=_SILENCE[audio.encoding],
                    channels=audio.channels,
                    awaited=bool(announced),
                )
            ),
            {name: Reorder(window) for name in names} if window else {},
        )
        return [Start(config)]

    def _format(self, given: Mapping[str, Any]) -> AudioFormat:
        encodings = self._variant.encodings
        name, rate_hz = given.get("encoding", next(iter(encodings))), given.get(self._variant.sample_rate, 8_000)
        encoding = encodings.get(name) if isinstance(name, str) else None
        if encoding is None:
            known = ", ".join(encodings)
            raise BadMessage(f"encoding must be one of {known}, not {str(name)[:40]!r}", code="bad_parameter")
        if not isinstance(rate_hz, int) or str(given.get("channels", 1)) != "1":
            raise BadMessage("each track has one channel, and a sample rate that is a number", code="bad_parameter")
        return AudioFormat(encoding, rate_hz)

    def _call(self, message: Mapping[str, Any], start: Mapping[str, Any], names: Sequence[str]) -> Call:
        variant = self._variant
        stream_id = text_in(message, variant.stream) or text_in(start, variant.stream)
        ids = tuple(found for name in variant.ids if (found := text_in(start, name)))
        if not ids:
            raise BadMessage(f"'start' must have a {variant.ids[0]!r}")
        kept = {name: value for name, value in start.items() if name not in (variant.parameters, variant.media_format)}
        return Call(
            variant.protocol,
            (*ids, *([stream_id] if stream_id else [])),
            tuple(Channel(name, _LABELS[name]) for name in names),
            object_in(start, variant.parameters),
            {**kept, variant.stream: stream_id},
        )

    def _media(self, media: Mapping[str, Any]) -> Sequence[Action]:
        stream = self._stream
        if stream is None:
            raise BadMessage("'media' came before 'start'")
        if self._has_ended:
            return []
        name = media.get("track", next(iter(stream.channels)))
        if not isinstance(name, str) or name not in stream.channels:
            raise BadMessage(f"there is no track {str(name)[:40]!r} in this stream")
        piece = _number(media.get("timestamp")), self._audio(media, stream)
        number, order = _number(media.get("chunk")), stream.orders.get(name)
        pieces = [piece] if order is None or number is None else order.take(number, piece)
        return [placed for at_ms, data in pieces for placed in stream.tracks.place(stream.channels[name], at_ms, data)]

    def _audio(self, media: Mapping[str, Any], stream: _Stream) -> bytes:
        payload = media.get("payload")
        try:
            data = base64.b64decode(payload if isinstance(payload, str) else "?", validate=True)
        except (binascii.Error, ValueError):  # a text that is not ASCII is a plain ValueError
            raise BadMessage("'payload' must be base64") from None
        if stream.encoding is not Encoding.LINEAR16:
            return data
        if len(data) % 2:
            raise BadMessage("'payload' must be whole samples of 16 bits")
        return stream.byte_order.to_little(data)

    def _key(self, dtmf: Mapping[str, Any]) -> Sequence[Action]:
        if self._stream is not None:
            name = text_in(dtmf, "track").removesuffix("_track")
            channel = self._stream.channels.get(name, 0)
            self._teller.key_pressed(channel, text_in(dtmf, "digit"), self._stream.tracks.position_ms)
        return []

    def _stop(self) -> Sequence[Action]:
        if self._has_ended:
            return []
        self._has_ended = True
        return [*(self._rest(self._stream) if self._stream else []), Eof()]

    def _rest(self, stream: _Stream) -> Sequence[Placed]:
        late = [(name, piece) for name, order in stream.orders.items() for piece in order.flush()]
        placed = [
            one for name, (at_ms, data) in late for one in stream.tracks.place(stream.channels[name], at_ms, data)
        ]
        return [*placed, *stream.tracks.flush()]

    def render(self, event: ToClient) -> Sequence[Wire]:
        self._teller.event(event)
        return []

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        self._teller.error(error, fatal=True)
        return [], self._close_code(error)

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        if not going_down:
            return [], CLOSE_DONE, ""
        self._teller.going_down()
        return [], CLOSE_RESTART, "service restart"


def _tracks_in(start: Mapping[str, Any]) -> tuple[str, ...]:
    """The tracks that are announced, inbound first; none where nothing is said of them. Raises BadMessage."""
    given = start.get("tracks", [])
    if not isinstance(given, list) or any(name not in _LABELS for name in given if isinstance(name, str)):
        raise BadMessage(f"'tracks' must be a list of {', '.join(_LABELS)}")
    return tuple(name for name in _LABELS if name in given)


def _number(value: object) -> int | None:
    """A number of the protocol, which may be a text; None where it is none."""
    text = str(value) if isinstance(value, int | str) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
