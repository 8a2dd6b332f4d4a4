"""Mixing to mono: speech survives wherever it stands in the channels, and no cut of the input changes the result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.downmix import Downmixer
from streaming.types import Float32

RATE = 16_000


def talk(seconds: float = 2.0, seed: int = 0, level: float = 0.3) -> Float32:
    """Noise with a syllable's envelope: a stand-in for speech."""
    n = round(seconds * RATE)
    envelope = np.clip(np.sin(2 * np.pi * 3 * np.arange(n) / RATE), 0, 1)
    noise = np.random.default_rng(seed).uniform(-1, 1, n)
    return (level * envelope * noise).astype(np.float32)


def hiss(seconds: float, level: float, seed: int) -> Float32:
    n = round(seconds * RATE)
    return (level * np.random.default_rng(1000 + seed).uniform(-1, 1, n)).astype(np.float32)


def mix(frames: Float32, rate: int = RATE) -> Float32:
    mixer = Downmixer(frames.shape[1], rate)
    return np.concatenate((mixer.mix(frames), mixer.flush()))


def rms(x: Float32) -> float:
    return float(np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def likeness(a: Float32, b: Float32) -> float:
    """Absolute correlation: 1 where one is the other but for level and sign."""
    return abs(float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b))))


def assert_speech(mono: Float32, speech: Float32, *, floor_db: float = -3.0) -> None:
    assert mono.shape == speech.shape
    assert likeness(mono, speech) > 0.97
    assert 20 * np.log10(rms(mono) / rms(speech)) > floor_db


def test_mono_passes() -> None:
    speech = talk()
    np.testing.assert_allclose(mix(speech[:, None]), speech, atol=0.01)


def test_antiphase_stereo_does_not_cancel() -> None:
    speech = talk()
    assert rms((speech - speech) / 2) == 0, "a plain average is silence"
    assert_speech(mix(np.stack((speech, -speech), axis=1)), speech)


def test_antiphase_that_begins_after_silence() -> None:
    speech = np.concatenate((np.zeros(RATE, np.float32), talk()))
    assert_speech(mix(np.stack((speech, -0.8 * speech), axis=1).astype(np.float32)), speech)


@pytest.mark.parametrize(("channels", "index"), [(2, 1), (6, 2), (8, 7), (40, 17)])
def test_a_lone_channel_keeps_its_level(channels: int, index: int) -> None:
    speech = talk()
    frames = np.zeros((len(speech), channels), np.float32)
    frames[:, index] = speech
    assert_speech(mix(frames), speech, floor_db=-0.5)


def test_one_talker_among_forty_noisy_microphones() -> None:
    speech = talk()
    frames = np.stack([hiss(2, 0.01, i) for i in range(40)], axis=1)
    frames[:, 5] += speech
    mono = mix(frames)
    plain = frames.mean(axis=1)
    assert_speech(mono, speech, floor_db=-9)
    assert likeness(mono, speech) > likeness(plain, speech)


def test_two_talkers_in_turn_are_both_heard() -> None:
    """A telephone call with one party a channel, the second much quieter."""
    first, second = talk(1.5, 1), talk(1.5, 2, level=0.03)
    pause = np.zeros(RATE, np.float32)
    left = np.concatenate((first, pause, np.zeros_like(second)))
    right = np.concatenate((np.zeros_like(first), pause, second))
    mono = mix(np.stack((left, right), axis=1))
    assert_speech(mono[: len(first)], first)
    assert_speech(mono[-len(second) :], second)


def test_two_talkers_at_once_are_both_there() -> None:
    first, second = talk(seed=3), talk(seed=4)
    mono = mix(np.stack((first, second), axis=1))
    assert likeness(mono, first) > 0.6
    assert likeness(mono, second) > 0.6


def test_each_of_eight_channels_in_turn() -> None:
    """As in a channel identification file."""
    frames = np.zeros((8 * RATE, 8), np.float32)
    for i in range(8):
        frames[i * RATE : (i + 1) * RATE, i] = talk(1.0, i)
    mono = mix(frames)
    for i in range(8):
        assert_speech(mono[i * RATE : (i + 1) * RATE], frames[i * RATE : (i + 1) * RATE, i], floor_db=-1.5)


def test_an_offset_is_neither_taken_for_speech_nor_kept() -> None:
    speech = talk()
    frames = np.stack((np.full_like(speech, 0.6), speech), axis=1)
    mono = mix(frames)
    assert_speech(mono, speech, floor_db=-1)
    assert abs(float(mono.mean())) < 0.01


@pytest.mark.parametrize("gain", [4.0, 32_767.0, 2.0**31 - 1])
def test_floats_beyond_full_scale_are_brought_down_not_clipped(gain: float) -> None:
    """Hot recordings, and integers that were written as floats."""
    speech = talk(level=0.9)
    mono = mix((speech * np.float32(gain))[:, None])
    assert np.max(np.abs(mono)) <= 1.0001
    settled = slice(RATE // 2, None)
    assert likeness(mono[settled], speech[settled]) > 0.97


def test_nan_infinity_and_a_single_spike_do_not_spoil_the_rest() -> None:
    speech = talk(12.0)
    frames = speech.copy()
    frames[100], frames[200], frames[300] = np.nan, np.inf, 1e30
    mono = mix(frames[:, None])
    assert np.isfinite(mono).all()
    assert np.max(np.abs(mono)) <= 1.0001
    assert_speech(mono[-2 * RATE :], speech[-2 * RATE :], floor_db=-1)


def test_silence_stays_silence() -> None:
    assert not mix(np.zeros((RATE, 3), np.float32)).any()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.sampled_from([1_000, 8_000, 22_050]),
    st.lists(st.integers(0, 3_000), min_size=1, max_size=8),
    st.sampled_from([0.5, 3.0, 30_000.0]),
)
def test_any_cut_of_the_input_gives_the_same_samples(channels: int, rate: int, cuts: list[int], gain: float) -> None:
    rng = np.random.default_rng(sum(cuts))
    frames = (gain * rng.uniform(-1, 1, (sum(cuts), channels))).astype(np.float32)
    whole = mix(frames, rate)
    assert len(whole) == len(frames)
    mixer = Downmixer(channels, rate)
    parts = [mixer.mix(piece) for piece in np.split(frames, np.cumsum(cuts)[:-1])]
    np.testing.assert_allclose(np.concatenate((*parts, mixer.flush())), whole, atol=1e-5)
    if gain <= 1:
        assert np.max(np.abs(whole), initial=0.0) <= 1.0 + 2 * gain * 0.5, "the weights sum to one"
