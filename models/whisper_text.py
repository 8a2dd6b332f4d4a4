"""Pure: decoder prompts, tokens to words, and the guards that tell speech from what Whisper makes up.

Nothing here knows an engine: tokens are integers, and the tokenizer comes in as two functions. The thresholds are
those of Whisper's reference decoder (openai/whisper, transcribe.py) unless a comment says where they come from.
"""

import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from models.catalog import LANGUAGES
from models.silence_tail import SAMPLES_PER_POSITION
from streaming.types import Task, Word

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

MAX_LENGTH_TOKENS = 448  # the decoder's positions
CONTEXT_STEP = 16
MAX_CONTEXT_TOKENS = MAX_LENGTH_TOKENS // 2 - 1  # of them, what may come before <|startoftranscript|>

MAX_COMPRESSION_RATIO = 2.4
MIN_AVERAGE_LOGPROB = -1.0
MAX_NO_SPEECH_PROBABILITY = 0.6

UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "my", "yue", "km", "bo"})


# Decoder prompts


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of a model's special tokens. ``languages`` maps codes to ids; it is empty for English-only models."""

    end_of_text: int
    start_of_transcript: int
    start_of_previous: int
    no_timestamps: int
    transcribe: int
    translate: int
    languages: Mapping[str, int]

    @classmethod
    def look_up(cls, token_to_id: Callable[[str], int | None], *, multilingual: bool) -> "SpecialTokens":
        """Ask a tokenizer for every id. Raises ValueError where one is missing: not a Whisper tokenizer."""

        def required(token: str) -> int:
            if (found := token_to_id(token)) is None:
                raise ValueError(f"the tokenizer has no {token}")
            return found

        languages = {code: token_to_id(f"<|{code}|>") for code in LANGUAGES} if multilingual else {}
        return cls(
            end_of_text=required("<|endoftext|>"),
            start_of_transcript=required("<|startoftranscript|>"),
            start_of_previous=required("<|startofprev|>"),
            no_timestamps=required("<|notimestamps|>"),
            transcribe=required("<|transcribe|>"),
            translate=required("<|translate|>"),
            languages={code: token for code, token in languages.items() if token is not None},
        )

    def start_sequence(self, language: str, task: Task) -> list[int]:
        """What opens a transcript: <|startoftranscript|>, then language and task where the model knows several."""
        if not self.languages:
            return [self.start_of_transcript]
        task_token = self.translate if task is Task.TRANSLATE else self.transcribe
        return [self.start_of_transcript, self.languages[language], task_token]


