"""Pure: where each token lies in the audio, from what the decoder looked at, or by estimate where nobody can say.

The alignment is that of Whisper's reference (openai/whisper, timing.py): dynamic time warping through the alignment
heads' cross attention. The estimate spreads the text over the audible part of the audio, by length.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.silence_tail import SAMPLES_PER_POSITION
from streaming.types import Float32

Costs = NDArray[np.float64]
_QUIET_DB = 35.0  # below the loudest position: not speech
_QUIETEST_RMS = 1e-4  # -80 dBFS: nothing is audible below


def warp(attention: Float32) -> list[tuple[int, int]]:
    """The cheapest monotone path through attention, shape (rows, positions), from one corner to the other.

    Returns (row, position) pairs. Ties go as in the reference: diagonal, then down, then right.
    """
    rows, positions = attention.shape
    total = _accumulate(-attention.astype(np.float64))
    path = [(rows - 1, positions - 1)]
    row, position = rows, positions
    while (row, position) != (1, 1):
        options = ((row - 1, position - 1), (row - 1, position), (row, position - 1))
        row, position = min(options, key=lambda at: total[at])
        path.append((row - 1, position - 1))
    return path[::-1]


def _accumulate(cost: Costs) -> Costs:
    """Cost of the cheapest path to each cell, shape (rows + 1, positions + 1); the first row and column are walls.

    Cells of one anti-diagonal do not depend on each other, so each is one step of numpy.
    """
    rows, positions = cost.shape
    total = np.full((rows + 1, positions + 1), np.inf)
    total[0, 0] = 0.0
    for diagonal in range(rows + positions - 1):
        row = np.arange(max(0, diagonal - positions + 1), min(rows, diagonal + 1))
        position = diagonal - row
        before = np.minimum(total[row, position], np.minimum(total[row, position + 1], total[row + 1, position]))
        total[row + 1, position + 1] = cost[row, position] + before
    return total


def estimate(audio: Float32, lengths: Sequence[int]) -> list[int]:
    """Positions where tokens with texts of these lengths begin and the last ends, shape (n + 1,), for audio (samples,).

    Each character gets the same share of the positions that are audible.
    """
    heard = np.flatnonzero(_audible(audio))
    share = np.cumsum([0, *lengths]) / max(1, sum(lengths))
    at = np.minimum(np.round(share * heard.size).astype(int), heard.size - 1)
    begins: list[int] = heard[at].tolist()
    begins[-1] = int(heard[-1]) + 1
    return begins


def _audible(audio: Float32) -> NDArray[np.bool_]:
    """Which positions of 20 ms are at most 35 dB below the loudest; all where nothing is."""
    whole = np.pad(audio, (0, -audio.size % SAMPLES_PER_POSITION)).reshape(-1, SAMPLES_PER_POSITION)
    rms = np.sqrt(np.mean(np.square(whole, dtype=np.float64), axis=1))
    audible: NDArray[np.bool_] = rms > max(_QUIETEST_RMS, rms.max() * 10 ** (-_QUIET_DB / 20))
    return audible if audible.any() else np.ones_like(audible)
