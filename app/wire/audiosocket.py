"""Asterisk's AudioSocket: frames of a kind, a length and a payload over TCP. Pure.

Source: the README of github.com/CyCoreSystems/audiosocket. It has no place for parameters: all calls are heard as the
service's settings say.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from app.dialect import Action, Audio, Complaint, Eof, Start, ToClient, Wire
from app.wire.calls import CLOSE_DONE, CLOSE_RESTART, CUSTOMER, Call, Channel, Surroundings, Teller
from streaming.config import AudioFormat, Encoding, SessionConfig
from streaming.errors import BadMessage, ClientError, SttError

_RATES_HZ = {
    0x10: 8_000,
    0x11: 12_000,
    0x12: 16_000,
    0x13: 24_000,
    0x14: 32_000,
    0x15: 44_100,
    0x16: 48_000,
    0x17: 96_000,
    0x18: 192_000,
}
_HEADER_BYTES = 3
_SAMPLE_BYTES = 2
END = b"\x00\x00\x00"  # what either side ends a connection with


class Kind(IntEnum):
    """Of the frames that are no audio."""

    HANG_UP = 0x00
    ID = 0x01
    KEY = 0x03
    ERROR = 0xFF


class Frames:
    """Bytes in, however TCP has cut them; whole frames out. Holds one frame at most, which is 64 KiB."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Each frame's kind and payload."""
        self._held += data
        begin = 0
        while len(self._held) - begin >= _HEADER_BYTES:
            end = begin + _HEADER_BYTES + int.from_bytes(self._held[begin + 1 : begin + _HEADER_BYTES], "big")
            if len(self._held) < end:
                break
            yield self._held[begin], bytes(self._held[begin + _HEADER_BYTES : end])
            begin = end
        del self._held[:begin]


class AudioSocket:
    """One connection as app/dialect.py's Dialect."""

    def __init__(self, around: Surroundings, parameters: Mapping[str, str]) -> None:
        """``parameters``: how every call is heard, as far as not by default."""
        self._parameters = parameters
        self._close_code = around.close_code
        self._teller = Teller(around)
        self._frames = Frames()
        self._config: SessionConfig | None = None
        self._call_id = ""
        self._rate_hz = 0  # of the audio that comes; 0 before any has
        self._samples = 0  # of that rate
        self._before_ms = 0  # what came at other rates
        self._has_ended = False

    def open(self) -> Sequence[Action]:
        return []

    def receive(self, message: Wire) -> Sequence[Action]:
        if isinstance(message, str):  # HANG_UP: the protocol has no text
            return self._end()
        return [action for kind, payload in self._frames.take(message) for action in self._on_frame(kind, payload)]

    def _on_frame(self, kind: int, payload: bytes) -> Sequence[Action]:
        """Raises BadMessage where the connection does not begin with the call's id."""
        if self._has_ended:
            return []
        if not self._call_id and kind != Kind.HANG_UP:
            return self._begin(kind, payload)
        if kind in _RATES_HZ:
            return [*self._at_rate(_RATES_HZ[kind], len(payload)), Audio(payload)]
        match kind:
            case Kind.HANG_UP:
                return self._end()
            case Kind.KEY:
                self._teller.key_pressed(0, payload.decode("ascii", "replace"), self._position_ms)
                return []
            case Kind.ID:
                return [Complaint(BadMessage("a connection has one id"))]
            case Kind.ERROR:
                return [Complaint(ClientError(f"the exchange reports an error: {payload[:16].hex() or 'no code'}"))]
            case _:  # kinds are still being added
                return []

    def _begin(self, kind: int, payload: bytes) -> Sequence[Action]:
        if kind != Kind.ID or len(payload) != 16:
            raise BadMessage("an AudioSocket connection begins with the 16 bytes of a UUID")
        self._call_id = str(uuid.UUID(bytes=payload))
        call = Call("audiosocket", (self._call_id,), (Channel("call", CUSTOMER),), self._parameters, {})
        self._config = self._teller.begin(call, AudioFormat(Encoding.LINEAR16, 8_000))
        return []

    def _at_rate(self, rate_hz: int, count: int) -> Sequence[Action]:
        """The rate is known with the first audio, and may change when a call is transferred."""
        if rate_hz == self._rate_hz:
            self._samples += count // _SAMPLE_BYTES
            return []
        assert self._config is not None
        self._before_ms = self._position_ms
        self._rate_hz, self._samples = rate_hz, count // _SAMPLE_BYTES
        return [Start(replace(self._config, audio=AudioFormat(Encoding.LINEAR16, rate_hz)))]

    @property
    def _position_ms(self) -> int:
        return self._before_ms + (self._samples * 1000 // self._rate_hz if self._rate_hz else 0)

    def _end(self) -> Sequence[Action]:
        if self._has_ended:
            return []
        self._has_ended = True
        return [Eof()]

    def render(self, event: ToClient) -> Sequence[Wire]:
        self._teller.event(event)
        return []

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        self._teller.error(error, fatal=True)
        return [END], self._close_code(error)

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        if going_down:
            self._teller.going_down()
        return [END], CLOSE_RESTART if going_down else CLOSE_DONE, ""
