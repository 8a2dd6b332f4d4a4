"""Received RTP packets → audio packets in order. A lost packet costs itself and nothing else.

aiortc's own buffer waits for 4 packets before it gives one out, stalls for 16 when one is lost, stays full from then
on and throws valid packets away (aiortc issue 543). It is made for video, where a picture is many packets and is worth
waiting for. With Opus every packet is a frame, and what is late is lost.

``ReorderBuffer`` is pure. ``install`` puts it where aiortc 1.16 looks for its own, for audio alone.
"""

import inspect
from dataclasses import dataclass
from typing import Generic, TypeVar

import aiortc
import av
from aiortc import codecs, rtcrtpreceiver
from aiortc.codecs.base import Decoder
from aiortc.codecs.opus import OpusDecoder
from aiortc.jitterbuffer import JitterBuffer, JitterFrame
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtp import RtpPacket
from av.frame import Frame

from app.rtc import redundancy

T = TypeVar("T")

PATIENCE_PACKETS = 3  # later packets that a missing one is waited for: 60 ms of Opus
FAR = 200  # a jump of more sequence numbers than this, 4 s of Opus, is a sender that has begun anew
_SEQUENCES = 1 << 16
_TIMESTAMPS = 1 << 32


class ReorderBuffer(Generic[T]):
    """Packets in any order → packets in order, each at most once. Holds at most PATIENCE_PACKETS - 1."""

    def __init__(self) -> None:
        self._next: int | None = None  # the sequence number that is due
        self._held: dict[int, T] = {}  # later ones

    def __len__(self) -> int:
        return len(self._held)

    def push(self, sequence: int, packet: T) -> list[T]:
        """What may be played now, oldest first. A packet that is late or came before is dropped."""
        if self._next is None:
            self._next = sequence
        ahead = (sequence - self._next) % _SEQUENCES
        if FAR < ahead < _SEQUENCES - FAR:
            return self._restart(sequence, packet)
        if ahead >= _SEQUENCES - FAR:
            return []
        self._held[sequence] = packet
        if len(self._held) >= PATIENCE_PACKETS:
            self._next = self._earliest()
        return self._take_run()

    def _take_run(self) -> list[T]:
        run = []
        while self._next in self._held:
            run.append(self._held.pop(self._next))
            self._next = (self._next + 1) % _SEQUENCES
        return run

    def _earliest(self) -> int:
        due = self._next or 0
        return min(self._held, key=lambda sequence: (sequence - due) % _SEQUENCES)

    def _restart(self, sequence: int, packet: T) -> list[T]:
        due = self._next or 0
        rest = [self._held[held] for held in sorted(self._held, key=lambda held: (held - due) % _SEQUENCES)]
        self._held.clear()
        self._next = (sequence + 1) % _SEQUENCES
        return [*rest, packet]


class UnknownAiortc(RuntimeError):
    """This aiortc is not the one whose inner workings are known."""


@dataclass(slots=True)
class _Run:
    """What aiortc hands from a jitter buffer to its decoder thread: here several packets, since a hole that closes
    frees several at once and aiortc takes one object a packet."""

    timestamp: int  # of the first, in the codec's clock; aiortc maps it to a count that starts at 0
    packets: list[tuple[int, bytes]]  # ticks after the first, payload


class _AudioBuffer:
    """ReorderBuffer with the face of aiortc's JitterBuffer."""

    def __init__(self) -> None:
        self._packets = ReorderBuffer[_Packet]()

    def add(self, packet: RtpPacket) -> tuple[bool, _Run | None]:
        """Never asks for a key frame (the first of the two), which audio does not have."""
        ready = [ready for sequence, one in _unpack(packet) for ready in self._packets.push(sequence, one)]
        # A packet of mere padding counts, but an empty one would tell the decoder that the stream is over.
        ready = [one for one in ready if one.payload]
        if not ready:
            return False, None
        first = ready[0].timestamp
        return False, _Run(first, [((one.timestamp - first) % _TIMESTAMPS, one.payload) for one in ready])


@dataclass(frozen=True, slots=True)
class _Packet:
    timestamp: int
    payload: bytes


def _unpack(packet: RtpPacket) -> list[tuple[int, _Packet]]:
    """An RTP packet with what it brings along of those before it: sequence numbers and packets, oldest first."""
    sequence, timestamp = packet.sequence_number, packet.timestamp
    if packet.payload_type != redundancy.PAYLOAD_TYPE or not packet.payload:
        return [(sequence, _Packet(timestamp, packet.payload))]
    try:
        frames = redundancy.unpack(packet.payload)
    except ValueError:
        return []
    return [
        ((sequence - before) % _SEQUENCES, _Packet((timestamp - ticks) % _TIMESTAMPS, frame))
        for before, (ticks, frame) in zip(range(len(frames) - 1, -1, -1), frames, strict=True)
    ]


class _RunDecoder(Decoder):
    """A stock decoder for runs. Damaged packets are holes like lost ones."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def decode(self, encoded_frame: _Run) -> list[Frame]:  # type: ignore[override]
        frames: list[Frame] = []
        for ticks, payload in encoded_frame.packets:
            try:
                frames += self._decoder.decode(JitterFrame(payload, encoded_frame.timestamp + ticks))
            except av.FFmpegError:
                continue
        return frames


def _buffer(capacity: int, prefetch: int = 0, is_video: bool = False) -> JitterBuffer | _AudioBuffer:
    return JitterBuffer(capacity, prefetch, is_video) if is_video else _AudioBuffer()


def _decoder(codec: RTCRtpCodecParameters) -> Decoder:
    if codec.mimeType.lower() == redundancy.CODEC.mimeType:
        return _RunDecoder(OpusDecoder())
    stock = codecs.get_decoder(codec)
    return _RunDecoder(stock) if codec.mimeType.lower().startswith("audio/") else stock


def install() -> None:
    """Receivers that are made from now on use this buffer for audio, and take RED. More calls change nothing.

    There is no other way in: a receiver makes its buffer itself. Raises UnknownAiortc.
    """
    _require_known()
    rtcrtpreceiver.JitterBuffer = _buffer  # type: ignore[attr-defined,assignment]
    rtcrtpreceiver.get_decoder = _decoder  # type: ignore[attr-defined]
    if redundancy.CODEC not in codecs.CODECS["audio"]:
        codecs.CODECS["audio"].append(redundancy.CODEC)


def _require_known() -> None:
    facts = {
        f"its version is {aiortc.__version__}": aiortc.__version__.startswith("1.16."),
        "JitterBuffer takes other arguments": list(inspect.signature(JitterBuffer).parameters)
        == ["capacity", "prefetch", "is_video"],
        "JitterBuffer.add takes other arguments": list(inspect.signature(JitterBuffer.add).parameters)
        == ["self", "packet"],
        "RTCRtpReceiver makes its buffer in another way": "JitterBuffer"
        in rtcrtpreceiver.RTCRtpReceiver.__init__.__code__.co_names,
        "its decoder thread makes its decoder in another way": "get_decoder"
        in rtcrtpreceiver.decoder_worker.__code__.co_names,
    }
    wrong = [fact for fact, holds in facts.items() if not holds]
    if wrong:
        raise UnknownAiortc(f"aiortc 1.16 is needed, whose inner workings are known; {'; '.join(wrong)}")
