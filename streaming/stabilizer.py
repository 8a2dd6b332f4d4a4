"""Which words of a growing utterance are settled. LocalAgreement-2: what two successive hypotheses say alike.

Committed words are a promise: they are never taken back, not by a later partial and not by the final.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from streaming.types import Word

_JOINT_SAMPLES = 3_200  # 200 ms: how far word times of two decodes of the same audio usually differ at most


@dataclass(frozen=True, slots=True)
class Transcript:
    """``committed + tentative`` is the whole text; ``tentative`` brings its own leading space."""

    committed: str
    tentative: str


def normalize(text: str) -> str:
    """What counts when two words are compared: letters and digits, without case, punctuation and spaces."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] in "LNM")


def join(words: Sequence[Word]) -> str:
    return "".join(word.text for word in words).strip()


def _same(a: Word, b: Word) -> bool:
    return normalize(a.text) == normalize(b.text)


def _begins_with(words: Sequence[Word], committed: Sequence[Word]) -> bool:
    return len(words) >= len(committed) and all(_same(a, b) for a, b in zip(committed, words, strict=False))


def continuation(committed: Sequence[Word], words: Sequence[Word]) -> tuple[Word, ...]:
    """The words of a hypothesis that follow the committed ones.

    Where the hypothesis begins with the committed words, simply the rest. Where it disagrees, the words that lie
    after the last committed one in time, less a repetition of it at the joint.
    """
    if not committed:
        return tuple(words)
    if _begins_with(words, committed):
        return tuple(words[len(committed) :])
    last = committed[-1]
    rest = [word for word in words if word.start_sample + word.end_sample > 2 * last.end_sample]
    if rest and _same(rest[0], last) and rest[0].start_sample < last.end_sample + _JOINT_SAMPLES:
        rest = rest[1:]
    return tuple(rest)


class Stabilizer:
    """One utterance's memory of what was said. All word positions count from the start of the stream."""

    def __init__(self, hold_back_samples: int) -> None:
        self._hold_back = hold_back_samples
        self._previous: tuple[Word, ...] = ()  # the last hypothesis, after the committed words
        self.committed: tuple[Word, ...] = ()

    @property
    def words(self) -> tuple[Word, ...]:
        """Those of the text to show: the committed ones, then the others of the last hypothesis."""
        return self.committed + self._previous

    def update(self, words: Sequence[Word], audio_end: int, commit_limit: int) -> Transcript:
        """A new hypothesis of audio that ends at ``audio_end`` → the text to show.

        Words that end after ``commit_limit`` are not committed: they may yet fall to the next utterance.
        """
        settled_before = min(audio_end - self._hold_back, commit_limit)
        rest = continuation(self.committed, words)
        agreed = 0
        for old, new in zip(self._previous, rest, strict=False):
            if not _same(old, new) or new.end_sample > settled_before:
                break
            agreed += 1
        self.committed += rest[:agreed]
        self._previous = rest[agreed:]
        return self._transcript(self._previous)

    def settle(self, words: Sequence[Word]) -> tuple[Word, ...]:
        """The final hypothesis → the final words, which begin with the committed ones.

        Where they agree, the final's spelling, punctuation and times win; where they do not, the promise does.
        """
        if _begins_with(words, self.committed):
            return tuple(words)
        return self.committed + continuation(self.committed, words)

    def _transcript(self, rest: Sequence[Word]) -> Transcript:
        committed = join(self.committed)
        whole = join((*self.committed, *rest))
        return Transcript(committed, whole[len(committed) :])
