"""Synthetic speech: what the scripted recognizer hears does not depend on how the stream is cut."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.scripted import (
    VOCABULARY,
    WORD_SAMPLES,
    ScriptedConfig,
    ScriptedDetector,
    ScriptedRecognizer,
    encode_words,
    read_words,
)
from streaming.errors import Overloaded
from streaming.types import DecodeRequest, Priority, Word

scripts = st.lists(st.none() | st.sampled_from(VOCABULARY), max_size=12)


def spoken(words: tuple[Word, ...]) -> list[str]:
    return [word.text.strip() for word in words]


@given(scripts, st.integers(0, 100_000))
def test_what_is_encoded_is_heard_at_any_position(script: list[str | None], start_sample: int) -> None:
    audio = encode_words(script)
    # Off the grid the first look may fall into what came before the audio, so a neighbour on each side is given.
    audio = np.concatenate([np.zeros(WORD_SAMPLES, np.int16), audio, np.zeros(WORD_SAMPLES, np.int16)])
    assert spoken(read_words(audio, start_sample)) == [word for word in script if word]


@given(scripts, st.data())
def test_any_cut_gives_each_word_to_exactly_one_side(script: list[str | None], data: st.DataObject) -> None:
    audio = encode_words(script)
    cut = data.draw(st.integers(0, len(audio)))
    left, right = read_words(audio[:cut], 0), read_words(audio[cut:], cut)
    assert spoken(left + right) == [word for word in script if word]


@given(scripts, st.data())
def test_words_lie_in_the_audio_in_order(script: list[str | None], data: st.DataObject) -> None:
    audio = encode_words(script)
    cut = data.draw(st.integers(0, len(audio)))
    at = 0
    for word in read_words(audio[cut:], cut):
        assert at <= word.start_sample < word.end_sample <= len(audio) - cut
        at = word.end_sample


@given(scripts)
def test_words_survive_mu_law(script: list[str | None]) -> None:
    audio = encode_words(script).astype(np.float64) / 32768
    compressed = np.round(np.log1p(255 * audio) / np.log(256) * 127) / 127  # ITU-T G.711's curve, 8 bits
    expanded = np.expm1(compressed * np.log(256)) / 255
    assert spoken(read_words(np.round(expanded * 32768).astype(np.int16), 0)) == [word for word in script if word]


@given(st.lists(st.floats(0, 1, width=32), max_size=6), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_the_detector_does_not_care_how_windows_are_split(script: list[float], cut: int, seed: int) -> None:
    windows = np.random.default_rng(seed).uniform(-0.05, 0.05, (12, 512)).astype(np.float32)
    whole = ScriptedDetector(script).probabilities(windows)
    split = ScriptedDetector(script)
    parts = [split.probabilities(windows[:cut]), split.probabilities(windows[cut:])]
    assert whole.dtype == np.float32
    assert np.array_equal(whole, np.concatenate(parts))
    assert whole[: len(script)].tolist() == script


def test_the_detector_hears_every_word_and_no_silence() -> None:
    words = encode_words(VOCABULARY).astype(np.float32) / np.float32(32768)
    assert ScriptedDetector().probabilities(words[: len(words) // 512 * 512].reshape(-1, 512)).min() > 0.9
    assert ScriptedDetector().probabilities(np.zeros((3, 512), dtype=np.float32)).max() == 0.0


async def test_the_recognizer_refuses_more_than_it_may_hold() -> None:
    recognizer = ScriptedRecognizer(ScriptedConfig(max_pending=1, hang_on="zulu"))
    audio = encode_words(["zulu"])
    held = asyncio.create_task(recognizer.decode(DecodeRequest(1, 1, 0, Priority.FILE, audio, 0, 1)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await recognizer.decode(DecodeRequest(2, 1, 0, Priority.FILE, encode_words(["alpha"]), 0, 1))
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    answer = await recognizer.decode(DecodeRequest(3, 1, 0, Priority.FILE, encode_words(["alpha"]), 0, 1))
    assert answer.text == "alpha"


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        ScriptedConfig(crash_on="nonsense")
    with pytest.raises(ValueError, match="capacity"):
        ScriptedConfig(capacity=0)
