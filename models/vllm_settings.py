"""Pure: how vLLM is run, chosen from the device and the model's shape. The one place for such choices.

Made for an L4 (24 GB, compute capability 8.9) and what is like it; anything else gets the nearest sane set. Each choice
says why, for the log. docs/vllm.md tells which of them were measured and which are only calculated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.silence_tail import POSITION_STEP, WINDOW_POSITIONS
from models.whisper_text import MAX_LENGTH_TOKENS

GIB = 1 << 30
MOST_SEQUENCES = 64  # Kyutai serves 64 streams on an L40S; each stream has at most one decode under way
CPU_SEQUENCES = 4  # batches of 4 gained on one core what can be gained (docs/performance.md)
GPU_POSITION_STEP = 100  # 2 s: 15 lengths to compile; half a step of silence more is cheap there
ENCODES_A_STEP = 4  # more in one step of the engine would hold up everybody's next token
KEPT_STATES = 64
RESERVE_BYTES = GIB  # CUDA context, graphs and the allocator's slack, as others report them; not measured
LARGEST_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Device:
    """What there is to run on. ``kind``: "cuda", "cpu" or another platform's name; ``capability`` is CUDA's."""

    kind: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    cpus: int = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a Transformers config.json, what decides about memory."""

    width: int
    encoder_layers: int
    decoder_layers: int
    encoder_feed_forward: int
    decoder_feed_forward: int
    vocabulary: int
    mel_bins: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Raises ValueError where it is not Whisper's."""
        if config.get("model_type") != "whisper":
            raise ValueError(f"model_type is {config.get('model_type')!r}, not 'whisper'")
        try:
            return cls(
                width=int(config["d_model"]),
                encoder_layers=int(config["encoder_layers"]),
                decoder_layers=int(config["decoder_layers"]),
                encoder_feed_forward=int(config["encoder_ffn_dim"]),
                decoder_feed_forward=int(config["decoder_ffn_dim"]),
                vocabulary=int(config["vocab_size"]),
                mel_bins=int(config["num_mel_bins"]),
            )
        except KeyError as error:
            raise ValueError(f"the model's config.json has no {error}") from error

    @property
    def parameters(self) -> int:
        """Without norms and biases: 2 % too few for tiny, less for all others."""
        square = self.width * self.width
        encoder = self.encoder_layers * (4 * square + 2 * self.width * self.encoder_feed_forward)
        decoder = self.decoder_layers * (8 * square + 2 * self.width * self.decoder_feed_forward)
        convolutions = 3 * self.width * (self.mel_bins + self.width)
        embeddings = self.width * (self.vocabulary + WINDOW_POSITIONS + MAX_LENGTH_TOKENS)
        return encoder + decoder + convolutions + embeddings

    def cache_bytes(self, bytes_a_number: int) -> int:
        """Keys and values of one sequence: the cross attention's 1500 positions and 448 tokens."""
        return self.decoder_layers * 2 * self.width * (WINDOW_POSITIONS + MAX_LENGTH_TOKENS) * bytes_a_number


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """``engine``: arguments of vLLM. ``environment``: for its processes. ``reasons``: what was chosen, and why.

    ``position_step``: encoder lengths are rounded up to it. ``warm_positions``: lengths to run before ready.
    ``compile_encoder``: whether each is compiled. ``sequences`` decodes run at once.
    """

    engine: Mapping[str, Any]
    environment: Mapping[str, str]
    reasons: Mapping[str, str]
    position_step: int
    warm_positions: tuple[int, ...]
    compile_encoder: bool
    sequences: int


_ENVIRONMENT = {
    "VLLM_PLUGINS": "hark_whisper",  # and no other
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # Whisper's back ends do not survive a fork
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # the files are here: models/weights.py fetched them
}
_ENGINE = {
    "max_model_len": MAX_LENGTH_TOKENS,
    "scheduling_policy": "priority",
    "limit_mm_per_prompt": {"audio": 1},
    "mm_processor_cache_gb": 0,  # features come ready-made
    "disable_log_stats": True,
    "max_logprobs": 128,  # every language at once
}


