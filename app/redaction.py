"""Card and phone numbers out of what was said. Pure: events in, events out; optional, and off by default.

A number is digits with no more than a space and a mark or two between them, as Whisper writes what is read out; numbers
in words stay. Of each:

* card: where 13 to 19 of the digits, from the beginning of a group to the end of one, have the right check digit
  (ISO/IEC 7812-1, Luhn). All of it goes: what follows a card number without a word between is its expiry or its code.
* phone: what else has 9 digits or more, or 8 after a ``+``, or is written as 123-4567 or as 22 33 91 08. Dates,
  amounts, spans of years and counting (1, 2, 3, …) are none.

It lowers the risk of numbers in transcripts and does not end it: a card number of which a digit was misheard is at most
taken for a phone number, and one that was spoken in two utterances, with a pause between them, is in neither.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from streaming.errors import BadMessage
from streaming.events import FinalTranscript, PartialTranscript
from streaming.types import Word


class Kind(StrEnum):
    """What is taken out."""

    CARD = "card"
    PHONE = "phone"


MARKS = {Kind.CARD: "[CARD]", Kind.PHONE: "[PHONE]"}

_SPACE = "[ \u00a0\u202f]?"
_GAP = rf"{_SPACE}[-.,/()\u2010-\u2014]{{0,2}}{_SPACE}"
_HEAD = rf"\+{_SPACE}\(?|\("  # may stand before the first digit
_RUN = re.compile(rf"(?:{_HEAD})?\d(?:{_GAP}\d)*")
_GAP_AT_END = re.compile(rf"{_GAP}\Z")
_HEAD_AT_END = re.compile(rf"(?:{_HEAD})\Z")
_LOCAL = re.compile(r"\d{3}[-. ]\d{4}|\d\d(?:[-. ]\d\d){3}")
_NO_PHONE = re.compile(
    r"\d{4}[-./]\d{1,2}[-./]\d{1,2}|\d{1,2}[-./] ?\d{1,2}[-./] ?\d{4}"  # dates
    r"|\d{1,3}(?:[,.\u202f]\d{3})+(?:[.,]\d{1,2})?"  # amounts
    r"|(?:1[5-9]|20)\d\d ?[-–—/] ?(?:1[5-9]|20)\d\d"  # years
)
_CARD_DIGITS = range(13, 20)
_PHONE_DIGITS, _INTERNATIONAL_DIGITS = 9, 8

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class _Find:
    """What is replaced by ``mark``: characters from ``start`` to ``end``."""

    start: int
    end: int
    mark: str


def parse_kinds(items: Iterable[str]) -> frozenset[Kind]:
    """Names, such as a setting or a parameter lists. Raises BadMessage."""
    try:
        return frozenset(Kind(item.strip().lower()) for item in items if item.strip())
    except ValueError:
        raise BadMessage(f"redact must be among {', '.join(Kind)}", code="bad_parameter") from None


def redact(event: Event, kinds: frozenset[Kind]) -> Event:
    """The event without such numbers; what holds no text comes back as it is.

    A final's words that made up a number become one, from the first one's start to the last one's end, with the least
    of their probabilities. A partial keeps back the digits at its end, which may still grow into a number: so its
    committed text only grows here too, and the final begins with it.
    """
    if not kinds:
        return event
    match event:
        case FinalTranscript():
            return replace(event, text=redact_text(event.text, kinds), words=redact_words(event.words, kinds))
        case PartialTranscript():
            committed, tentative = _redact_parts(event.committed, event.tentative, kinds)
            words = redact_words(_closed_words(event.words), kinds)
            return replace(event, committed=committed, tentative=tentative, words=words)
        case _:
            return event


def redact_text(text: str, kinds: frozenset[Kind]) -> str:
    for find in reversed(_find(text, kinds)):
        text = text[: find.start] + find.mark + text[find.end :]
    return text


def redact_words(words: Sequence[Word], kinds: frozenset[Kind]) -> tuple[Word, ...]:
    """Where the words' texts, joined, were the text, they are the redacted text afterwards."""
    finds = _find("".join(word.text for word in words), kinds)
    kept: list[Word] = []
    end = 0
    for word in words:
        start, end = end, end + len(word.text)
        touched = [find for find in finds if find.start < end and find.end > start]
        if not touched:
            kept.append(word)
        elif touched[0].start < start:  # it began in the word before
            kept[-1] = _joined(kept[-1], word, _rest(word.text, start, touched))
        else:
            kept.append(replace(word, text=_rest(word.text, start, touched)))
    return tuple(kept)


