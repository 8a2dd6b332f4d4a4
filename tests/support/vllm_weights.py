"""CTranslate2's Whisper files in the Transformers layout, which vLLM loads: test support, where no hub can be reached.

CTranslate2's file (version 6) is, all little-endian: u32 version; spec name; u32 revision; u32 count; that many of
name, u8 rank, rank times u32 dimension, u8 type, u32 byte count, data; then u32 count of aliases. A string is u16
length, the bytes and a zero. The numbers are the same; only names differ, and CTranslate2 joins q, k, v into one
matrix and the cross attention's k, v into another. Whisper has no bias for k.
"""

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16"}
_HEAD_SIZE = 64  # of every Whisper model
VERSION = 1  # of what is written here


def transformers_weights(source: Path, cache: Path) -> Path:
    """The directory under ``cache`` with ``source``'s model in the Transformers layout; written once, whole or not at
    all."""
    target = cache / f"{source.name}-transformers-{VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        half = Path(folder) / "model"
        half.mkdir()
        write(source, half)
        try:
            half.rename(target)
        except OSError:
            if not target.is_dir():  # else somebody else was faster
                raise
    return target


def write(source: Path, target: Path) -> None:
    """The files of ``target`` from those of ``source``. Raises ValueError where the file is not as described above."""
    variables = read_variables((source / "model.bin").read_bytes())
    tensors = dict(rename(variables))
    write_safetensors(target / "model.safetensors", tensors)
    shutil.copy(source / "tokenizer.json", target)
    given = json.loads((source / "config.json").read_text("utf-8"))
    added = json.loads((source / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    ids = {token["content"]: int(token["id"]) for token in added}
    config = model_config(tensors, given, ids)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation_config(config, given)),
        ("preprocessor_config.json", preprocessor_config(config)),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (target / name).write_text(json.dumps(content, indent=1), "utf-8")


# --- reading and renaming --------------------------------------------------------------------------------------------


def read_variables(data: bytes) -> dict[str, Array]:
    """The variables of a model.bin, those of one number too."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()

    version, spec, _revision = number("I"), text(), number("I")
    if version != 6 or spec != "WhisperSpec":
        raise ValueError(f"not a Whisper model of version 6: {spec} {version}")
    variables: dict[str, Array] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = _TYPES[number("B")], number("I")
        variables[name] = np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at).reshape(shape)
        at += size
    return variables


_NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "layer_norm": "layer_norm",
}
# CTranslate2's matrix → the projections that stand in it, one below the other.
_MATRICES = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "conv1": ("conv1",),
    "conv2": ("conv2",),
}
_SINGLE = {"embeddings/weight": "embed_tokens.weight", "position_encodings/encodings": "embed_positions.weight"}


def rename(variables: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Transformers' names with their tensors; variables of one number describe the architecture and are left out."""
    for path, value in variables.items():
        side, _, name = path.partition("/")
        if value.ndim == 0 or "alignment" in name:
            continue
        if name in _SINGLE:
            yield f"model.{side}.{_SINGLE[name]}", value
            continue
        layer, rest = re.fullmatch(r"(?:layer_(\d+)/)?(.+)", name).groups()  # type: ignore[union-attr]
        place = f"model.{side}." + (f"layers.{layer}." if layer else "")
        module, _, kind = rest.rpartition("/")
        if module in _NORMS:
            yield f"{place}{_NORMS[module]}.{'weight' if kind == 'gamma' else 'bias'}", value
            continue
        projections = _MATRICES[module]
        for projection, part in zip(projections, np.split(value, len(projections)), strict=True):
            if not (kind == "bias" and projection.endswith("k_proj")):
                yield f"{place}{projection}.{kind}", part


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """The format: u64 length of a JSON header, the header, then all data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        kind = _SAFETENSORS_TYPES[value.dtype.name]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


# --- the small files -------------------------------------------------------------------------------------------------


def model_config(tensors: Mapping[str, Array], given: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Transformers' WhisperConfig, read off the tensors' shapes."""
    width, mel_bins, _ = tensors["model.encoder.conv1.weight"].shape
    feed_forward = tensors["model.encoder.layers.0.fc1.bias"].shape[0]
    layers = {
        side: sum(f".{side}." in n and n.endswith(".fc1.bias") for n in tensors) for side in ("encoder", "decoder")
    }
    end = ids["<|endoftext|>"]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "torch_dtype": tensors["model.encoder.conv1.weight"].dtype.name,
        "d_model": width,
        "num_mel_bins": mel_bins,
        "vocab_size": tensors["model.decoder.embed_tokens.weight"].shape[0],
        "num_hidden_layers": layers["encoder"],
        **{f"{side}_layers": count for side, count in layers.items()},
        **{f"{side}_attention_heads": width // _HEAD_SIZE for side in layers},
        **{f"{side}_ffn_dim": feed_forward for side in layers},
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": tensors["model.decoder.embed_positions.weight"].shape[0],
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "suppress_tokens": given["suppress_ids"],
        "begin_suppress_tokens": given["suppress_ids_begin"],
    }


def generation_config(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What Transformers' generation_config.json holds, as far as anybody here reads it."""
    copied = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
    return {
        **{name: config[name] for name in (*copied, "begin_suppress_tokens")},
        "alignment_heads": given["alignment_heads"],
        "max_length": config["max_target_positions"],
    }


def preprocessor_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers' WhisperFeatureExtractor: the same numbers for every model but the number of mel bins."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "chunk_length": 30,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "sampling_rate": 16_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def tokenizer_config() -> dict[str, Any]:
    """Enough for Transformers to take tokenizer.json as it is."""
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
        "model_max_length": 1024,
    }
