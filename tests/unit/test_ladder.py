"""The ladder over a scripted backend: which rungs are asked, which answer stands, and why others are dropped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from models import whisper_text
from models.ladder import (
    Align,
    Decode,
    Decoded,
    Detect,
    Ladder,
    LadderConfig,
    LanguageShares,
    Step,
    Timing,
    Window,
    climb,
    climb_async,
)
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Priority, Task

SECOND = 16_000
END, START, PREVIOUS, PLAIN, TRANSCRIBE, TRANSLATE, ENGLISH, GERMAN, JAPANESE = range(1_000, 1_009)
MULTILINGUAL = whisper_text.SpecialTokens(
    END, START, PREVIOUS, PLAIN, TRANSCRIBE, TRANSLATE, {"en": ENGLISH, "de": GERMAN, "ja": JAPANESE}
)
CREDIBLE = -0.2


class Words:
    """A tokenizer: each word with its space is a token, numbered as they come."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def encode(self, text: str) -> list[int]:
        pieces = [" " + word for word in text.split()] if text.startswith(" ") else list(text)
        self._known += [piece for piece in pieces if piece not in self._known]
        return [self._known.index(piece) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._known[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Said:
    """What a decode gives: the text after the prefix, and what speaks for it. ``until_s``: where its last word ends."""

    text: str
    logprob: float = CREDIBLE
    no_speech: float = 0.0
    capped: bool = False
    until_s: float | None = None


@dataclass
class Scripted:
    """A backend that answers each decode by a function or, in order, from a list, and keeps what it was asked.

    The words lie evenly in the window or, up to ``until_s``, in a part of it.
    """

    tokenizer: Words
    said: Iterator[Said] | Callable[[Decode], Said]
    shares: LanguageShares = (("en", 0.9), ("de", 0.1))
    asked: list[Step] = field(default_factory=list)

    def detect(self, step: Detect) -> LanguageShares:
        self.asked.append(step)
        return self.shares

    def decode(self, step: Decode) -> Decoded:
        self.asked.append(step)
        said = self.said(step) if callable(self.said) else next(self.said)
        tokens = self.tokenizer.encode(said.text)
        timing = spread([*step.prefix, *tokens], step.window, said.until_s)
        return Decoded(tokens, timing, said.capped, said.logprob, said.no_speech)

    def align(self, step: Align) -> Timing:
        self.asked.append(step)
        return spread(step.tokens, step.window, None)

    @property
    def decodes(self) -> list[Decode]:
        return [step for step in self.asked if isinstance(step, Decode)]

    @property
    def rungs(self) -> list[tuple[bool, float]]:
        return [(step.window.full, step.temperature) for step in self.decodes]


def spread(tokens: Sequence[int], window: Window, until_s: float | None) -> Timing:
    last = (window.samples if until_s is None else until_s * SECOND) / 320
    return Timing([round(last * n / max(1, len(tokens))) for n in range(len(tokens) + 1)], [0.9] * len(tokens))


def ask(
    seconds: float = 2.0,
    priority: Priority = Priority.LIVE_FINAL,
    *,
    speech_s: float | None = None,
    committed: str = "",
    context: str = "",
    context_language: str = "en",
    options: DecodeOptions | None = None,
) -> DecodeRequest:
    audio = np.zeros(int(seconds * SECOND), np.int16)
    return DecodeRequest(
        request_id=7,
        utterance_id=1,
        channel=0,
        priority=priority,
        audio=audio,
        start_sample=123_456,
        speech_samples=len(audio) if speech_s is None else int(speech_s * SECOND),
        committed=committed,
        context=context,
        context_language=context_language,
        options=options or DecodeOptions(language="en"),
    )


def play(
    request: DecodeRequest,
    *said: Said,
    by: Callable[[Decode], Said] | None = None,
    special: whisper_text.SpecialTokens = MULTILINGUAL,
    shares: LanguageShares = (("en", 0.9), ("de", 0.1)),
    config: LadderConfig | None = None,
) -> tuple[Hypothesis, Scripted]:
    """The answer, and what was asked for it. Each decode takes one of ``said``, none may be left over."""
    tokenizer = Words()
    script = iter(said)
    backend = Scripted(tokenizer, by or script, shares)
    ladder = Ladder(config or LadderConfig(), special, tokenizer.encode, tokenizer.decode)
    answer = climb(ladder.steps(request), backend)
    assert not list(script), "the ladder was expected to ask for more"
    return answer, backend


GOOD = Said(" good morning everybody")
LOOPS = Said(" no" * 10)
EMPTY = Said("", logprob=-2.0, no_speech=0.95)


# --- rungs -----------------------------------------------------------------------------------------------------------


def test_a_credible_text_of_the_shaped_window_is_the_answer() -> None:
    answer, backend = play(ask(), GOOD)
    assert backend.rungs == [(False, 0.0)]
    assert (answer.text, answer.rejected, answer.full_window) == ("good morning everybody", "", False)
    assert [word.text for word in answer.words] == [" good", " morning", " everybody"]
    assert [word.end_sample for word in answer.words] == [10_560, 21_440, 32_000]
    assert (answer.request_id, answer.average_logprob, answer.decode_s) == (7, CREDIBLE, 0.0)


def test_each_rung_is_tried_until_one_is_credible() -> None:
    answer, backend = play(ask(), LOOPS, LOOPS, LOOPS, GOOD)
    assert backend.rungs == [(False, 0.0), (True, 0.0), (True, 0.2), (True, 0.4)]
    assert (answer.text, answer.full_window, answer.temperature) == ("good morning everybody", True, 0.4)


def test_where_no_rung_is_credible_the_least_bad_stands() -> None:
    doubtful = Said(" good morning", logprob=-1.1)
    answer, backend = play(ask(), LOOPS, Said(" a b", capped=True), doubtful, replace(doubtful, logprob=-1.2), LOOPS)
    assert backend.rungs == [(False, 0.0), (True, 0.0), (True, 0.2), (True, 0.4), (True, 0.6)]
    assert (answer.text, answer.average_logprob, answer.temperature) == ("good morning", -1.1, 0.2)


def test_a_partial_has_one_rung() -> None:
    answer, backend = play(ask(priority=Priority.LIVE_PARTIAL), LOOPS)
    assert backend.rungs == [(False, 0.0)]
    assert (answer.text, answer.words, answer.rejected) == ("", (), "repetition")


def test_sampling_starts_where_the_request_says() -> None:
    options = DecodeOptions(language="en", temperature=0.4)
    _, backend = play(ask(options=options), LOOPS, LOOPS, LOOPS)
    assert backend.rungs == [(False, 0.4), (True, 0.4), (True, 0.6)]


def test_unshaped_the_full_window_is_the_first_rung() -> None:
    _, backend = play(ask(), LOOPS, GOOD, config=LadderConfig(shaped=False, temperatures=(0.5,)))
    assert backend.rungs == [(True, 0.0), (True, 0.5)]


@pytest.mark.parametrize(
    "said",
    [
        Said(" no no no no no no no"),
        Said(" " + "ab" * 200),
        Said(" good morning", capped=True),
        Said(" good morning", logprob=-1.1),
    ],
    ids=["repetition", "compression_ratio", "token_cap", "low_logprob"],
)
def test_what_is_not_credible_takes_another_rung(said: Said) -> None:
    answer, backend = play(ask(seconds=4.0), said, GOOD)
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert answer.text == "good morning everybody"


def test_a_file_with_words_missing_takes_another_rung() -> None:
    answer, backend = play(ask(seconds=4.0, priority=Priority.FILE), Said(" good", until_s=0.5), GOOD)
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert answer.text == "good morning everybody"


@pytest.mark.parametrize(
    ("text", "logprob", "asks_again"),
    [(" six", -1.1, True), (" six", -1.3, False), (" thank you", -1.1, False)],
    ids=["a short word", "nothing for sure", "what is made up over silence"],
)
def test_the_shaped_window_settles_silence_only_where_it_is_sure(text: str, logprob: float, asks_again: bool) -> None:
    silence = Said(text, logprob=logprob, no_speech=0.9)
    answer, backend = play(ask(), silence, *[Said(" six")] * asks_again)
    assert backend.rungs == [(False, 0.0), (True, 0.0)][: 1 + asks_again]
    assert (answer.text, answer.rejected) == (("six", "") if asks_again else ("", "no_speech"))


def test_the_full_window_settles_silence() -> None:
    answer, backend = play(ask(), Said(" six", logprob=-1.1, no_speech=0.9), EMPTY)
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert (answer.text, answer.rejected, answer.no_speech_probability) == ("", "no_speech", 0.95)


# --- the second look -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "logprob", "looks"),
    [
        (Priority.LIVE_PARTIAL, -0.9, False),
        (Priority.LIVE_FINAL, -0.45, False),
        (Priority.LIVE_FINAL, -0.6, True),
        (Priority.FILE, -0.45, False),
        (Priority.FILE, -0.6, True),
    ],
)
def test_an_unsure_text_is_compared_with_the_full_windows(priority: Priority, logprob: float, looks: bool) -> None:
    unsure, likelier = Said(" good warning", logprob=logprob), Said(" good morning", logprob=logprob + 0.1)
    answer, backend = play(ask(priority=priority), unsure, *[likelier] * looks)
    assert backend.rungs == [(False, 0.0), (True, 0.0)][: 1 + looks]
    assert (answer.text, answer.full_window) == (("good morning", True) if looks else ("good warning", False))


def test_a_live_final_takes_no_second_look_while_others_wait() -> None:
    for priority, looks in ((Priority.LIVE_FINAL, 1), (Priority.FILE, 2)):
        tokenizer = Words()
        backend = Scripted(tokenizer, lambda _: Said(" good warning", logprob=-0.9))
        ladder = Ladder(LadderConfig(), MULTILINGUAL, tokenizer.encode, tokenizer.decode)
        assert climb(ladder.steps(ask(priority=priority), has_time=lambda: False), backend).text == "good warning"
        assert len(backend.rungs) == looks


@pytest.mark.parametrize("worse", [Said(" good warning", logprob=-0.9), replace(LOOPS, logprob=-0.1)])
def test_the_second_look_may_confirm_the_first(worse: Said) -> None:
    answer, _ = play(ask(priority=Priority.FILE), Said(" good morning", logprob=-0.6), worse)
    assert (answer.text, answer.full_window) == ("good morning", False)


def test_an_unsure_text_of_the_full_window_needs_no_second_look() -> None:
    answer, backend = play(ask(priority=Priority.FILE), LOOPS, Said(" good morning", logprob=-0.9))
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert answer.text == "good morning"


# --- guards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "guard"),
    [
        (Said(""), "no_speech"),
        (Said(" good morning", logprob=-1.3, no_speech=0.7), "no_speech"),
        (Said(" no no no no no no no"), "repetition"),
        (Said(" " + "ab" * 200), "compression_ratio"),
        (Said(" good morning", logprob=-1.1, no_speech=0.4), "low_logprob"),
        (Said(" good morning", logprob=-1.6), "low_logprob"),
        (Said(" one two three four five six seven eight nine ten", logprob=-0.85), "too_fast"),
        (Said(" thank you", logprob=-0.85), "silence_phrase"),
        (Said(" thank you", no_speech=0.7), "silence_phrase"),
    ],
)
def test_a_guard_drops_the_text_and_is_named(said: Said, guard: str) -> None:
    answer, _ = play(ask(seconds=1.0, priority=Priority.LIVE_PARTIAL), said)
    assert (answer.text, answer.words, answer.rejected) == ("", (), guard)


