"""Log-mel features as Whisper was trained on, with torch: made once for a request, whatever its ladder asks later."""

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank

from streaming.audio import SAMPLE_RATE
from streaming.types import Float32

_FFT = 400
_HOP = 160


class LogMel:
    """Thread-safe; torch's transform runs without the interpreter lock."""

    def __init__(self, mel_bins: int) -> None:
        filters = mel_filter_bank(
            num_frequency_bins=1 + _FFT // 2,
            num_mel_filters=mel_bins,
            min_frequency=0.0,
            max_frequency=SAMPLE_RATE / 2,
            sampling_rate=SAMPLE_RATE,
            norm="slaney",
            mel_scale="slaney",
        )
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T, dtype=np.float32))
        self._window = torch.hann_window(_FFT)

    def __call__(self, audio: Float32) -> torch.Tensor:
        """Audio, float32, shape (n,), n a multiple of 160 → float32, shape (mel bins, n / 160)."""
        spectrum = torch.stft(torch.from_numpy(audio), _FFT, _HOP, window=self._window, return_complex=True)
        power = spectrum[:, :-1].abs().square()
        log = (self._filters @ power).clamp_min(1e-10).log10()
        return (torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0
