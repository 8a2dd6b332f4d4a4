"""What the events of a stream say about it: delays, retractions, word errors. Pure: no sockets, no clock.

Everything is in seconds since the moment at which the track's first sample was spoken, so that position s of the
track is spoken at s, an event that arrives at t because of it has the delay t - s, and positions in events (which the
service counts from the first sample it received) are on the same scale.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rapidfuzz.distance import Levenshtein

from bench.scoring import Score, align, units
from bench.tracks import Spoken, Track

TAIL_S = 1.0  # an utterance is final when a final with text reaches into the last second of its speech


@dataclass(frozen=True, slots=True)
class Received:
    """An event of Hark's native protocol and when it came."""

    at_s: float
    event: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.event["type"])

    @property
    def start_s(self) -> float:
        return float(self.event["start_ms"]) / 1_000

    @property
    def end_s(self) -> float:
        return float(self.event["end_ms"]) / 1_000

    @property
    def text(self) -> str:
        """What a partial or a final shows."""
        if self.kind == "partial":
            return str(self.event["committed"]) + str(self.event["tentative"])
        return str(self.event["text"])


@dataclass(frozen=True, slots=True)
class ShownWord:
    """A word of a final: when it had been spoken, when the screen first showed it, and whether a partial did."""

    end_s: float
    shown_s: float
    by_partial: bool

    @property
    def delay_s(self) -> float:
        """Negative where the word was recognised before it was spoken to its end."""
        return self.shown_s - self.end_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """One reference utterance. A delay is None where what it waits for never came.

    ``first_text_s`` counts from the start of its speech; ``last_word_s`` (until a partial or final showed the last
    word) and ``final_s`` from the end of its speech; ``final_detected_s`` from the end that the service found.
    """

    spoken: Spoken
    first_text_s: float | None
    last_word_s: float | None
    final_s: float | None
    final_detected_s: float | None


@dataclass(frozen=True, slots=True)
class Measures:
    """One stream's, or several streams' put together."""

    speech_s: float = 0.0
    outcomes: tuple[Outcome, ...] = ()
    words: tuple[ShownWord, ...] = ()
    update_gaps_s: tuple[float, ...] = ()
    score: Score = field(default_factory=Score)
    partials: int = 0
    retractions: tuple[str, ...] = ()
    failed: int = 0
    max_lag_s: float = 0.0

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(
            self.speech_s + other.speech_s,
            self.outcomes + other.outcomes,
            self.words + other.words,
            self.update_gaps_s + other.update_gaps_s,
            self.score + other.score,
            self.partials + other.partials,
            self.retractions + other.retractions,
            self.failed + other.failed,
            max(self.max_lag_s, other.max_lag_s),
        )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By nearest rank: always a value that was measured, and with few values the worse one. None of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def plain(word: str) -> str:
    """A word without case and punctuation."""
    folded = unicodedata.normalize("NFKC", word).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] in "LNM")


def plain_words(text: str) -> list[str]:
    """The words between spaces, plain; what is only punctuation is none."""
    return [word for word in map(plain, text.split()) if word]


def measure(track: Track, received: Sequence[Received]) -> Measures:
    """All that one stream's events tell. Events are in the order in which they came."""
    texts = [r for r in received if r.kind in ("partial", "final")]
    shown = shown_words(texts)
    return Measures(
        speech_s=track.speech_s,
        outcomes=tuple(_outcome(spoken, texts, shown) for spoken in track.utterances),
        words=tuple(itertools.chain.from_iterable(shown.values())),
        update_gaps_s=tuple(update_gaps(received)),
        score=word_errors(track.utterances, [r.text for r in texts if r.kind == "final"]),
        partials=sum(r.kind == "partial" for r in texts),
        retractions=tuple(retractions(texts)),
        failed=sum(r.kind == "failed" for r in received),
        max_lag_s=max((float(r.event["lag_ms"]) / 1_000 for r in received if r.kind == "lag"), default=0.0),
    )


def word_errors(utterances: Sequence[Spoken], finals: Iterable[str]) -> Score:
    """The joined finals against the joined references: words lost or doubled between finals count too."""
    languages = {spoken.language for spoken in utterances}
    language = languages.pop() if len(languages) == 1 else ""
    reference = [unit for spoken in utterances for unit in units(spoken.text, language)]
    return align(reference, [unit for text in finals for unit in units(text, language)])


# When words appear --------------------------------------------------------------------------------------------------