@pytest.mark.parametrize(
    "said",
    [
        Said(" good morning", logprob=-1.1, no_speech=0.2),
        Said(" good morning", logprob=-0.9, no_speech=0.9),
        Said(" one two three four five six seven eight nine ten"),
        Said(" thank you"),
        Said(" good morning", capped=True),
    ],
)
def test_what_is_merely_odd_stands(said: Said) -> None:
    answer, _ = play(ask(seconds=1.0, priority=Priority.LIVE_PARTIAL), said)
    assert (answer.text, answer.rejected) == (said.text.strip(), "")


def test_little_speech_is_weak_ground_for_a_phrase_or_an_echo_of_the_prompt() -> None:
    options = DecodeOptions(language="en", prompt="Good morning everybody", hotwords=("Hark",))
    for speech_s, expected in ((0.4, "prompt_echo"), (0.6, "")):
        answer, _ = play(ask(seconds=2.0, speech_s=speech_s, options=options), Said(" good morning"))
        assert answer.rejected == expected
    answer, _ = play(ask(seconds=2.0, speech_s=0.4), Said(" thank you"))
    assert answer.rejected == "silence_phrase"


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_the_prompt_holds_context_language_and_task() -> None:
    options = DecodeOptions(language="de", task=Task.TRANSLATE, prompt="one two", hotwords=("three",))
    _, backend = play(ask(options=options, context="four", context_language="de"), GOOD)
    (step,) = backend.decodes
    one, two, three, four = (backend.tokenizer.encode(f" {word}")[0] for word in ("one", "two", "three", "four"))
    assert step.start == (START, GERMAN, TRANSLATE)
    assert step.prompt == (PREVIOUS, three, one, two, four, START, GERMAN, TRANSLATE, PLAIN)
    assert (step.prefix, step.cap) == ((), 70)


