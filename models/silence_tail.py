"""Pure: how much of Whisper's 30 s window to encode, and what stands in for the rest.

Whisper pads every clip to 30 s and encodes all of it, though the speech of a live utterance fills a few seconds.
Encoding only what is there is several times cheaper, but a decoder that finds no silence after the speech does not
know where to stop and loops. So the encoder gets the audio and a margin of silence, and the positions that are
missing up to 1500 are filled with the states of a window that holds nothing but silence, computed once at start-up
(measured against the full window in docs/performance.md).
"""

import math

import numpy as np
from numpy.typing import NDArray

HOP_SAMPLES = 160  # one log-mel frame at 16 kHz
SAMPLES_PER_POSITION = 320  # the encoder's second convolution halves the frames
WINDOW_POSITIONS = 1500
WINDOW_SAMPLES = WINDOW_POSITIONS * SAMPLES_PER_POSITION  # 30 s
WINDOW_FRAMES = WINDOW_SAMPLES // HOP_SAMPLES
POSITION_STEP = 10  # lengths are rounded up to 0.2 s, so that few distinct shapes reach the engine

SILENT_LOG_MEL = -1.5  # (log10(1e-10) + 4) / 4: Whisper's log-mel of digital silence


def positions_to_encode(audio_samples: int, margin_samples: int) -> int:
    """Encoder positions (20 ms each) that hold the audio and the margin, rounded up; at most the whole window.

    Raises ValueError where the audio is empty or longer than 30 s.
    """
    if not 1 <= audio_samples <= WINDOW_SAMPLES:
        raise ValueError(f"audio must hold 1 to {WINDOW_SAMPLES} samples, not {audio_samples}")
    steps = math.ceil((audio_samples + margin_samples) / (SAMPLES_PER_POSITION * POSITION_STEP))
    return min(WINDOW_POSITIONS, steps * POSITION_STEP)


def pad_to(audio: NDArray[np.float32], positions: int) -> NDArray[np.float32]:
    """The audio, shape (n,), followed by digital silence, shape (positions * 320,)."""
    return np.pad(audio, (0, positions * SAMPLES_PER_POSITION - audio.shape[0]))


def silent_log_mel(n_mels: int) -> NDArray[np.float32]:
    """Log-mel of 30 s of digital silence, float32, shape (n_mels, 3000)."""
    return np.full((n_mels, WINDOW_FRAMES), SILENT_LOG_MEL, dtype=np.float32)


def append_tail(states: NDArray[np.generic], tail: NDArray[np.generic]) -> NDArray[np.generic]:
    """Encoder states, shape (1, p, d), completed to tail's (1, 1500, d) with tail's own positions p and later.

    The tail's states carry the position they were encoded at, so each keeps its place.
    """
    if states.shape[1] >= tail.shape[1]:
        return states
    return np.concatenate([states, tail[:, states.shape[1] :].astype(states.dtype, copy=False)], axis=1)
