"""Word error rate: texts brought to a common form, aligned, their errors counted by kind.

English goes through Whisper's own English normalizer and every other language through its basic one, as the Open ASR
leaderboard does; languages that are written without spaces are counted in characters.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein
from whisper_normalizer.basic import BasicTextNormalizer
from whisper_normalizer.english import EnglishTextNormalizer

CHARACTER_LANGUAGES = frozenset({"zh", "ja", "th", "yue"})


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of a text against its reference. ``units`` are the reference's words (or characters)."""

    units: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.units + other.units,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Errors a unit of the reference, in [0, ∞); None where the reference is empty."""
        return self.errors / self.units if self.units else None


@functools.cache
def _normalizer(language: str) -> Callable[[str], str]:
    found: Callable[[str], str] = EnglishTextNormalizer() if language == "en" else BasicTextNormalizer()
    return found


def units(text: str, language: str) -> list[str]:
    """What errors are counted in: normalised words, or characters where a language has no spaces."""
    normalised = _normalizer("en" if language == "en" else "")(text)
    return list(normalised.replace(" ", "")) if language in CHARACTER_LANGUAGES else normalised.split()


def align(reference: Sequence[str], heard: Sequence[str]) -> Score:
    """The fewest substitutions, deletions and insertions that make ``heard`` of ``reference``."""
    counts = {"replace": 0, "delete": 0, "insert": 0}
    for operation in Levenshtein.editops(reference, heard):
        counts[operation.tag] += 1
    return Score(len(reference), counts["replace"], counts["delete"], counts["insert"])


def score(reference: str, heard: str, language: str) -> Score:
    return align(units(reference, language), units(heard, language))
