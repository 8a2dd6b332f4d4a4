"""The lengths and the tail, without any model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import silence_tail
from models.silence_tail import SAMPLES_PER_POSITION, WINDOW_POSITIONS, WINDOW_SAMPLES


@given(samples=st.integers(1, WINDOW_SAMPLES), margin=st.integers(0, WINDOW_SAMPLES))
def test_encoded_positions_hold_audio_and_margin_or_the_whole_window(samples: int, margin: int) -> None:
    positions = silence_tail.positions_to_encode(samples, margin)
    if samples + margin <= WINDOW_SAMPLES:
        spare = positions * SAMPLES_PER_POSITION - samples - margin
        assert 0 <= spare < SAMPLES_PER_POSITION * silence_tail.POSITION_STEP
    else:
        assert positions == WINDOW_POSITIONS


def test_two_seconds_with_three_of_margin_encode_a_sixth_of_the_window() -> None:
    assert silence_tail.positions_to_encode(2 * 16_000, 3 * 16_000) == 250


@pytest.mark.parametrize("samples", [0, -1, WINDOW_SAMPLES + 1])
def test_audio_that_fits_no_window_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="audio must hold"):
        silence_tail.positions_to_encode(samples, 0)


def test_padding_is_silence_after_the_audio() -> None:
    audio = np.full(500, 0.25, dtype=np.float32)
    padded = silence_tail.pad_to(audio, 10)
    assert padded.shape == (3_200,)
    assert padded.dtype == np.float32
    assert (padded[:500] == audio).all()
    assert not padded[500:].any()


def test_silent_log_mel_is_what_the_formula_gives_for_no_energy() -> None:
    features = silence_tail.silent_log_mel(128)
    assert features.shape == (128, 3_000)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, (np.log10(1e-10) + 4.0) / 4.0)


@given(positions=st.integers(1, WINDOW_POSITIONS))
def test_tail_states_keep_their_positions(positions: int) -> None:
    tail = np.arange(WINDOW_POSITIONS, dtype=np.float32).reshape(1, -1, 1) + 10_000.0
    states = np.arange(positions, dtype=np.float32).reshape(1, -1, 1)
    whole = silence_tail.append_tail(states, tail)
    assert whole.shape == tail.shape
    assert (whole[:, :positions] == states).all()
    assert (whole[:, positions:] == tail[:, positions:]).all()


def test_tail_takes_the_type_of_the_states() -> None:
    tail = np.zeros((1, WINDOW_POSITIONS, 2), dtype=np.float32)
    assert silence_tail.append_tail(np.zeros((1, 5, 2), dtype=np.float16), tail).dtype == np.float16
