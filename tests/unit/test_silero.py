"""The detector's own logic (contexts, blocks, state), over a stand-in that shows what the model was given."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.silero import SileroDetector, SileroModel
from streaming.types import Float32


class SummingModel(SileroModel):
    """Gives, for each frame, its context's last sample; its state counts the frames."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def run(self, frames: Float32, hidden: Float32, cell: Float32) -> tuple[Float32, Float32, Float32]:
        assert frames.shape[1:] == (576,)
        assert frames.dtype == np.float32
        self.calls.append(len(frames))
        return frames[:, 63] + hidden[0, 0, 0], hidden + 1, cell


def windows(n: int) -> Float32:
    return np.arange(n * 512, dtype=np.float32).reshape(n, 512)


def test_each_window_sees_the_end_of_the_one_before() -> None:
    result = SileroDetector(SummingModel()).probabilities(windows(3))
    assert result.tolist() == [0.0, 511.0, 1023.0]
    assert result.dtype == np.float32


@given(st.lists(st.integers(0, 5), max_size=8))
def test_the_context_is_carried_over_calls(sizes: list[int]) -> None:
    model = SummingModel()
    detector = SileroDetector(model)
    stream = windows(sum(sizes))
    contexts: list[float] = []
    calls = start = 0
    for size in sizes:
        given_back = detector.probabilities(stream[start : start + size])
        contexts += (given_back - calls).tolist()
        calls += size > 0
        start += size
    assert contexts == [max(0.0, 512.0 * i - 1) for i in range(len(stream))]
    assert len(model.calls) == calls  # no call for no windows


def test_a_long_run_is_cut_into_blocks_that_share_one_state() -> None:
    model = SummingModel()
    result = SileroDetector(model).probabilities(windows(1100))
    assert model.calls == [512, 512, 76]
    assert result[512] == 512 * 512 - 1 + 1  # the second block, with the state that the first one left


def test_the_caller_may_reuse_its_buffer() -> None:
    detector = SileroDetector(SummingModel())
    buffer = windows(1)
    detector.probabilities(buffer)
    buffer[:] = -1
    assert detector.probabilities(windows(1)).tolist() == [512.0]


@pytest.mark.parametrize("wrong", [np.zeros(512, np.float32), np.zeros((2, 256), np.float32), np.zeros((1, 512))])
def test_another_shape_or_dtype_is_refused(wrong: Float32) -> None:
    with pytest.raises(ValueError, match="windows must be"):
        SileroDetector(SummingModel()).probabilities(wrong)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(Exception, match=r"x\.onnx"):
        SileroModel(path)
