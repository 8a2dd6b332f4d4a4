"""Where tokens lie: warping against the plain recurrence, and the estimate's bounds."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.word_alignment import estimate, warp
from streaming.types import Float32

attentions = st.tuples(st.integers(1, 9), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.integers(-4, 4).map(float))
)


def cheapest(cost: Float32) -> float:
    """The recurrence of dynamic time warping, cell by cell."""
    total = np.full((cost.shape[0] + 1, cost.shape[1] + 1), np.inf)
    total[0, 0] = 0.0
    for row in range(cost.shape[0]):
        for position in range(cost.shape[1]):
            before = min(total[row, position], total[row, position + 1], total[row + 1, position])
            total[row + 1, position + 1] = cost[row, position] + before
    return float(total[-1, -1])


@given(attentions)
def test_the_path_is_whole_monotone_and_the_cheapest(attention: Float32) -> None:
    path = warp(attention)
    assert path[0] == (0, 0)
    assert path[-1] == (attention.shape[0] - 1, attention.shape[1] - 1)
    for (row, position), (next_row, next_position) in itertools.pairwise(path):
        assert (next_row - row, next_position - position) in ((1, 1), (1, 0), (0, 1))
    assert -sum(attention[at] for at in path) == cheapest(-attention)


def test_tokens_begin_where_the_decoder_looks() -> None:
    attention = np.full((4, 20), -1.0, np.float32)
    for row, (begin, end) in enumerate(((0, 3), (3, 9), (9, 15), (15, 20))):
        attention[row, begin:end] = 1.0
    path = warp(attention)
    assert [next(position for row, position in path if row == wanted) for wanted in range(4)] == [0, 3, 9, 15]


@given(st.integers(1, 5000), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3))
def test_an_estimate_is_monotone_and_within_the_audio(samples: int, lengths: list[int], seed: int) -> None:
    audio = np.random.default_rng(seed).normal(0, 0.1 * (seed > 0), samples).astype(np.float32)
    begins = estimate(audio, lengths)
    assert len(begins) == len(lengths) + 1
    assert begins == sorted(begins)
    assert begins[0] >= 0
    assert (begins[-1] - 1) * 320 < samples


def test_an_estimate_leaves_silence_out() -> None:
    audio = np.zeros(320 * 100, np.float32)
    audio[320 * 20 : 320 * 30] = 0.1
    audio[320 * 60 : 320 * 70] = 0.1
    assert estimate(audio, [5, 5, 5, 5]) == [20, 25, 60, 65, 70]
