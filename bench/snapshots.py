"""What a live server's screen says about it, by one yardstick for all servers. Pure: no sockets, no clock.

Servers mark their text in different ways: finals, committed words, completed segments. What they have in common is a
screen: at some moment it shows a text, and of a part of it the server says that it will not change. Such snapshots are
compared with the words that were spoken and with what the screen says at the end; nothing that only one server sends
(word times, confidences, ends of speech) is used.

Times are seconds since the track's first sample was spoken, as in bench.measures.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rapidfuzz.distance import Levenshtein

from bench.measures import TAIL_S, plain_words, word_errors
from bench.scoring import Score
from bench.tracks import Spoken, Track


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The screen at ``at_s``: all text so far that is settled, and all that is shown, the settled text with it."""

    at_s: float
    settled: str
    shown: str


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word of the reference, plain, and about when it was spoken. ``utterance`` is its place in the track."""

    text: str
    start_s: float
    end_s: float
    utterance: int


@dataclass(frozen=True, slots=True)
class HeardWord:
    """A word of the server's last screen: the spoken word that it stands for, None where it is one too many.

    ``begun_s`` is when its speech began; before that, no screen can show it.
    """

    text: str
    spoken: SpokenWord | None
    begun_s: float

    @property
    def is_right(self) -> bool:
        return self.spoken is not None and self.spoken.text == self.text


@dataclass(frozen=True, slots=True)
class Outcome:
    """One utterance: delays from the end of its speech until its last word was shown and settled; None: never."""

    spoken: Spoken
    last_word_s: float | None
    final_s: float | None


@dataclass(frozen=True, slots=True)
class Measures:
    """One stream's, or several streams' put together. ``word_delays_s``: from a word's end until it was shown."""

    outcomes: tuple[Outcome, ...] = ()
    word_delays_s: tuple[float, ...] = ()
    settled: Score = field(default_factory=Score)
    shown: Score = field(default_factory=Score)
    taken_back: int = 0

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(
            self.outcomes + other.outcomes,
            self.word_delays_s + other.word_delays_s,
            self.settled + other.settled,
            self.shown + other.shown,
            self.taken_back + other.taken_back,
        )


def measure(track: Track, snapshots: Sequence[Snapshot]) -> Measures:
    """All that one stream's screens tell. Snapshots are in the order in which they came."""
    last = snapshots[-1] if snapshots else Snapshot(0.0, "", "")
    heard = heard_words(spoken_words(track.utterances), last.shown)
    shown = first_seen(heard, snapshots, lambda snapshot: snapshot.shown)
    settled = first_seen(heard, snapshots, lambda snapshot: snapshot.settled)
    return Measures(
        outcomes=tuple(
            _outcome(number, utterance, heard, shown, settled) for number, utterance in enumerate(track.utterances)
        ),
        word_delays_s=tuple(_delays(heard, shown)),
        settled=word_errors(track.utterances, [last.settled]),
        shown=word_errors(track.utterances, [last.shown]),
        taken_back=taken_back([snapshot.settled for snapshot in snapshots]),
    )


def spoken_words(utterances: Sequence[Spoken]) -> list[SpokenWord]:
    """The reference's words, as if every character, and every space, of an utterance took equally long."""
    found: list[SpokenWord] = []
    for number, utterance in enumerate(utterances):
        words = plain_words(utterance.text)
        length_s = utterance.end_s - utterance.start_s
        n_characters, place = len(" ".join(words)), 0
        for word in words:
            start_s, end_s = (utterance.start_s + length_s * at / n_characters for at in (place, place + len(word)))
            found.append(SpokenWord(word, start_s, end_s, number))
            place += len(word) + 1
    return found


def heard_words(reference: Sequence[SpokenWord], text: str) -> list[HeardWord]:
    """The words of ``text``, each beside the spoken word with which the best alignment pairs it, right or wrong."""
    words = plain_words(text)
    pairs: list[SpokenWord | None] = [None] * len(words)
    for block in Levenshtein.opcodes([word.text for word in reference], words):
        if block.tag in ("equal", "replace"):
            for from_, to in zip(
                range(block.src_start, block.src_end), range(block.dest_start, block.dest_end), strict=True
            ):
                pairs[to] = reference[from_]
    begun_s = itertools.accumulate((0.0 if pair is None else pair.start_s for pair in pairs), max)
    return [HeardWord(*each) for each in zip(words, pairs, begun_s, strict=True)]


def first_seen(
    heard: Sequence[HeardWord], snapshots: Sequence[Snapshot], text_of: Callable[[Snapshot], str]
) -> list[float | None]:
    """When each word was first in a snapshot's text, None where it never was; later disappearances do not count.

    A text is aligned only with the words whose speech had begun by then, so that a later "the" is not found too early.
    """
    begun = [word.begun_s for word in heard]
    first: list[float | None] = [None] * len(heard)
    before: tuple[int, list[str]] = (0, [])
    for snapshot in snapshots:
        now = bisect.bisect_right(begun, snapshot.at_s), plain_words(text_of(snapshot))
        if now == before:
            continue
        before = now
        for block in Levenshtein.opcodes([word.text for word in heard[: now[0]]], now[1]):
            if block.tag == "equal":
                for index in range(block.src_start, block.src_end):
                    first[index] = snapshot.at_s if first[index] is None else first[index]
    return first


def taken_back(texts: Sequence[str]) -> int:
    """Settled words that the next settled text lacks or has changed. Case and punctuation may change."""
    lists = [plain_words(text) for text in texts]
    return sum(
        operation.tag != "insert"
        for before, after in itertools.pairwise(lists)
        if before != after[: len(before)]
        for operation in Levenshtein.editops(before, after)
    )


def _outcome(
    number: int,
    utterance: Spoken,
    heard: Sequence[HeardWord],
    shown: Sequence[float | None],
    settled: Sequence[float | None],
) -> Outcome:
    """Of the last word that was heard of the utterance; of none where that lies before the last second of speech."""
    places = [place for place, word in enumerate(heard) if word.spoken is not None and word.spoken.utterance == number]
    if not places or not _reaches_end(heard[places[-1]], utterance):
        return Outcome(utterance, None, None)
    shown_s, settled_s = shown[places[-1]], settled[places[-1]]
    return Outcome(
        utterance,
        None if shown_s is None else shown_s - utterance.end_s,
        None if settled_s is None else settled_s - utterance.end_s,
    )


def _reaches_end(word: HeardWord, utterance: Spoken) -> bool:
    return word.spoken is not None and word.spoken.end_s >= utterance.end_s - TAIL_S


def _delays(heard: Sequence[HeardWord], shown: Sequence[float | None]) -> list[float]:
    return [
        at_s - word.spoken.end_s
        for word, at_s in zip(heard, shown, strict=True)
        if at_s is not None and word.spoken is not None and word.is_right
    ]