def context_tokens(encode: Encode, prompt: str, hotwords: Sequence[str], said_before: str = "") -> list[int]:
    """Tokens of what came before: hotwords, prompt, what was said; at most 223, the oldest dropped, half hotwords.

    The order is faster-whisper's, the common limit is not: there the two together can fill the decoder. What was said
    is cut at its beginning so that lengths are few (``CONTEXT_STEP``): decodes share a call only where they are equal.
    """
    previous = encode(" " + prompt.strip()) if prompt.strip() else []
    said = encode(" " + said_before.strip()) if said_before.strip() else []
    expected = encode(" " + ", ".join(word.strip() for word in hotwords)) if hotwords else []
    expected = expected[: MAX_CONTEXT_TOKENS // 2 if previous or said else MAX_CONTEXT_TOKENS]
    surplus = (len(expected) + len(previous) + len(said)) % CONTEXT_STEP
    if len(said) >= surplus + CONTEXT_STEP:
        said = said[surplus:]
    room = MAX_CONTEXT_TOKENS - len(expected)
    return expected + [*previous, *said][-room:]


def decoder_prompt(
    special: SpecialTokens, start: Sequence[int], context: Sequence[int], prefix: Sequence[int] = ()
) -> list[int]:
    """The decoder's input: context, start sequence, <|notimestamps|>, and the tokens the text must start with.

    Context that the prefix leaves no room for is dropped, the oldest first.
    """
    kept = context[-room:] if (room := max(0, MAX_CONTEXT_TOKENS - len(prefix))) else ()
    before = [special.start_of_previous, *kept] if kept else []
    return [*before, *start, special.no_timestamps, *prefix]


def token_cap(audio_s: float, prompt_tokens: int) -> int:
    """How many tokens may follow a prompt of so many: at least 1, at most 224 and what the decoder has left.

    Fast English has 6 tokens a second; scripts that Whisper spells in bytes reach 25 (Burmese, Amharic). Raises
    ValueError where the prompt fills the decoder.
    """
    room = MAX_LENGTH_TOKENS - prompt_tokens
    if room < 1:
        raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room for text")
    return min(20 + int(25 * audio_s), MAX_LENGTH_TOKENS // 2, room)


def choose_language(
    probabilities: Iterable[tuple[str, float]], allowed: Sequence[str], hint: str | None, confident: float
) -> tuple[str, float]:
    """The likeliest allowed language and its share among the allowed ones (all, where ``allowed`` is empty).

    Where that share is below ``confident`` and ``hint`` is an allowed language, the hint and its own share: a short
    or noisy utterance should not switch a session's language.
    """
    shares = {code: p for code, p in probabilities if not allowed or code in allowed}
    total = sum(shares.values())
    if total <= 0.0:
        raise ValueError(f"the model knows none of the languages {', '.join(allowed)}")
    best = max(shares, key=shares.__getitem__)
    if shares[best] / total < confident and hint in shares:
        best = hint
    return best, shares[best] / total


# Tokens to words

_OPENING = "\"'“‘¿¡([{«„「『《（-–—"
_OPENING_ALONE = "¿¡([{「『《（"  # those that never close anything
_CHARACTERS_IN_PIECE = 4  # more tokens than one UTF-8 character has bytes: then U+FFFD is what the model wrote


@dataclass(frozen=True, slots=True)
class TokenWord:
    """A word and its tokens [first, end); those from ``spoken_end`` on are punctuation, which takes no time."""

    text: str
    first: int
    spoken_end: int
    end: int


def is_punctuation(text: str) -> bool:
    """Whether there is nothing to pronounce in the text."""
    return not any(unicodedata.category(c)[0] in "LNMS" for c in text)


def _pieces(tokens: Sequence[int], decode: Decode) -> list[TokenWord]:
    """The shortest runs of tokens that are whole characters. A character cut short at the end is dropped."""
    pieces: list[TokenWord] = []
    first = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[first:end])
        if "\ufffd" in text and end - first < _CHARACTERS_IN_PIECE:
            continue
        spoken_end = first if is_punctuation(text) else end
        pieces.append(TokenWord(text, first, spoken_end, end))
        first = end
    return pieces


def _join(left: TokenWord, right: TokenWord) -> TokenWord:
    silent = right.spoken_end == right.first
    return TokenWord(left.text + right.text, left.first, left.spoken_end if silent else right.spoken_end, right.end)


def _belongs_to_previous(previous: TokenWord, piece: TokenWord, spaced: bool) -> bool:
    if is_punctuation(piece.text):
        mark = piece.text.strip()
        return not (mark in _OPENING and piece.text.startswith(" ")) and (spaced or mark not in _OPENING_ALONE)
    if is_punctuation(previous.text):
        return previous.text.strip() in _OPENING or not piece.text.startswith(" ")
    return spaced and not piece.text.startswith(" ")


def split_words(tokens: Sequence[int], decode: Decode, *, spaced: bool) -> list[TokenWord]:
    """Words whose texts concatenate to the text of all tokens; punctuation is part of the word it stands at.

    A word begins at a space. Languages written without spaces are split at every character the tokens allow.
    """
    words: list[TokenWord] = []
    for piece in _pieces(tokens, decode):
        if words and _belongs_to_previous(words[-1], piece, spaced):
            words[-1] = _join(words[-1], piece)
        else:
            words.append(piece)
    if len(words) > 1 and is_punctuation(words[-1].text):
        words[-2:] = [_join(words[-2], words[-1])]
    return words


def split_continued(prefix: Sequence[int], said: Sequence[int], decode: Decode, *, spaced: bool) -> list[TokenWord]:
    """Words of the forced prefix, then of what was said after it; the prefix's words stay as they are.

    Punctuation still joins the prefix's last word. A bare syllable does not: it gets the space it lacks.
    """
    words = split_words(prefix, decode, spaced=spaced)
    shift = len(prefix)
    for word in split_words(said, decode, spaced=spaced):
        word = TokenWord(word.text, word.first + shift, word.spoken_end + shift, word.end + shift)
        first = shift > 0 and word.first == shift
        if first and words and is_punctuation(word.text):
            words[-1] = _join(words[-1], word)
        elif first and spaced and not word.text.startswith(" "):
            words.append(replace(word, text=" " + word.text))
        else:
            words.append(word)
    return words


def token_positions(alignments: Iterable[tuple[int, int]], tokens: int) -> list[int]:
    """From aligned (token, encoder position) pairs in order, the position where each token begins and the last ends.

    Shape (tokens + 1,): a token begins where the path first reaches it, and the text ends where the path reaches the
    row after the last token.
    """
    begins: list[int] = []
    last = 0
    for token, position in alignments:
        while len(begins) <= token:
            begins.append(position)
        last = position
    return (begins + [last] * (tokens + 1))[: tokens + 1]


def time_words(
    token_words: Sequence[TokenWord],
    token_positions: Sequence[int],
    token_probabilities: Sequence[float],
    audio_samples: int,
) -> tuple[Word, ...]:
    """Words with times in samples, monotone, within [0, audio_samples] and of a credible length.

    ``token_positions`` has the encoder position where each token begins and, last, where the text ends. A word's
    probability is the mean over its tokens.
    """
    words = [
        Word(
            text=word.text,
            start_sample=min(audio_samples, token_positions[word.first] * SAMPLES_PER_POSITION),
            end_sample=min(audio_samples, token_positions[max(word.spoken_end, word.first)] * SAMPLES_PER_POSITION),
            probability=min(1.0, max(0.0, fmean(token_probabilities[word.first : word.end]))),
        )
        for word in token_words
    ]
    return tuple(_limit_durations(words))


_SENTENCE_ENDS = (".", "。", "!", "！", "?", "？")
MEDIAN_WORD_SAMPLES = 11_200  # 0.7 s: the reference takes no longer median for real


def _limit_durations(words: Sequence[Word]) -> list[Word]:
    """Cut words that swallow a pause to twice the median word, as the reference does.

    The alignment gives every position to some word. A pause falls to the word before it; at the start and after the
    end of a sentence, to the word after it.
    """
    durations = [word.end_sample - word.start_sample for word in words if word.end_sample > word.start_sample]
    if not durations:
        return list(words)
    longest = 2 * min(MEDIAN_WORD_SAMPLES, int(median(durations)))
    limited = []
    for index, word in enumerate(words):
        after_pause = index == 0 or words[index - 1].text.endswith(_SENTENCE_ENDS)
        if word.end_sample - word.start_sample > longest and after_pause and len(words) > 1:
            word = replace(word, start_sample=word.end_sample - longest)
        elif word.end_sample - word.start_sample > longest:
            word = replace(word, end_sample=word.start_sample + longest)
        limited.append(word)
    return limited


# Comparing texts

# One unit is a run of letters and digits, or a single character where a script has no spaces between words.
_UNIT = re.compile(r"[\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+")


def units(text: str) -> list[str]:
    """The words of a text for comparing: casefolded, without punctuation; single characters in unspaced scripts."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _UNIT.findall(re.sub(r"(?<=\w)['’](?=\w)", "", folded))


def begins_with(text: str, committed: str) -> bool:
    """Whether the text starts with the same words, whatever their case and punctuation."""
    wanted = units(committed)
    return units(text)[: len(wanted)] == wanted


# Guards


def compression_ratio(text: str) -> float:
    """Length of the text in UTF-8 over its deflated length: repetition makes it large. 0.0 for an empty text."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data)) if data else 0.0


# How often a run of 1, 2, 3, 4+ words may come in a row before it is a loop. People do say "no, no, no, no".
_LOOP_REPEATS = {1: 6, 2: 5, 3: 4}
_LOOP_REPEATS_LONGER = 3
_LONGEST_LOOP = 24


def has_loop(words: Sequence[str]) -> bool:
    """Whether a run of words comes so often in a row that the decoder must be stuck."""
    for length in range(1, min(_LONGEST_LOOP, len(words) // 2) + 1):
        needed = _LOOP_REPEATS.get(length, _LOOP_REPEATS_LONGER)
        matched = 0
        for earlier, later in zip(words, words[length:], strict=False):
            matched = matched + 1 if earlier == later else 0
            if matched >= length * (needed - 1):
                return True
    return False


def longest_gap(words: Sequence[Word], audio_samples: int) -> tuple[int, int]:
    """Where no word is for longest: [start, end) in samples."""
    edges = [0, *(edge for word in words for edge in (word.start_sample, word.end_sample)), audio_samples]
    return max(zip(edges[::2], edges[1::2], strict=True), key=lambda gap: gap[1] - gap[0])


def uncovered_samples(words: Sequence[Word], audio_samples: int, speech_samples: int) -> int:
    """Speech that certainly lies in the longest stretch without words, in samples.

    Only the amount of speech is known, not its place: a stretch longer than all that is not speech must hold some.
    """
    start, end = longest_gap(words, audio_samples)
    return max(0, end - start - max(0, audio_samples - speech_samples))


def shift_words(words: Sequence[Word], offset_samples: int) -> tuple[Word, ...]:
    """The same words, moved later by ``offset_samples``."""
    return tuple(
        replace(w, start_sample=w.start_sample + offset_samples, end_sample=w.end_sample + offset_samples)
        for w in words
    )


# What Whisper writes over silence and noise: its training captions ended so. From the reports in
# openai/whisper#928, whisper.cpp#1724, WhisperLive#185 and what the base and tiny.en weights say of noise here.
_SILENCE_PHRASES = frozenset(
    " ".join(units(phrase))
    for phrase in (
        "you", "bye", "bye bye", "oh", "so", "the", "thank you", "thank you very much", "thank you so much",
        "thanks for watching", "thank you for watching", "thank you so much for watching", "thanks for listening",
        "thank you for listening", "please subscribe", "please subscribe to my channel", "like and subscribe",
        "don't forget to like and subscribe", "see you next time", "see you in the next video", "the end", "silence",
        "i'll see you next time", "we'll be right back", "subtitles by the amara.org community", "music",
        "untertitel der amara.org-community", "untertitel im auftrag des zdf", "vielen dank",
        "vielen dank fürs zuschauen", "untertitelung des zdf", "bis zum nächsten mal", "danke fürs zuschauen",
        "sous-titres réalisés par la communauté d'amara.org", "sous-titrage société radio-canada",
        "merci d'avoir regardé cette vidéo", "merci", "abonnez-vous",
        "subtítulos realizados por la comunidad de amara.org",
        "gracias", "gracias por ver el video", "suscríbete", "sottotitoli creati dalla comunità amara.org", "grazie",
        "sottotitoli e revisione a cura di qtss", "legendas pela comunidade amara.org", "obrigado",
        "obrigado por assistir", "ondertitels ingediend door de amara.org gemeenschap", "tack för att ni tittade",
        "napisy stworzone przez społeczność amara.org", "dziękuję za oglądanie", "субтитры сделал dimatorzok",
        "субтитры создавал dimatorzok", "продолжение следует", "спасибо за просмотр", "редактор субтитров",
        "altyazı m.k.", "izlediğiniz için teşekkür ederim", "ご視聴ありがとうございました", "ありがとうございました",
        "おやすみなさい", "請不吝點贊訂閱轉發打賞支持明鏡與點點欄目",
        "字幕由amara.org社区提供", "谢谢观看", "謝謝觀看", "谢谢大家",
        "시청해주셔서 감사합니다", "구독과 좋아요", "감사합니다", "mbc 뉴스", "ترجمة نانسي قنقر", "اشتركوا في القناة",
    )
)  # fmt: skip


def is_silence_phrase(text: str) -> bool:
    """Whether the text is (only, perhaps repeatedly) something that Whisper is known to write where nobody speaks."""
    words = units(text)
    if " ".join(words) in _SILENCE_PHRASES:
        return True
    return any(
        len(words) % length == 0
        and " ".join(words[:length]) in _SILENCE_PHRASES
        and all(a == b for a, b in zip(words, words[length:], strict=False))
        for length in range(1, len(words) // 2 + 1)
    )


# Fast talkers reach 6 words a second, and read Japanese 10 characters (each a unit); the detector may miss their edges.
_UNITS_PER_SPEECH_S = {True: 7.0, False: 14.0}
_UNITS_AT_THE_EDGES = 2


def is_too_fast(text: str, speech_s: float, *, spaced: bool) -> bool:
    """Whether the text holds more than anybody says in so much speech."""
    return len(units(text)) > _UNITS_AT_THE_EDGES + _UNITS_PER_SPEECH_S[spaced] * speech_s


def is_echo(text: str, context: str) -> bool:
    """Whether the text only repeats words of the prompt or the hotwords."""
    said, given = units(text), units(context)
    return bool(said) and any(given[i : i + len(said)] == said for i in range(len(given) - len(said) + 1))
