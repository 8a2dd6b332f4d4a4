"""Any number of channels → one, made for speech. Pure and streaming: constant memory, one pass.

A plain average loses speech in ordinary files: it cancels antiphase stereo, divides a lone centre channel by six and
drowns one talker in the noise of forty microphones. Here each channel weighs as much as its own level among all of
them, block by block: gain sharing, as in Dan Dugan's automatic microphone mixer (US 3,992,584, 1976).
The weights sum to one, so the mix cannot exceed full scale, and whoever speaks has the mix. A channel that runs
against the others (correlation below ``FLIP_BELOW``) is inverted first.
"""

import math

import numpy as np
from numpy.typing import NDArray

from streaming.types import Float32

BLOCK_MS = 32
RAMP_MS = 5  # gains slide to the new block's over this long, so that they do not click
LEVEL_RELEASE_S = 0.1  # of power: the next talker has the mix half a second after a talker 20 dB louder
CORRELATION_S = 0.5
DC_S = 1.0
FLIP_BELOW = -0.5
UNFLIP_ABOVE = 0.3
FLOOR_POWER = 1e-10  # -100 dB: digital silence weighs the same in all channels
GUARD_RELEASE_S = 1.5
SPIKE = 64.0  # +36 dB: no gain stage reaches it, a damaged sample does

# Half of a block's samples beyond this is no hot recording but integers written as floats, as numpy users do.
IMPLAUSIBLE_MEDIAN = 2.0
SCALES = (1.0, 2.0**15, 2.0**31)

Float64 = NDArray[np.float64]


def _decay(block_s: float, time_s: float) -> float:
    return math.exp(-block_s / time_s)


