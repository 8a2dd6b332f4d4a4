"""Finals → subtitle cues → SubRip and WebVTT text. Pure.

The limits are the usual ones of broadcasters (Netflix Timed Text Style Guide: 42 characters a line, two lines, at
most 7 s; full-width characters count double).
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streaming.audio import SAMPLE_RATE
from streaming.events import FinalTranscript

SENTENCE_END = frozenset(".!?…。！？।؟")
CLAUSE_END = frozenset(",;:،、，；：")
CLOSERS = "\"'”’»)]」』"


@dataclass(frozen=True, slots=True)
class CueLimits:
    """How much a cue may hold and how long it may stay. ``max_gap_s``: a longer pause between words ends the cue."""

    line_columns: int = 42
    max_duration_s: float = 7.0
    min_duration_s: float = 0.8
    max_gap_s: float = 1.5


LINES = 2


@dataclass(frozen=True, slots=True)
class Cue:
    """One subtitle; ``text`` holds its lines, separated by newlines."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class _Token:
    """What is never torn apart: a word with its punctuation. ``spaced``: a space stands before it."""

    text: str
    start_s: float
    end_s: float
    spaced: bool


def cues(finals: Iterable[FinalTranscript], limits: CueLimits | None = None) -> list[Cue]:
    """Readable cues in order of time, never overlapping. Words' own times are used where there are words."""
    limits = limits or CueLimits()
    drafts = [
        _draft(tokens, limits)
        for final in sorted(finals, key=lambda f: f.start_sample)
        for tokens in _split(_tokens(final), limits)
    ]
    return _separate(drafts, limits)


def to_srt(items: Sequence[Cue]) -> str:
    """SubRip: numbered cues, comma before the milliseconds."""
    blocks = [
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{cue.text.replace('-->', '→')}\n"
        for number, cue in enumerate(items, 1)
    ]
    return "\n".join(blocks)


def to_vtt(items: Sequence[Cue]) -> str:
    """WebVTT (W3C): header, dot before the milliseconds, ``&``, ``<`` and ``>`` escaped."""
    blocks = [f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_escape(cue.text)}\n" for cue in items]
    return "\n".join(["WEBVTT\n", *blocks])


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, point: str) -> str:
    total_ms = max(0, round(seconds * 1000))
    minutes, rest_ms = divmod(total_ms, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest_ms // 1000:02d}{point}{rest_ms % 1000:03d}"


def columns(text: str) -> int:
    """Width in columns: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _tokens(final: FinalTranscript) -> list[_Token]:
    pieces = [(w.text, w.start_sample / SAMPLE_RATE, w.end_sample / SAMPLE_RATE) for w in final.words]
    if not "".join(text for text, _, _ in pieces).strip():
        pieces = _spread(final.text, final.start_sample / SAMPLE_RATE, final.end_sample / SAMPLE_RATE)
    tokens: list[_Token] = []
    for raw, start_s, end_s in pieces:
        text = " ".join(raw.split())
        if not text:
            continue
        spaced = raw[0].isspace()
        if tokens and not spaced and not _breaks_freely(tokens[-1].text[-1], text[0]):
            last = tokens[-1]
            tokens[-1] = _Token(last.text + text, last.start_s, max(last.end_s, end_s), last.spaced)
        else:
            tokens.append(_Token(text, start_s, max(start_s, end_s), spaced))
    return tokens


def _breaks_freely(before: str, after: str) -> bool:
    """Whether a line may end between two characters that no space separates: scripts written without spaces."""
    return _unspaced(before) and _unspaced(after) and after not in SENTENCE_END and after not in CLAUSE_END


def _unspaced(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF" or "\u0e00" <= character <= "\u0eff"  # Thai, Lao


def _spread(text: str, start_s: float, end_s: float) -> list[tuple[str, float, float]]:
    """A text without word times → its words, each as long as its share of the characters."""
    words = re.findall(r"\s*\S+", text)
    if words and len(words) * 12 < len(text) and _unspaced(text.strip()[0]):
        words = list(text)
    total = sum(map(len, words)) or 1
    pieces, done = [], 0
    for word in words:
        a = start_s + (end_s - start_s) * done / total
        done += len(word)
        pieces.append((word, a, start_s + (end_s - start_s) * done / total))
    return pieces


def _join(tokens: Sequence[_Token]) -> str:
    return "".join((" " if i and token.spaced else "") + token.text for i, token in enumerate(tokens))


def _split(tokens: list[_Token], limits: CueLimits) -> list[list[_Token]]:
    """Tokens of one utterance → those of each cue: as few cues as fit, cut where reading pauses."""
    parts = []
    while tokens:
        count = _fitting(tokens, limits)
        if count < len(tokens) and not _gap_after(tokens, count - 1) > limits.max_gap_s:
            count = _best_cut(tokens, count)
        parts.append(tokens[:count])
        tokens = tokens[count:]
    return parts


def _gap_after(tokens: Sequence[_Token], index: int) -> float:
    return tokens[index + 1].start_s - tokens[index].end_s if index + 1 < len(tokens) else 0.0


def _fitting(tokens: Sequence[_Token], limits: CueLimits) -> int:
    """How many tokens fit into one cue: at least one."""
    lines, width = 1, columns(tokens[0].text)
    for i in range(1, len(tokens)):
        token_columns = columns(tokens[i].text)
        width += token_columns + (1 if tokens[i].spaced else 0)
        if width > limits.line_columns:
            lines, width = lines + 1, token_columns
        too_long = tokens[i].end_s - tokens[0].start_s > limits.max_duration_s
        if lines > LINES or too_long or _gap_after(tokens, i - 1) > limits.max_gap_s:
            return i
    return len(tokens)


def _best_cut(tokens: Sequence[_Token], fitting: int) -> int:
    """The best of the places after a third of what fits: a sentence's end, a clause's, a pause, or simply the last."""

    def merit(count: int) -> tuple[float, int]:
        last = tokens[count - 1].text.rstrip(CLOSERS)[-1:]
        score = 3.0 if last in SENTENCE_END and last else 2.0 if last in CLAUSE_END and last else 0.0
        return score + (1.0 if _gap_after(tokens, count - 1) > 0.3 else 0.0), count

    return max(range(max(1, fitting // 3), fitting + 1), key=merit)


def _draft(tokens: Sequence[_Token], limits: CueLimits) -> Cue:
    return Cue(tokens[0].start_s, max(token.end_s for token in tokens), _wrap(tokens, limits))


def _wrap(tokens: Sequence[_Token], limits: CueLimits) -> str:
    """One line where it fits, else lines as even as can be."""
    if columns(_join(tokens)) <= limits.line_columns or len(tokens) == 1:
        return _join(tokens)

    def longest(count: int) -> int:
        return max(columns(_join(tokens[:count])), columns(_join(tokens[count:])))

    middle = min(range(1, len(tokens)), key=longest)
    return f"{_join(tokens[:middle])}\n{_join(tokens[middle:])}"


def _separate(drafts: Sequence[Cue], limits: CueLimits) -> list[Cue]:
    """Cues in order, long enough to read where there is room, and each over before the next begins."""
    ordered = sorted(drafts, key=lambda cue: cue.start_s)
    result = []
    for i, cue in enumerate(ordered):
        next_s = ordered[i + 1].start_s if i + 1 < len(ordered) else float("inf")
        end_s = max(cue.end_s, cue.start_s + limits.min_duration_s)
        # A cue that starts with the next one still needs a millisecond to be one.
        result.append(Cue(cue.start_s, max(min(end_s, next_s), cue.start_s + 0.001), cue.text))
    return result