def _joined(word: Word, following: Word, text: str) -> Word:
    end = max(word.end_sample, following.end_sample)
    return Word(word.text + text, word.start_sample, end, min(word.probability, following.probability))


def _rest(text: str, start: int, finds: Sequence[_Find]) -> str:
    """What is left of a word at ``start``: a mark stands where its number begins."""
    pieces, at = [], 0
    for find in finds:
        begin, end = max(0, find.start - start), min(len(text), find.end - start)
        pieces += [text[at:begin], find.mark if find.start >= start else ""]
        at = end
    return "".join([*pieces, text[at:]])


def _redact_parts(committed: str, tentative: str, kinds: frozenset[Kind]) -> tuple[str, str]:
    whole = committed + tentative
    settled = redact_text(committed[: _closed(committed)], kinds)
    return settled, redact_text(whole[: _closed(whole)], kinds)[len(settled) :]


def _closed_words(words: Sequence[Word]) -> list[Word]:
    """Those before the digits at the end."""
    left = _closed("".join(word.text for word in words))
    kept = []
    for word in words:
        left -= len(word.text)
        if left < 0:
            break
        kept.append(word)
    return kept


def _closed(text: str) -> int:
    """Where the digits begin that may go on beyond the text's end; its length where it ends otherwise."""
    last = max(_RUN.finditer(text), key=lambda run: run.end(), default=None)
    if last is not None and _GAP_AT_END.match(text, last.end()):
        return last.start()
    head = _HEAD_AT_END.search(text)
    return head.start() if head else len(text)


def _find(text: str, kinds: frozenset[Kind]) -> list[_Find]:
    judged = ((run, _judge(run.group(), kinds)) for run in _RUN.finditer(text))
    return [_Find(run.start(), run.end(), MARKS[kind]) for run, kind in judged if kind is not None]


def _judge(run: str, kinds: frozenset[Kind]) -> Kind | None:
    groups = re.findall(r"\d+", run)
    if Kind.CARD in kinds and _holds_card(groups):
        return Kind.CARD
    return Kind.PHONE if Kind.PHONE in kinds and _is_phone(run, groups) else None


def _is_phone(run: str, groups: Sequence[str]) -> bool:
    if _NO_PHONE.fullmatch(run) or _is_count(groups):
        return False
    least = _INTERNATIONAL_DIGITS if run.startswith("+") else _PHONE_DIGITS
    return sum(map(len, groups)) >= least or _LOCAL.fullmatch(run) is not None


def _is_count(groups: Sequence[str]) -> bool:
    """1, 2, 3 or 10, 20, 30: equal steps."""
    steps = {int(after) - int(before) for before, after in pairwise(groups)}
    return len(groups) > 2 and len(steps) == 1 and steps != {0}


def _holds_card(groups: Sequence[str]) -> bool:
    """Whether some of the groups, in a row, are a card's number."""
    for first in range(len(groups)):
        digits = ""
        for group in groups[first:]:
            digits += group
            if len(digits) >= _CARD_DIGITS.stop:
                break
            if len(digits) in _CARD_DIGITS and _is_luhn([int(digit) for digit in digits]):
                return True
    return False


def _is_luhn(digits: Sequence[int]) -> bool:
    """ISO/IEC 7812-1, annex B: every second digit from the right is doubled, its own digits added."""
    doubled = (2 * digit - 9 * (digit > 4) if place % 2 else digit for place, digit in enumerate(reversed(digits)))
    return sum(doubled) % 10 == 0