def test_context_in_another_language_is_left_out() -> None:
    _, backend = play(ask(context="guten Morgen", context_language="de"), GOOD)
    assert backend.decodes[0].prompt == (START, ENGLISH, TRANSCRIBE, PLAIN)


def test_what_was_said_before_helps_the_first_rung_only() -> None:
    options = DecodeOptions(language="en", prompt="one")
    _, backend = play(ask(options=options, context="two"), LOOPS, GOOD)
    assert [len(step.prompt) for step in backend.decodes] == [7, 6]


def test_a_text_that_only_repeats_what_was_said_before_is_asked_again_without_it() -> None:
    echo = Said(" good morning everybody")
    request = ask(context="And good morning everybody.")
    answer, backend = play(request, echo, Said(" nice weather today"))
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert answer.text == "nice weather today"
    answer, _ = play(request, echo, echo)
    assert answer.text == "good morning everybody", "without the context nobody can have led it astray"
    answer, _ = play(replace(request, priority=Priority.LIVE_PARTIAL), echo)
    assert answer.rejected == "context_echo"
    answer, _ = play(request, Said(" good morning"))
    assert answer.text == "good morning", "people do repeat a word or two"


def test_unshaped_a_context_costs_a_greedy_rung_of_its_own() -> None:
    config = LadderConfig(shaped=False, temperatures=(0.5,))
    _, backend = play(ask(context="two"), LOOPS, LOOPS, GOOD, config=config)
    assert backend.rungs == [(True, 0.0), (True, 0.0), (True, 0.5)]


