"""bench.scoring: what counts as a word error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scoring import Score, align, score, units

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=12)


@pytest.mark.parametrize(
    ("reference", "heard", "expected"),
    [
        ("IN FACT D'ARTAGNAN", "In fact, d'Artagnan.", Score(4, 0, 0, 0)),
        ("mister brown has twenty one cats", "Mr. Brown has 21 cats!", Score(5, 0, 0, 0)),
        ("the colour of the sea", "the color of a sea", Score(5, 1, 0, 0)),
        ("one red fox ran", "red fox ran", Score(4, 0, 1, 0)),
        ("red fox ran", "red fox ran away now", Score(3, 0, 0, 2)),
        ("red fox ran", "", Score(3, 0, 3, 0)),
        ("", "thank you", Score(0, 0, 0, 2)),
    ],
)
def test_english_errors_are_counted_by_kind(reference: str, heard: str, expected: Score) -> None:
    assert score(reference, heard, "en") == expected


def test_other_languages_keep_their_own_spelling() -> None:
    assert score("der Doktor hat zwanzig Hüte", "Der Doktor hat zwanzig Hüte.", "de") == Score(5, 0, 0, 0)
    assert score("el color", "el colour", "es").errors == 1  # the English normalizer would call them the same


def test_languages_without_spaces_are_counted_in_characters() -> None:
    assert units("今日は、雨です。", "ja") == list("今日は雨です")
    assert score("今日は雨です", "今日は雪です", "ja") == Score(6, 1, 0, 0)


def test_rate_is_of_the_references_units() -> None:
    assert Score(8, 1, 0, 1).rate == 0.25
    assert Score(2, 0, 0, 6).rate == 3.0
    assert Score(0, 0, 0, 6).rate is None
    assert Score(8, 1, 2, 3) + Score(2, 4, 5, 6) == Score(10, 5, 7, 9)


@settings(deadline=None)  # machines may be busy
@given(WORDS, WORDS)
def test_counts_explain_both_lengths_and_are_the_fewest(reference: list[str], heard: list[str]) -> None:
    counted = align(reference, heard)
    assert len(heard) == counted.units - counted.deletions + counted.insertions
    assert counted.substitutions + counted.deletions <= counted.units == len(reference)
    assert counted.errors <= max(len(reference), len(heard))
    assert (counted.errors == 0) == (reference == heard)
