"""The real weights for tests marked ``real``: fetched once into Hark's cache, or the test skips with the reason."""

import functools
from pathlib import Path

import pytest

from models.weights import WeightsConfig, WeightsNotFound, locate, locate_vad


@functools.cache
def _find(name: str) -> Path | str:
    try:
        return locate_vad(WeightsConfig()) if name == "vad" else locate(name, WeightsConfig())
    except WeightsNotFound as error:
        return error.message


def require_weights(name: str) -> Path:
    """The directory of the model ``name``, or skip."""
    found = _find(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def require_vad() -> Path:
    """The speech detector's ONNX file, or skip."""
    return require_weights("vad")


@pytest.fixture(scope="session")
def base_weights() -> Path:
    return require_weights("base")


@pytest.fixture(scope="session")
def tiny_en_weights() -> Path:
    return require_weights("tiny.en")


@pytest.fixture(scope="session")
def vad_weights() -> Path:
    return require_vad()
