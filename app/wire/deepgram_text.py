"""Words and texts in Deepgram's form, for live results and for recordings. Pure."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streaming.audio import SAMPLE_RATE
from streaming.types import Word

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How texts are written. ``names_languages``: whether each word says its language, as with ``language=multi``."""

    is_punctuated: bool = True
    names_languages: bool = False


def seconds(samples: int) -> float:
    """Samples at 16 kHz → seconds, to the millisecond."""
    return round(samples / SAMPLE_RATE, 3)


def bare(text: str) -> str:
    """A word in small letters without the punctuation around it; as it is where nothing would be left."""
    small = text.strip().lower()
    kept = [place for place, character in enumerate(small) if not _is_punctuation(character)]
    return small[kept[0] : kept[-1] + 1] if kept else small


def mean_probability(words: Sequence[Word]) -> float:
    return sum(word.probability for word in words) / len(words) if words else 0.0


def alternative(text: str, words: Sequence[Word], confidence: float, language: str, spelling: Spelling) -> JsonObject:
    """One reading of some speech, which is all there is. ``language``: its code, "" where it is not known."""
    said = [word for word in words if word.text.strip()]
    named = language if spelling.names_languages else ""
    transcript = text.strip() if spelling.is_punctuated else _unpunctuated(said)
    found: JsonObject = {
        "transcript": transcript,
        "confidence": round(confidence, 4),
        "words": [word_object(word, named) for word in said],
    }
    return found | ({"languages": [named]} if named else {})


def word_object(word: Word, language: str = "") -> JsonObject:
    """``language`` is left out where it is ""."""
    found: JsonObject = {
        "word": bare(word.text),
        "start": seconds(word.start_sample),
        "end": seconds(word.end_sample),
        "confidence": round(word.probability, 4),
        "punctuated_word": word.text.strip(),
    }
    return found | ({"language": language} if language else {})


def _unpunctuated(words: Iterable[Word]) -> str:
    """Words bring their own spaces, where their script has any."""
    spaced = (" " * word.text[:1].isspace() + bare(word.text) for word in words)
    return "".join(spaced).strip()


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character).startswith("P") and character not in "%&@#"
