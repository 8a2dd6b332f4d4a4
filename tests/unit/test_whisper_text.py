"""Prompts, words and guards, with a tokenizer of one token a character (and one a byte where that matters)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import whisper_text
from models.whisper_text import SpecialTokens, TokenWord
from streaming.types import Task, Word

SPECIAL = SpecialTokens(
    end_of_text=1000,
    start_of_transcript=1001,
    start_of_previous=1002,
    no_timestamps=1003,
    transcribe=1004,
    translate=1005,
    languages={"en": 1010, "de": 1011},
)
ENGLISH_ONLY = SpecialTokens(1000, 1001, 1002, 1003, 1004, 1005, {})


class Vocabulary:
    """Strings or bytes as tokens: token i is entry i."""

    def __init__(self, *entries: str | bytes) -> None:
        self._entries = [entry if isinstance(entry, bytes) else entry.encode() for entry in entries]

    @property
    def tokens(self) -> list[int]:
        return list(range(len(self._entries)))

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self._entries[token] for token in tokens).decode("utf-8", "replace")


def texts(words: Sequence[TokenWord] | Sequence[Word]) -> list[str]:
    return [word.text for word in words]


def encode_letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def word(text: str, start: int, end: int) -> Word:
    return Word(text=text, start_sample=start, end_sample=end, probability=0.9)


# Prompts


def test_start_sequence_names_language_and_task_only_where_the_model_knows_several() -> None:
    assert SPECIAL.start_sequence("de", Task.TRANSCRIBE) == [1001, 1011, 1004]
    assert SPECIAL.start_sequence("de", Task.TRANSLATE) == [1001, 1011, 1005]
    assert ENGLISH_ONLY.start_sequence("en", Task.TRANSLATE) == [1001]


def test_prompt_puts_context_before_the_start_and_the_prefix_last() -> None:
    start = SPECIAL.start_sequence("en", Task.TRANSCRIBE)
    assert whisper_text.decoder_prompt(SPECIAL, start, []) == [1001, 1010, 1004, 1003]
    assert whisper_text.decoder_prompt(SPECIAL, start, [7, 8], [5]) == [1002, 7, 8, 1001, 1010, 1004, 1003, 5]


def test_look_up_takes_only_languages_the_tokenizer_has() -> None:
    known = {"<|endoftext|>": 1, "<|startoftranscript|>": 2, "<|startofprev|>": 3, "<|notimestamps|>": 4}
    known |= {"<|transcribe|>": 5, "<|translate|>": 6, "<|en|>": 7, "<|yue|>": 8}
    assert SpecialTokens.look_up(known.get, multilingual=True).languages == {"en": 7, "yue": 8}
    assert SpecialTokens.look_up(known.get, multilingual=False).languages == {}
    del known["<|startofprev|>"]
    with pytest.raises(ValueError, match="startofprev"):
        SpecialTokens.look_up(known.get, multilingual=True)


def test_context_is_hotwords_then_prompt() -> None:
    assert whisper_text.context_tokens(encode_letters, "  before ", ["Hark", "WER"]) == encode_letters(
        " Hark, WER before"
    )
    assert whisper_text.context_tokens(encode_letters, " ", ()) == []


@given(prompt=st.text("ab", max_size=600), hotwords=st.lists(st.text("xyz", min_size=1, max_size=90), max_size=9))
def test_context_leaves_half_of_the_decoder_and_keeps_the_newest_of_the_prompt(
    prompt: str, hotwords: list[str]
) -> None:
    context = whisper_text.context_tokens(encode_letters, prompt, hotwords)
    assert len(context) <= 223
    if prompt:
        kept = context[-min(len(prompt), 112) :]
        assert kept == encode_letters(" " + prompt)[-len(kept) :]


@given(
    prompt=st.text("ab", max_size=300), said=st.text("cd", max_size=300), hotwords=st.lists(st.just("x"), max_size=40)
)
def test_what_was_said_comes_last_in_lengths_of_which_there_are_few(
    prompt: str, said: str, hotwords: list[str]
) -> None:
    context = whisper_text.context_tokens(encode_letters, prompt, hotwords, said)
    alone = whisper_text.context_tokens(encode_letters, prompt, hotwords)
    assert len(context) <= 223
    if len(said) >= 2 * whisper_text.CONTEXT_STEP and len(context) < 223:
        assert len(context) % whisper_text.CONTEXT_STEP == 0
        assert context[: len(alone)] == alone
    heard = context[-min(len(said), whisper_text.CONTEXT_STEP) :] if said else []
    assert heard == encode_letters(said)[len(said) - len(heard) :], "the newest of it is kept"


@given(context=st.lists(st.integers(0, 9), max_size=223), prefix=st.lists(st.integers(10, 19), max_size=430))
def test_a_long_prefix_displaces_context_and_the_prompt_always_leaves_room(
    context: list[int], prefix: list[int]
) -> None:
    prompt = whisper_text.decoder_prompt(SPECIAL, SPECIAL.start_sequence("en", Task.TRANSCRIBE), context, prefix)
    kept = [token for token in prompt if token < 10]
    assert kept == context[len(context) - len(kept) :]
    assert len(kept) == min(len(context), max(0, 223 - len(prefix)))
    assert prompt[len(prompt) - len(prefix) :] == prefix
    assert 1 <= whisper_text.token_cap(30.0, len(prompt)) <= 448 - len(prompt)


def test_token_cap_leaves_room_for_the_fastest_speech() -> None:
    assert whisper_text.token_cap(1.0, 4) >= 30
    assert whisper_text.token_cap(10.0, 4) == 224
    assert whisper_text.token_cap(30.0, 440) == 8
    with pytest.raises(ValueError, match="no room"):
        whisper_text.token_cap(1.0, 448)


# Language


def assert_chosen(chosen: tuple[str, float], language: str, share: float) -> None:
    assert chosen[0] == language
    assert chosen[1] == pytest.approx(share)


def test_detection_is_restricted_to_the_allowed_languages() -> None:
    found = [("en", 0.6), ("de", 0.3), ("fr", 0.1)]
    assert_chosen(whisper_text.choose_language(found, (), None, 0.5), "en", 0.6)
    assert_chosen(whisper_text.choose_language(found, ("de", "fr"), None, 0.5), "de", 0.75)


def test_hint_wins_only_over_an_unsure_detection_and_only_where_allowed() -> None:
    unsure = [("en", 0.4), ("de", 0.35), ("fr", 0.25)]
    assert_chosen(whisper_text.choose_language(unsure, (), "de", 0.5), "de", 0.35)
    assert_chosen(whisper_text.choose_language(unsure, ("en", "fr"), "de", 0.7), "en", 0.4 / 0.65)
    assert whisper_text.choose_language([("en", 0.9), ("de", 0.1)], (), "de", 0.5)[0] == "en"


def test_no_allowed_language_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="xx"):
        whisper_text.choose_language([("en", 1.0)], ("xx",), None, 0.5)


# Words


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([" Hel", "lo", ",", " world", "."], [" Hello,", " world."]),
        ([" well", "-", "known", " 3", ".", "5"], [" well-known", " 3.5"]),
        ([" don", "'t", " “", "Go", "”", " !"], [" don't", " “Go” !"]),
        (["¿", "Qué", "?", " ¡", "No", "!"], ["¿Qué?", " ¡No!"]),
        ([" «", " Oui", " »", ",", " dit", "-il"], [" « Oui »,", " dit-il"]),
        ([" yes", " -", " no"], [" yes", " - no"]),
        ([" end", " ("], [" end ("]),
        ([" ..."], [" ..."]),
    ],
)
def test_spaced_languages_split_at_spaces_and_keep_punctuation(entries: list[str], expected: list[str]) -> None:
    vocabulary = Vocabulary(*entries)
    assert texts(whisper_text.split_words(vocabulary.tokens, vocabulary.decode, spaced=True)) == expected


def test_unspaced_languages_split_at_characters_across_byte_tokens() -> None:
    first, second = "字".encode(), "猫".encode()
    vocabulary = Vocabulary(first[:1], first[1:], second[:2], second[2:], "。", "「", "は", "」")
    words = whisper_text.split_words(vocabulary.tokens, vocabulary.decode, spaced=False)
    assert texts(words) == ["字", "猫。", "「は」"]
    assert (words[0].first, words[0].end) == (0, 2)


def test_a_character_cut_short_at_the_end_is_dropped() -> None:
    vocabulary = Vocabulary(" ok", "字".encode()[:2])
    assert texts(whisper_text.split_words(vocabulary.tokens, vocabulary.decode, spaced=True)) == [" ok"]


def test_trailing_punctuation_takes_no_time() -> None:
    vocabulary = Vocabulary(" Hello", ".", "”")
    assert whisper_text.split_words(vocabulary.tokens, vocabulary.decode, spaced=True) == [
        TokenWord(" Hello.”", first=0, spoken_end=1, end=3)
    ]


@given(entries=st.lists(st.text(" ab.-'¿「é字", min_size=1, max_size=4), max_size=20), spaced=st.booleans())
def test_words_concatenate_to_the_text_and_share_out_the_tokens(entries: list[str], spaced: bool) -> None:
    vocabulary = Vocabulary(*entries)
    words = whisper_text.split_words(vocabulary.tokens, vocabulary.decode, spaced=spaced)
    assert "".join(texts(words)) == "".join(entries)
    assert [w.first for w in words] == [0, *(w.end for w in words)][: len(words)]
    assert all(w.first <= w.spoken_end <= w.end for w in words)
    assert not words or words[-1].end == len(entries)


def test_what_follows_a_forced_prefix_never_changes_its_words() -> None:
    vocabulary = Vocabulary(" I", " like", " app", "les", ".")
    split = whisper_text.split_continued([0, 1, 2], [3, 4], vocabulary.decode, spaced=True)
    assert texts(split) == [" I", " like", " app", " les."]
    assert [(w.first, w.end) for w in split] == [(0, 1), (1, 2), (2, 3), (3, 5)]
    split = whisper_text.split_continued([0, 1], [4], vocabulary.decode, spaced=True)
    assert texts(split) == [" I", " like."]
    assert texts(whisper_text.split_continued([], [3, 4], vocabulary.decode, spaced=True)) == ["les."]


# Times


def test_token_positions_are_where_the_path_first_reaches_each_row() -> None:
    path = [(0, 0), (0, 1), (1, 2), (1, 3), (2, 3), (2, 9)]
    assert whisper_text.token_positions(path, 2) == [0, 2, 3]
    assert whisper_text.token_positions([(0, 4), (1, 5)], 3) == [4, 5, 5, 5]
    assert whisper_text.token_positions([], 1) == [0, 0]


def test_words_get_the_times_and_mean_probability_of_their_tokens() -> None:
    words = [TokenWord(" a", 0, 1, 1), TokenWord(" bc.", 1, 3, 4)]
    timed = whisper_text.time_words(words, [0, 10, 20, 30, 45], [0.5, 0.25, 0.75, 0.5], 100_000)
    assert [(w.start_sample, w.end_sample) for w in timed] == [(0, 3_200), (3_200, 9_600)]
    assert [w.probability for w in timed] == [0.5, 0.5]


def test_a_pause_is_cut_from_the_word_that_swallowed_it() -> None:
    words = [TokenWord(text, i, i + 1, i + 1) for i, text in enumerate((" a", " b", " c.", " d", " e"))]
    starts = [0, 100, 110, 120, 300, 310]
    timed = whisper_text.time_words(words, starts, [1.0] * 5, 480_000)
    assert [(w.start_sample // 320, w.end_sample // 320) for w in timed] == [
        (80, 100),  # the first word: silence lies before it
        (100, 110),
        (110, 120),
        (280, 300),  # after the end of a sentence too
        (300, 310),
    ]


@given(
    steps=st.lists(st.integers(0, 400), min_size=1, max_size=20),
    audio_samples=st.integers(1, 480_000),
    ends=st.sets(st.integers(0, 19)),
)
def test_times_are_monotone_and_within_the_audio(steps: list[int], audio_samples: int, ends: set[int]) -> None:
    words = [TokenWord(" a." if i in ends else " a", i, i + 1, i + 1) for i in range(len(steps))]
    positions = [0]
    for step in steps:
        positions.append(positions[-1] + step)
    timed = whisper_text.time_words(words, positions, [0.5] * len(steps), audio_samples)
    edges = [edge for w in timed for edge in (w.start_sample, w.end_sample)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= audio_samples for edge in edges)
    assert all(w.end_sample - w.start_sample <= 2 * whisper_text.MEDIAN_WORD_SAMPLES for w in timed)


# Comparing


def test_committed_words_are_compared_without_case_and_punctuation() -> None:
    assert whisper_text.begins_with("Hello, world. And more", "hello world")
    assert whisper_text.begins_with("It’s fine", "it's")
    assert not whisper_text.begins_with("Hello worlds", "hello world")
    assert not whisper_text.begins_with("Hello", "hello world")
    assert whisper_text.begins_with("今日は、天気がいい", "今日は天気")
    assert whisper_text.begins_with("anything", "")


# Guards


@pytest.mark.parametrize(
    "text",
    [
        "you you you you you you",
        "the same thing and the same thing and the same thing and",
        "well I am I am I am I am I am",
        "ha " * 40,
    ],
)
def test_loops_are_seen(text: str) -> None:
    assert whisper_text.has_loop(whisper_text.units(text))


@pytest.mark.parametrize(
    "text",
    ["", "no no no no", "very very very good", "one two one two one two three", "a rose is a rose is a rose"],
)
def test_true_repetition_is_no_loop(text: str) -> None:
    assert not whisper_text.has_loop(whisper_text.units(text))


@given(st.lists(st.integers(0, 10_000).map(str), unique=True, max_size=60))
def test_a_text_without_repetition_never_loops(words: list[str]) -> None:
    assert not whisper_text.has_loop(words)


def test_compression_ratio_tells_repetition_from_speech() -> None:
    assert whisper_text.compression_ratio("") == 0.0
    assert whisper_text.compression_ratio("He hoped there would be stew for dinner.") < 1.5
    assert whisper_text.compression_ratio("stew for dinner " * 20) > whisper_text.MAX_COMPRESSION_RATIO


def test_uncovered_speech_is_what_must_lie_in_the_longest_gap() -> None:
    words = [word(" a", 0, 16_000), word(" b", 16_000, 40_000)]
    assert whisper_text.uncovered_samples(words, 160_000, 160_000) == 120_000
    assert whisper_text.uncovered_samples(words, 160_000, 100_000) == 60_000
    assert whisper_text.uncovered_samples(words, 160_000, 40_000) == 0
    assert whisper_text.uncovered_samples([], 160_000, 160_000) == 160_000
    assert whisper_text.longest_gap([word(" a", 90_000, 100_000)], 160_000) == (0, 90_000)


@given(st.lists(st.integers(0, 1_000), max_size=12), st.integers(1_000, 2_000), st.data())
def test_uncovered_is_never_more_than_the_speech_outside_the_words(
    cuts: list[int], audio: int, data: st.DataObject
) -> None:
    edges = sorted(cuts)
    words = [word(" a", a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    speech = data.draw(st.integers(sum(w.end_sample - w.start_sample for w in words), audio))
    uncovered = whisper_text.uncovered_samples(words, audio, speech)
    assert uncovered <= speech - sum(w.end_sample - w.start_sample for w in words)


@pytest.mark.parametrize(
    "text", ["you", "Thank you.", "Thanks for watching!", "you you you", "ご視聴ありがとうございました。"]
)
def test_known_phrases_of_silence(text: str) -> None:
    assert whisper_text.is_silence_phrase(text)


@pytest.mark.parametrize("text", ["", "Thank you for calling.", "you know", "watching"])
def test_other_texts_are_no_phrases_of_silence(text: str) -> None:
    assert not whisper_text.is_silence_phrase(text)


def test_echo_of_the_prompt() -> None:
    assert whisper_text.is_echo("Hark, WER.", "Glossary: Hark WER")
    assert not whisper_text.is_echo("", "Hark")
    assert not whisper_text.is_echo("Hark the herald", "Hark")


def test_shifted_words_keep_everything_but_their_place() -> None:
    assert whisper_text.shift_words([word(" a", 1, 5)], 100) == (word(" a", 101, 105),)


def test_more_words_than_anybody_says_in_the_time() -> None:
    assert whisper_text.is_too_fast("I should be early in the morning.", 0.48, spaced=True)
    assert not whisper_text.is_too_fast("Yes, I think so.", 0.48, spaced=True)
    assert not whisper_text.is_too_fast("ask not what your country can do for you", 2.0, spaced=True)
    assert not whisper_text.is_too_fast("今天天气好", 0.5, spaced=False)
    assert whisper_text.is_too_fast("今天天气非常好我们去公园吧", 0.4, spaced=False)