class Downmixer:
    """Frames of one rate and channel count → mono in [-1, 1]. The result does not depend on how the frames are cut."""

    def __init__(self, channels: int, sample_rate_hz: int) -> None:
        self._channels = channels
        self._block = max(1, sample_rate_hz * BLOCK_MS // 1000)
        ramp = max(1, min(self._block, sample_rate_hz * RAMP_MS // 1000))
        self._ramp: Float32 = np.linspace(0, 1, ramp, dtype=np.float32)
        block_s = self._block / sample_rate_hz
        self._level_keep = _decay(block_s, LEVEL_RELEASE_S)
        self._correlation_keep = _decay(block_s, CORRELATION_S)
        self._dc_keep = _decay(block_s, DC_S)
        self._guard_keep = _decay(block_s, GUARD_RELEASE_S)
        self._rest: Float32 = np.zeros((0, channels), np.float32)
        self._scale = SCALES[0]
        self._forget()

    def _forget(self) -> None:
        self._dc: Float32 | None = None
        self._levels: Float64 = np.zeros(self._channels)
        self._covariance: Float64 | None = None
        self._signs: Float64 = np.ones(self._channels)
        self._gains: Float32 | None = None
        self._envelope = 1.0
        self._guard = 1.0

    def mix(self, frames: Float32) -> Float32:
        """float32 (n, channels) → float32 (m,): the whole blocks so far; the rest waits for the next call."""
        joined = np.concatenate((self._rest, frames)) if len(self._rest) else frames
        whole = len(joined) - len(joined) % self._block
        self._rest = joined[whole:].copy()
        return self._mix_blocks(joined[:whole].reshape(-1, self._block, self._channels))

    def flush(self) -> Float32:
        """The frames that were waiting for a whole block."""
        rest, self._rest = self._rest, self._rest[:0]
        padded = np.zeros((1, self._block, self._channels), np.float32)
        padded[0, : len(rest)] = rest
        return self._mix_blocks(padded)[: len(rest)] if len(rest) else np.zeros(0, np.float32)

    def _mix_blocks(self, blocks: Float32) -> Float32:
        """(blocks, samples, channels) → (blocks x samples,)."""
        if not len(blocks):
            return np.zeros(0, np.float32)
        peak = np.abs(blocks).max()
        if not peak <= IMPLAUSIBLE_MEDIAN:  # NaN is none of it either
            blocks = np.clip(np.nan_to_num(blocks, nan=0.0, posinf=0.0, neginf=0.0), -(2.0**31), 2.0**31)
            if (rescale_at := self._find_larger_scale(blocks)) is not None:
                head = self._mix_scaled(blocks[:rescale_at])
                self._scale = SCALES[SCALES.index(self._scale) + 1]
                self._forget()
                return np.concatenate((head, self._mix_blocks(blocks[rescale_at:])))
        return self._mix_scaled(blocks)

    def _find_larger_scale(self, blocks: Float32) -> int | None:
        """The first block that can only be in the next larger of ``SCALES``."""
        if self._scale == SCALES[-1]:
            return None
        is_beyond = np.abs(blocks) > IMPLAUSIBLE_MEDIAN * self._scale
        beyond = np.flatnonzero(is_beyond.mean(axis=1).max(axis=1) > 0.5)
        return int(beyond[0]) if beyond.size else None

    def _mix_scaled(self, blocks: Float32) -> Float32:
        if not len(blocks):
            return np.zeros(0, np.float32)
        if self._scale != 1.0:
            blocks = blocks / np.float32(self._scale)
        blocks = np.clip(blocks, -SPIKE, SPIKE)
        blocks = blocks - self._follow_dc(blocks.mean(axis=1))[:, None, :]
        mixed = blocks[:, :, 0] if self._channels == 1 else self._share_gains(blocks)
        return self._guard_peaks(mixed).reshape(-1)

    def _share_gains(self, blocks: Float32) -> Float32:
        """(blocks, samples, channels) → (blocks, samples)."""
        centred = blocks - blocks.mean(axis=1, keepdims=True)
        covariances = np.matmul(centred.transpose(0, 2, 1), centred).astype(np.float64) / self._block
        gains = np.stack([self._next_gains(covariance) for covariance in covariances]).astype(np.float32)
        before = np.concatenate((gains[:1] if self._gains is None else self._gains[None], gains[:-1]))
        self._gains = gains[-1]
        mixed: Float32 = np.matmul(blocks, gains[:, :, None])[:, :, 0]
        ramp = len(self._ramp)
        old = np.matmul(blocks[:, :ramp], before[:, :, None])[:, :, 0]
        mixed[:, :ramp] = old + (mixed[:, :ramp] - old) * self._ramp
        return mixed

    def _follow_dc(self, means: Float32) -> Float32:
        """Each block's mean (blocks, channels) → the slowly followed offset to take off that block."""
        dc = means[0] if self._dc is None else self._dc
        offsets = np.empty_like(means)
        for i, mean in enumerate(means):
            dc = mean + (dc - mean) * np.float32(self._dc_keep)
            offsets[i] = dc
        self._dc = dc
        return offsets

    def _next_gains(self, covariance: Float64) -> Float64:
        """One block's covariance (channels, channels) → its weights (channels,), signed, of absolute sum 1."""
        if self._covariance is None:
            self._covariance = covariance
        self._covariance = covariance + (self._covariance - covariance) * self._correlation_keep
        self._levels = np.maximum(covariance.diagonal(), self._levels * self._level_keep)
        self._align_signs(self._covariance)
        weights = np.sqrt(self._levels + FLOOR_POWER)
        gains: Float64 = self._signs * weights / weights.sum()
        return gains

    def _align_signs(self, covariance: Float64) -> None:
        power = covariance.diagonal()
        reference = int(power.argmax())
        correlation = covariance[reference] / np.sqrt(power * power[reference] + FLOOR_POWER**2)
        sign = self._signs[reference]
        self._signs = np.where(correlation < FLIP_BELOW, -sign, np.where(correlation > UNFLIP_ABOVE, sign, self._signs))

    def _guard_peaks(self, blocks: Float32) -> Float32:
        """(blocks, samples) → the same, turned down where float audio goes beyond full scale instead of clipping it."""
        peaks = np.abs(blocks).max(axis=1)
        if self._envelope <= 1.0 and float(peaks.max()) <= 1.0:
            return blocks
        guards = np.empty(len(peaks), np.float32)
        for i, peak in enumerate(peaks):
            self._envelope = max(float(peak), 1.0 + (self._envelope - 1.0) * self._guard_keep)
            if self._envelope < 1.001:
                self._envelope = 1.0
            guards[i] = 1.0 / self._envelope
        before = np.concatenate(([np.float32(self._guard)], guards[:-1]))
        self._guard = float(guards[-1])
        # A louder block is turned down whole, from its first sample; only the way back up slides.
        start = np.minimum(before, guards)
        slide = np.ones(blocks.shape[1], np.float32)
        slide[: len(self._ramp)] = self._ramp
        out: Float32 = blocks * (start[:, None] + (guards - start)[:, None] * slide)
        return out