# --- language --------------------------------------------------------------------------------------------------------


def test_the_language_is_detected_in_the_first_rungs_window() -> None:
    answer, backend = play(ask(options=DecodeOptions()), GOOD, shares=[("de", 0.8), ("en", 0.2)])
    assert backend.asked[0] == Detect(Window(0, 2 * SECOND, full=False))
    assert backend.decodes[0].window == backend.asked[0].window
    assert backend.decodes[0].start == (START, GERMAN, TRANSCRIBE)
    assert (answer.language, answer.language_probability) == ("de", 0.8)


@pytest.mark.parametrize("options", [DecodeOptions(language="de"), DecodeOptions(languages=("de",))])
def test_a_language_without_a_choice_is_not_detected(options: DecodeOptions) -> None:
    answer, backend = play(ask(options=options), GOOD)
    assert [type(step) for step in backend.asked] == [Decode]
    assert (answer.language, answer.language_probability) == ("de", 1.0)


def test_an_unsure_detection_yields_to_the_hint_and_never_leaves_the_allowed() -> None:
    shares = [("de", 0.4), ("ja", 0.3), ("en", 0.3)]
    answer, _ = play(ask(options=DecodeOptions(language_hint="en")), GOOD, shares=shares)
    assert (answer.language, answer.language_probability) == ("en", 0.3)
    answer, _ = play(ask(options=DecodeOptions(languages=("en", "ja"))), GOOD, shares=shares)
    assert answer.language in ("en", "ja")


def test_english_only_models_are_asked_for_nothing_else() -> None:
    special = replace(MULTILINGUAL, languages={})
    answer, backend = play(ask(options=DecodeOptions(language="de", task=Task.TRANSLATE)), GOOD, special=special)
    assert backend.decodes[0].prompt == (START, PLAIN)
    assert answer.language == "en"