def choose(device: Device, shape: ModelShape) -> VllmSettings:
    """The settings for this device. Raises ValueError where the model does not fit into its memory."""
    if device.kind == "cpu":
        return _on_cpu(device, shape)
    dtype, dtype_reason = _dtype(device)
    cache, cache_reason = _cache_type(device)
    sequences, share, memory_reason = _memory(device, shape, 1 if cache == "fp8" else 2)
    sizes = [size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64) if size <= sequences]
    return VllmSettings(
        engine={
            **_ENGINE,
            "dtype": dtype,
            "kv_cache_dtype": cache,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": ENCODES_A_STEP * WINDOW_POSITIONS,
            "gpu_memory_utilization": share,
            "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        },
        environment=_ENVIRONMENT,
        reasons={
            "device": f"{device.name}, compute capability {'.'.join(map(str, device.capability))}",
            "dtype": dtype_reason,
            "kv_cache_dtype": cache_reason,
            "gpu_memory_utilization": memory_reason,
            "max_num_batched_tokens": f"at most {ENCODES_A_STEP} encodes between two tokens of everybody else",
            "cudagraph": "decode steps only, which is all that vLLM captures for an encoder and a decoder; "
            "sizes every 8 up to max_num_seqs, so that little is padded",
            "encoder": f"compiled for every {GPU_POSITION_STEP * 20 / 1000:.0f} s of audio",
        },
        position_step=GPU_POSITION_STEP,
        warm_positions=tuple(range(GPU_POSITION_STEP, WINDOW_POSITIONS + 1, GPU_POSITION_STEP)),
        compile_encoder=True,
        sequences=sequences,
    )


def _on_cpu(device: Device, shape: ModelShape) -> VllmSettings:
    cache_gib = math.ceil(CPU_SEQUENCES * shape.cache_bytes(4) * 1.25 / GIB)
    needed = cache_gib * GIB + 4 * shape.parameters
    if needed > LARGEST_SHARE * device.memory_bytes:
        raise ValueError(f"the model needs {needed / GIB:.1f} GiB, there are {device.memory_bytes / GIB:.1f}")
    return VllmSettings(
        engine={
            **_ENGINE,
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": CPU_SEQUENCES,
            "max_num_batched_tokens": WINDOW_POSITIONS,
        },
        environment={**_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)},
        reasons={
            "device": f"{device.cpus} CPUs",
            "dtype": "float32: few CPUs are faster at half precision",
            "enforce_eager": "there are no graphs on a CPU, and compiling takes minutes",
            "max_num_batched_tokens": "one encode between two tokens of everybody else",
            "threads": "vLLM's choice, which leaves one core to its other processes; all of them were ten times slower "
            "on two busy cores, where threads wait for each other",
        },
        position_step=POSITION_STEP,
        warm_positions=(WINDOW_POSITIONS // 5, WINDOW_POSITIONS),
        compile_encoder=False,
        sequences=CPU_SEQUENCES,
    )


def _dtype(device: Device) -> tuple[str, str]:
    if device.kind == "cuda" and device.capability < (8, 0):
        return "float16", "float16: no bfloat16 before compute capability 8.0"
    return "bfloat16", "bfloat16: half the memory and traffic of float32, and its range"


def _cache_type(device: Device) -> tuple[str, str]:
    if device.kind == "cuda" and device.capability >= (8, 9):
        return "fp8", "fp8: half the traffic of each decode step, which reads 1500 positions a layer"
    return "auto", "as dtype: fp8 needs compute capability 8.9"


def _memory(device: Device, shape: ModelShape, cache_number_bytes: int) -> tuple[int, float, str]:
    """How many sequences, which share of the memory, and why."""
    weights = 2 * shape.parameters
    states = KEPT_STATES * WINDOW_POSITIONS * shape.width * 2
    encoder = ENCODES_A_STEP * WINDOW_POSITIONS * (shape.encoder_feed_forward + 6 * shape.width) * 2
    logits = 4 * MAX_LENGTH_TOKENS * shape.vocabulary * 4
    fixed = weights + states + encoder + logits + RESERVE_BYTES
    each = shape.cache_bytes(cache_number_bytes)
    sequences = min(MOST_SEQUENCES, int((LARGEST_SHARE * device.memory_bytes - fixed) / each))
    if sequences < 1:
        raise ValueError(
            f"the model needs {(fixed + each) / GIB:.1f} GiB, {device.name} has {device.memory_bytes / GIB:.1f}"
        )
    share = min(LARGEST_SHARE, math.ceil(100 * (fixed + sequences * each) / device.memory_bytes) / 100)
    reason = (
        f"{weights / GIB:.1f} GiB of weights, {each / GIB:.2f} for each of {sequences} sequences, "
        f"{(fixed - weights) / GIB:.1f} for work and graphs"
    )
    return sequences, share, reason
