"""bench.gpu's engine part for real: on whatever device there is."""

import json

import pytest

from bench import gpu
from models.host import warm_up_clip
from models.vllm_settings import ModelShape
from tests.support.vllm_engine import require_interpreter, require_model

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(gpu.ENGINE_TIMEOUT_S)]


def test_the_engine_is_timed() -> None:
    model_dir, (clip, _) = require_model(), warm_up_clip()
    figures = gpu.engine_figures(model_dir, require_interpreter(), [clip] * 2)
    times = dict(figures.encoder)
    assert times[1500] > times[200], "30 s take longer than 4 s"
    assert all(step_s > 0 for _, step_s in figures.step)
    assert figures.audio_s == 2 * len(clip) / 16_000
    rows = gpu.engine_rows(figures, ModelShape.read(json.loads((model_dir / "config.json").read_text("utf-8"))))
    assert len(rows) == len(figures.encoder) + len(figures.step) + 3
