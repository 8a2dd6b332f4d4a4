"""Decoded WebRTC audio → 16 kHz mono pieces and gaps whose lengths add up to the sender's clock.

What a network loses leaves a hole in the frames' time stamps. It becomes a Gap of just that length, so that a time in
the transcript stays a time in the conversation. soxr is used and not av.AudioResampler, which keeps a native thread for
each core as long as anything refers to it.
"""

from fractions import Fraction

import av
import numpy as np

from app.live import Gap
from streaming.audio import SAMPLE_RATE, Resampler, to_pcm16
from streaming.types import Float32

# A longer hole is a sender that has begun anew: a connection whose network is gone for 30 s is closed (RFC 7675).
LONGEST_HOLE_S = 30
# Of libav's sample formats: full scale, and the value of silence.
_LEVELS = {
    "u8": (2.0**7, np.float32(2**7)),
    "s16": (2.0**15, np.float32(0)),
    "s32": (2.0**31, np.float32(0)),
    "flt": (1.0, np.float32(0)),
    "dbl": (1.0, np.float32(0)),
}


class FrameConverter:
    """One connection's frames, in order. Between two frames nothing is kept but the filter's own delay."""

    def __init__(self) -> None:
        self._emitted = 0  # samples at 16 kHz given out, gaps included
        self._rate_hz = 0
        self._due: Fraction | None = None  # when the next frame should begin, in seconds of the sender's clock
        self._clock = Fraction(0)  # samples at 16 kHz that have come, gaps included
        self._resampler: Resampler | None = None

    def convert(self, frame: av.AudioFrame) -> list[bytes | Gap]:
        """Any rate, layout and sample format → int16 little-endian pieces, and the gaps before them."""
        out: list[bytes | Gap] = []
        hole = self._hole(frame)
        if hole or frame.sample_rate != self._rate_hz:
            out += self.flush()
            self._clock += hole
            out += self._gap()
            self._rate_hz = frame.sample_rate
        if self._resampler is None:
            self._resampler = Resampler(frame.sample_rate, 1)
        self._clock += Fraction(frame.samples * SAMPLE_RATE, frame.sample_rate)
        return out + self._pieces(self._resampler.resample(_mono(frame)))

    def flush(self) -> list[bytes | Gap]:
        """What the filter still holds; then as many samples are out as the clock says. A next frame may follow."""
        if self._resampler is None:
            return []
        tail = self._resampler.resample(np.zeros((0, 1), np.float32), last=True)
        self._resampler = None
        # soxr rounds to the nearest sample: without this, a stream of many short stretches would lose the clock.
        missing = int(self._clock) - self._emitted
        return self._pieces(np.pad(tail[:missing], ((0, max(0, missing - len(tail))), (0, 0))))

    def _hole(self, frame: av.AudioFrame) -> Fraction:
        """What is missing before the frame, in samples at 16 kHz. Jumps back, and far ones, set the clock anew."""
        begins = self._due if frame.pts is None or frame.time_base is None else frame.pts * frame.time_base
        if begins is None:
            return Fraction(0)
        hole = begins - (begins if self._due is None else self._due)
        self._due = begins + Fraction(frame.samples, frame.sample_rate)
        return hole * SAMPLE_RATE if 0 < hole <= LONGEST_HOLE_S else Fraction(0)

    def _gap(self) -> list[bytes | Gap]:
        """From where the audio has ended to the clock."""
        missing = int(self._clock) - self._emitted
        self._emitted += missing
        return [Gap(missing)] if missing else []

    def _pieces(self, frames: Float32) -> list[bytes | Gap]:
        self._emitted += frames.shape[0]
        return [to_pcm16(frames[:, 0]).astype("<i2").tobytes()] if frames.shape[0] else []


def _mono(frame: av.AudioFrame) -> Float32:
    """float32, shape (n, 1): the mean of the channels."""
    channels = frame.layout.nb_channels
    raw = frame.to_ndarray()  # (channels, n) where planar, else (1, n * channels)
    samples = raw if frame.format.is_planar else raw.reshape(-1, channels).T
    full_scale, silence = _LEVELS[frame.format.name.removesuffix("p")]
    # By channel: numpy's mean over so short an axis takes ten times as long.
    total = np.zeros(frame.samples, np.float32)
    for channel in samples:
        total += channel.astype(np.float32) - silence
    return (total * np.float32(1 / (full_scale * channels))).reshape(-1, 1)
