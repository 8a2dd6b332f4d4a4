"""A vLLM engine process for tests: HARK_VLLM_PYTHON names its interpreter (`make setup-vllm`), else they skip."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from models.remote import RemoteConfig, RemoteObserver, RemoteRecognizer, Setting
from models.weights import WeightsConfig
from tests.support.vllm_weights import transformers_weights
from tests.support.weights import require_weights

START_TIMEOUT_S = 900.0  # vLLM takes its time, and more on a busy machine


def require_interpreter() -> str:
    """The interpreter that has vLLM, or skip."""
    interpreter = os.environ.get("HARK_VLLM_PYTHON", "")
    if not interpreter:
        pytest.skip("no vLLM: set HARK_VLLM_PYTHON to an interpreter that has it (make setup-vllm)")
    return interpreter


def require_model(name: str = "base") -> Path:
    """The model in the layout that vLLM reads, or skip."""
    return transformers_weights(require_weights(name), WeightsConfig().cache_dir / "test-vllm")


@asynccontextmanager
async def vllm_process(
    observer: RemoteObserver | None = None, *, request_timeout_s: float = 300.0, **settings: Setting
) -> AsyncIterator[RemoteRecognizer]:
    """A running engine process; ``settings`` are fields of VllmConfig."""
    engine: dict[str, Setting] = {"kind": "vllm", "model_dir": str(require_model()), "model_name": "base", **settings}
    config = RemoteConfig(
        engine=engine,
        interpreter=require_interpreter(),
        start_timeout_s=START_TIMEOUT_S,
        request_timeout_s=request_timeout_s,
        heartbeat_timeout_s=120.0,
    )
    recognizer = RemoteRecognizer(config, observer or RemoteObserver())
    await recognizer.start()
    try:
        yield recognizer
    finally:
        await recognizer.close()