@pytest.mark.parametrize("options", [DecodeOptions(language="xx"), DecodeOptions(languages=("xx", "yy"))])
def test_a_language_that_the_model_does_not_know_is_refused(options: DecodeOptions) -> None:
    with pytest.raises(ValueError, match="xx"):
        play(ask(options=options))


@pytest.mark.parametrize("samples", [0, 480_001])
def test_audio_that_fits_no_window_is_refused_before_anything_is_asked(samples: int) -> None:
    with pytest.raises(ValueError, match="audio must hold"):
        play(replace(ask(), audio=np.zeros(samples, np.int16)))


# --- what was committed ----------------------------------------------------------------------------------------------


def test_a_text_that_begins_with_what_was_committed_is_not_forced() -> None:
    answer, backend = play(ask(committed="Good, morning"), GOOD)
    assert [step.prefix for step in backend.decodes] == [()]
    assert answer.text == "good morning everybody"


@pytest.mark.parametrize("priority", [Priority.LIVE_PARTIAL, Priority.LIVE_FINAL])
def test_another_text_is_decoded_again_with_the_committed_words_forced(priority: Priority) -> None:
    answer, backend = play(ask(priority=priority, committed="good evening"), GOOD, Said(" everybody"))
    free, forced = backend.decodes
    assert (free.window, free.temperature) == (forced.window, forced.temperature)
    assert forced.prefix == tuple(backend.tokenizer.encode(" good evening"))
    assert forced.prompt == (*free.prompt, *forced.prefix)
    assert answer.text == "good evening everybody"
    assert answer.words[2].start_sample == pytest.approx(2 * SECOND * 2 / 3, abs=320)


def test_a_final_keeps_what_was_committed_when_nothing_after_it_is_credible() -> None:
    answer, backend = play(ask(committed="good evening"), EMPTY, replace(EMPTY, logprob=-1.5))
    tokens = tuple(backend.tokenizer.encode(" good evening"))
    assert backend.asked[-1] == Align(Window(0, 2 * SECOND, full=False), (START, ENGLISH, TRANSCRIBE), tokens)
    assert (answer.text, answer.rejected) == ("good evening", "")


def test_a_partial_that_is_not_credible_says_nothing() -> None:
    answer, backend = play(ask(priority=Priority.LIVE_PARTIAL, committed="good evening"), EMPTY, EMPTY)
    assert not any(isinstance(step, Align) for step in backend.asked)
    assert (answer.text, answer.rejected) == ("", "no_speech")


def test_scripts_without_spaces_are_forced_without_one() -> None:
    options = DecodeOptions(language="ja")
    answer, backend = play(ask(committed="今日", options=options), Said("明日は"), Said("は"))
    assert backend.decodes[1].prefix == tuple(backend.tokenizer.encode("今日"))
    assert answer.text == "今日は"


# --- gaps ------------------------------------------------------------------------------------------------------------


def by_window(**said: Said) -> Callable[[Decode], Said]:
    """Answers by where the window begins, in whole seconds: ``at_0``, ``at_1``, ..."""
    return lambda step: said[f"at_{step.window.begin_sample // SECOND}"]


EARLY = Said(" one two", until_s=1.0)


@pytest.mark.parametrize(("priority", "whole"), [(Priority.FILE, [False, True]), (Priority.LIVE_FINAL, [False])])
def test_speech_without_words_is_decoded_by_itself_and_its_words_join_the_others(
    priority: Priority, whole: list[bool]
) -> None:
    """Nobody who waits for a live final is made to wait for the full window first."""
    request = ask(seconds=6.0, committed="one", priority=priority)
    answer, backend = play(request, by=by_window(at_0=EARLY, at_1=Said(" three four five")))
    gap = Window(SECOND, 6 * SECOND, full=False)
    assert [step.window for step in backend.decodes] == [Window(0, 6 * SECOND, full) for full in whole] + [gap]
    assert answer.text == "one two three four five"
    assert all(SECOND <= word.start_sample <= word.end_sample <= 6 * SECOND for word in answer.words[2:])
    edges = [edge for word in answer.words for edge in (word.start_sample, word.end_sample)]
    assert edges == sorted(edges)


