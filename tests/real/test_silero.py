"""The real detector: split invariance, its reference probabilities, streams that do not mix, speech told from noise."""

import threading

import numpy as np
import pytest

from bench.corpus import read_audio
from models.silero import SileroModel
from streaming.ports import SpeechDetector
from streaming.types import Float32, Pcm16
from tests.support.corpus import corpus_row, corpus_rows
from tests.support.weights import require_vad

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model() -> SileroModel:
    return SileroModel(require_vad())


def as_windows(pcm: Pcm16) -> Float32:
    whole = len(pcm) // 512 * 512
    return (pcm[:whole].astype(np.float32) / np.float32(32768)).reshape(-1, 512)


def voiced_like(n_windows: int, seed: int) -> Float32:
    """A buzz with moving pitch and pauses: not speech, but it moves the detector's state."""
    time_s = np.arange(n_windows * 512) / 16_000
    rng = np.random.default_rng(seed)
    pitch = 120 + 40 * np.sin(2 * np.pi * 3 * time_s + rng.uniform(0, 6))
    buzz = np.sign(np.sin(2 * np.pi * np.cumsum(pitch) / 16_000)) * (np.sin(2 * np.pi * 2 * time_s) > 0)
    return (0.2 * buzz + 0.01 * rng.standard_normal(len(time_s))).astype(np.float32).reshape(-1, 512)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 511, 513])
def test_the_split_over_calls_changes_nothing(model: SileroModel, size: int) -> None:
    windows = voiced_like(1100, seed=1)
    whole = model.detector().probabilities(windows)
    detector = model.detector()
    pieces = [detector.probabilities(windows[i : i + size]) for i in range(0, len(windows), size)]
    assert np.ptp(whole) > 0.01
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-5)


def test_streams_share_the_model_and_nothing_else(model: SileroModel) -> None:
    streams = [voiced_like(300, seed) for seed in range(4)]
    alone = [model.detector().probabilities(stream) for stream in streams]
    together: dict[int, list[Float32]] = {i: [] for i in range(len(streams))}

    def follow(i: int) -> None:
        detector: SpeechDetector = model.detector()
        together[i] += [detector.probabilities(streams[i][j : j + 3]) for j in range(0, 300, 3)]

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(alone):
        np.testing.assert_allclose(np.concatenate(together[i]), expected, atol=1e-5)


def test_silence_and_noise_are_not_speech(model: SileroModel) -> None:
    noise = (0.05 * np.random.default_rng(0).standard_normal((300, 512))).astype(np.float32)
    assert model.detector().probabilities(np.zeros((300, 512), np.float32)).max() < 0.1
    assert model.detector().probabilities(noise).max() < 0.35


@pytest.mark.corpus
def test_recorded_speech_is_speech_and_rooms_are_not(model: SileroModel) -> None:
    speech = [row for row in corpus_rows("read-en") if row.id.startswith("read-en-librispeech")][::20]
    assert speech
    for row in speech:
        probabilities = model.detector().probabilities(as_windows(read_audio(row.path, limit_s=10)))
        assert (probabilities > 0.5).mean() > 0.4, row.id
    rooms = [row for row in corpus_rows("nonspeech") if "rooms" in row.path.parts]
    assert rooms
    for row in rooms:
        probabilities = model.detector().probabilities(as_windows(read_audio(row.path, limit_s=10)))
        assert (probabilities > 0.5).mean() < 0.1, row.id


# From the export silero_vad_16k_op15.onnx, one window a call (2026-12-01): another graph of the same weights.
KNOWN_PROBABILITIES = {0: 0.0017, 6: 0.0554, 12: 0.9329, 36: 0.9922, 72: 0.0607, 90: 0.0278, 102: 0.3282, 120: 0.2066}


@pytest.mark.corpus
def test_probabilities_are_those_of_the_reference_export(model: SileroModel) -> None:
    windows = as_windows(read_audio(corpus_row("read-en-jfk-jfk").path, limit_s=4))
    probabilities = model.detector().probabilities(windows)
    given = {window: float(probabilities[window]) for window in KNOWN_PROBABILITIES}
    assert given == pytest.approx(KNOWN_PROBABILITIES, abs=1e-3)