def shown_words(texts: Sequence[Received]) -> dict[int, list[ShownWord]]:
    """For each utterance that has a final: its words, and when they were first shown. Needs the finals' word times.

    A partial shows a word of the final if the best alignment of the two texts pairs them; it is aligned only with the
    words that had begun in the audio which the partial had heard, so that a later "the" is not found too early.
    """
    found: dict[int, list[ShownWord]] = {}
    for utterance, events in _by_utterance(texts).items():
        finals = [r for r in events if r.kind == "final"]
        if finals:
            found[utterance] = _shown_in(events[: events.index(finals[0])], finals[0])
    return found


def _shown_in(partials: Sequence[Received], final: Received) -> list[ShownWord]:
    words = [(plain(word["word"]), word) for word in final.event.get("words", ())]
    words = [(text, word) for text, word in words if text]
    first: list[float | None] = [None] * len(words)
    for partial in partials:
        heard = [text for text, word in words if word["start_ms"] / 1_000 < partial.end_s]
        for block in Levenshtein.opcodes(heard, plain_words(partial.text)):
            if block.tag == "equal":
                for index in range(block.src_start, block.src_end):
                    first[index] = partial.at_s if first[index] is None else first[index]
    return [
        ShownWord(word["end_ms"] / 1_000, final.at_s if at_s is None else at_s, at_s is not None)
        for (_, word), at_s in zip(words, first, strict=True)
    ]


def update_gaps(received: Sequence[Received]) -> list[float]:
    """How long the screen stood still while someone spoke: from the start of speech over each partial to its end."""
    bounds: dict[int, list[float]] = {}
    for r in received:
        if r.kind in ("speech_started", "speech_stopped"):
            bounds.setdefault(r.event["utterance"], []).append(r.event["at_ms"] / 1_000)
    gaps: list[float] = []
    for utterance, events in _by_utterance(r for r in received if r.kind == "partial").items():
        start_s, *stop = bounds.pop(utterance, [events[0].start_s])
        stop_s = stop[0] if stop else events[-1].at_s
        times = [start_s, *(r.at_s for r in events if start_s < r.at_s < stop_s), stop_s]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return gaps + [at[1] - at[0] for at in bounds.values() if len(at) == 2]


# When utterances are settled ----------------------------------------------------------------------------------------


def _outcome(spoken: Spoken, texts: Sequence[Received], shown: Mapping[int, Sequence[ShownWord]]) -> Outcome:
    first = next((r for r in texts if r.text.strip() and r.start_s < spoken.end_s and r.end_s > spoken.start_s), None)
    final = final_of(spoken, texts)
    last_word = None if final is None else next(iter(shown.get(final.event["utterance"], ())[-1:]), None)
    return Outcome(
        spoken,
        first_text_s=None if first is None else first.at_s - spoken.start_s,
        last_word_s=None if last_word is None else last_word.shown_s - spoken.end_s,
        final_s=None if final is None else final.at_s - spoken.end_s,
        final_detected_s=None if final is None else final.at_s - final.end_s,
    )


def final_of(spoken: Spoken, texts: Iterable[Received]) -> Received | None:
    """The final that settles the utterance's end: the last with text that overlaps the last second of its speech."""
    tail_s = max(spoken.start_s, spoken.end_s - TAIL_S)
    ends = [r for r in texts if r.kind == "final" and r.text.strip() and r.start_s < spoken.end_s and r.end_s > tail_s]
    return max(ends, key=lambda r: r.start_s, default=None)


# What is taken back -------------------------------------------------------------------------------------------------


def retractions(texts: Sequence[Received]) -> list[str]:
    """Each committed word that a later partial's committed text, or the final, does not have in its place."""
    found: list[str] = []
    for utterance, events in _by_utterance(texts).items():
        promised: list[str] = []
        for r in events:
            words = plain_words(r.event["committed"] if r.kind == "partial" else r.text)
            for place, word in enumerate(promised):
                if words[place : place + 1] != [word]:
                    now = words[place] if place < len(words) else "nothing"
                    found.append(f"utterance {utterance}, word {place}: {word!r} became {now!r} in a {r.kind}")
            promised = words
    return found


def _by_utterance(events: Iterable[Received]) -> dict[int, list[Received]]:
    grouped: dict[int, list[Received]] = {}
    for r in events:
        grouped.setdefault(int(r.event["utterance"]), []).append(r)
    return grouped
