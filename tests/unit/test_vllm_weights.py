"""CTranslate2's layout against Transformers': names, and matrices that are split as they were joined."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.support.vllm_weights import read_variables, rename, write_safetensors


def test_joined_projections_are_split_and_renamed() -> None:
    joined = np.arange(6 * 2, dtype=np.float16).reshape(6, 2)
    found = dict(
        rename(
            {
                "decoder/layer_3/self_attention/linear_0/weight": joined,
                "decoder/layer_3/self_attention/linear_0/bias": joined[:, 0],
                "decoder/layer_3/attention/layer_norm/gamma": joined[0],
                "encoder/layer_norm/beta": joined[0],
                "encoder/num_heads": np.array(8),
            }
        )
    )
    assert set(found) == {
        *(f"model.decoder.layers.3.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"model.decoder.layers.3.self_attn.{name}.bias" for name in ("q_proj", "v_proj")),
        "model.decoder.layers.3.encoder_attn_layer_norm.weight",
        "model.encoder.layer_norm.bias",
    }
    assert (found["model.decoder.layers.3.self_attn.v_proj.weight"] == joined[4:]).all()


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 6"):
        read_variables(struct.pack("<IH12sI", 5, 12, b"WhisperSpec\0", 3))


def test_a_tensor_is_where_the_header_says(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.float16), "b": np.arange(4, dtype=np.float32).reshape(2, 2)}
    write_safetensors(tmp_path / "file", tensors)
    data = (tmp_path / "file").read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    begin, end = header["b"]["data_offsets"]
    assert header["b"]["shape"] == [2, 2]
    assert data[8 + size + begin : 8 + size + end] == tensors["b"].tobytes()
