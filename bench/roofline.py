"""Pure: what a Whisper model asks of a device at the least, and how long the device's own limits make that take.

Multiplications alone are counted (2 FLOPs each with its addition); norms, activations and features are left out.
"""

import re
from dataclasses import dataclass

from models.silence_tail import WINDOW_POSITIONS
from models.vllm_settings import ModelShape


@dataclass(frozen=True, slots=True)
class Peak:
    """A device's limits: dense 16-bit tensor-core TFLOP/s and memory GB/s."""

    tflops: float
    gb_s: float

    def seconds(self, work: "Work") -> float:
        """The least that this work can take: as long as the slower of computing and reading."""
        return max(work.flops / (self.tflops * 1e12), work.bytes_read / (self.gb_s * 1e9))


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, and bytes that have to come from memory."""

    flops: float
    bytes_read: float


# NVIDIA's data sheets: without sparsity, which they often count in (then half of what they print). By the name that the
# driver gives, the first that fits; A10G, L40S and others have names of their own and other limits.
_PEAKS = (
    (r"\bL4\b", Peak(121, 300)),  # L4 Tensor Core GPU: 242 with sparsity
    (r"\bA10\b", Peak(125, 600)),  # A10 Tensor Core GPU
    (r"\bA100\b.*\b40GB\b", Peak(312, 1_555)),  # A100 Tensor Core GPU, 40 GB
    (r"\bA100\b.*\bPCIe\b", Peak(312, 1_935)),  # the same sheet, 80 GB PCIe
    (r"\bA100\b", Peak(312, 2_039)),  # the same sheet, 80 GB SXM
    (r"\bH100 PCIe\b", Peak(756, 2_000)),  # H100 Tensor Core GPU: 1,513 with sparsity
    (r"\bH100 NVL\b", Peak(835, 3_900)),  # the same sheet: 1,671 with sparsity
    (r"\bH100\b", Peak(989, 3_350)),  # the same sheet, SXM: 1,979 with sparsity
    (r"\bH200 NVL\b", Peak(835, 4_800)),  # H200 Tensor Core GPU: 1,671 with sparsity
    (r"\bH200\b", Peak(989, 4_800)),  # the same sheet, SXM: 1,979 with sparsity
)


def peak_of(device: str) -> Peak | None:
    """The limits of the device with this name; None where they are not known."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device)), None)


def encoder(shape: ModelShape, positions: int, number_bytes: int) -> Work:
    """One window of so many positions (20 ms each) through the encoder; its weights are read once."""
    width, frames = shape.width, 2 * positions
    layer = 4 * width * width + 2 * width * shape.encoder_feed_forward
    convolutions = 3 * width * (shape.mel_bins * frames + width * positions)
    attention = 2 * positions * positions * width  # scores, and the weighted sum
    multiplications = convolutions + shape.encoder_layers * (positions * layer + attention)
    weights = 3 * width * (shape.mel_bins + width) + shape.encoder_layers * layer
    return Work(2 * multiplications, weights * number_bytes)


def decoder_step(shape: ModelShape, batch: int, tokens: int, number_bytes: int, cache_number_bytes: int) -> Work:
    """One token for each of ``batch`` sequences that hold ``tokens`` already.

    The weights are read once for all; each sequence's keys and values once, those of 1500 positions and of its tokens.
    The cross attention's own keys and values are projected once a request, not here.
    """
    width = shape.width
    layer = 6 * width * width + 2 * width * shape.decoder_feed_forward
    weights = shape.decoder_layers * layer + width * shape.vocabulary
    cached = shape.decoder_layers * 2 * width * (WINDOW_POSITIONS + tokens)
    return Work(
        flops=2 * batch * (weights + cached),
        bytes_read=weights * number_bytes + batch * cached * cache_number_bytes,
    )