def test_a_gap_goes_down_a_ladder_of_its_own_without_what_was_said_before() -> None:
    script = iter([EARLY, EARLY, LOOPS, LOOPS, Said(" three four five")])
    answer, backend = play(ask(seconds=6.0, context="zero", priority=Priority.FILE), by=lambda _: next(script))
    assert backend.rungs == [(False, 0.0), (True, 0.0), (False, 0.0), (True, 0.0), (True, 0.2)]
    assert [PREVIOUS in step.prompt for step in backend.decodes] == [True, False, False, False, False]
    assert answer.text == "one two three four five"


def test_a_gap_of_a_live_final_is_decoded_once() -> None:
    answer, backend = play(ask(seconds=6.0), by=by_window(at_0=EARLY, at_1=LOOPS))
    assert backend.rungs == [(False, 0.0), (False, 0.0)]
    assert answer.text == "one two"


@pytest.mark.parametrize(
    "found",
    [Said(" three four", logprob=-1.1), Said(" thank you"), EMPTY, LOOPS],
    ids=["doubtful", "made up", "silence", "rejected"],
)
def test_what_is_not_sure_fills_no_gap(found: Said) -> None:
    answer, _ = play(ask(seconds=6.0), by=by_window(at_0=EARLY, at_1=found))
    assert answer.text == "one two"


def test_no_more_than_three_gaps_are_filled() -> None:
    answer, backend = play(
        ask(seconds=28.0), by=lambda step: Said(" one" if step.window.begin_sample == 0 else " more", until_s=0.5)
    )
    assert len({step.window.begin_sample for step in backend.decodes}) == 4
    assert answer.text == "one more more more"


def test_a_partial_fills_no_gap_and_little_speech_leaves_none() -> None:
    for request in (ask(seconds=6.0, priority=Priority.LIVE_PARTIAL), ask(seconds=6.0, speech_s=2.5)):
        answer, backend = play(request, EARLY)
        assert backend.rungs == [(False, 0.0)]
        assert answer.text == "one two"


def test_an_empty_text_is_no_gap_in_one() -> None:
    answer, backend = play(ask(seconds=6.0), Said(""), Said(""))
    assert backend.rungs == [(False, 0.0), (True, 0.0)]
    assert answer.rejected == "no_speech"


def test_words_found_before_what_was_committed_are_not_taken() -> None:
    late = Said(" one two")

    def hears(step: Decode) -> Said:
        return Said(" zero zero") if step.window.samples < 6 * SECOND else late

    class Late(Scripted):
        def decode(self, step: Decode) -> Decoded:
            decoded = super().decode(step)
            if step.window.samples < 6 * SECOND:
                return decoded
            return replace(decoded, timing=Timing([250, 275, 300], [0.9, 0.9]))

    tokenizer = Words()
    backend = Late(tokenizer, hears)
    ladder = Ladder(LadderConfig(), MULTILINGUAL, tokenizer.encode, tokenizer.decode)
    assert climb(ladder.steps(ask(seconds=6.0)), backend).text == "zero zero one two"
    assert climb(ladder.steps(ask(seconds=6.0, committed="one two")), backend).text == "one two"


# --- drivers ---------------------------------------------------------------------------------------------------------


@dataclass
class Awaited:
    """A backend that is awaited, over one that is not."""

    inner: Scripted

    async def detect(self, step: Detect) -> LanguageShares:
        return self.inner.detect(step)

    async def decode(self, step: Decode) -> Decoded:
        return self.inner.decode(step)

    async def align(self, step: Align) -> Timing:
        return self.inner.align(step)


async def test_both_drivers_ask_and_answer_alike() -> None:
    request = ask(options=DecodeOptions(), committed="good evening")
    answer, backend = play(request, EMPTY, EMPTY)
    assert {type(step) for step in backend.asked} == {Detect, Decode, Align}
    tokenizer = Words()
    awaited = Awaited(Scripted(tokenizer, iter([EMPTY, EMPTY])))
    ladder = Ladder(LadderConfig(), MULTILINGUAL, tokenizer.encode, tokenizer.decode)
    assert await climb_async(ladder.steps(request), awaited) == answer
    assert awaited.inner.asked == backend.asked


@pytest.mark.parametrize("wrong", [{"temperatures": (0.0,)}, {"temperatures": (0.5, 1.5)}, {"language_threshold": 2.0}])
def test_a_config_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LadderConfig(**wrong)  # type: ignore[arg-type]
