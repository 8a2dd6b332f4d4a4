"""What is remembered of earlier utterances, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.audio import SAMPLE_RATE
from streaming.config import ContextConfig
from streaming.context import Context
from streaming.errors import RecognizerFailed
from streaming.events import FinalTranscript, TranscriptFailed


def final(text: str, start_s: float, *, confidence: float = 0.9, language: str = "en") -> FinalTranscript:
    start = int(start_s * SAMPLE_RATE)
    return FinalTranscript(0, 0, text, (), language, 1.0, confidence, start, start + SAMPLE_RATE)


def at(seconds: float) -> int:
    return int(seconds * SAMPLE_RATE)


def test_the_newest_finals_are_the_context_of_the_next_utterance() -> None:
    context = Context(ContextConfig())
    assert context.before(0) == ""
    context.add(final("First words.", 0))
    context.add(final("Second words.", 2))
    assert context.before(at(4)) == "First words. Second words."
    assert context.language == "en"


def test_a_long_silence_an_unsure_text_and_a_failure_end_it() -> None:
    for spoil in (
        final("mumble", 3, confidence=0.2),
        TranscriptFailed(1, 0, at(3), at(4), RecognizerFailed("it died")),
    ):
        context = Context(ContextConfig())
        context.add(final("Sure words.", 0))
        context.add(spoil)
        assert context.before(at(5)) == ""
    context = Context(ContextConfig(max_gap_ms=5_000))
    context.add(final("Old words.", 0))
    assert context.before(at(5.9)) == "Old words."
    assert context.before(at(6.1)) == ""


def test_an_utterance_without_words_changes_nothing_and_a_new_language_starts_anew() -> None:
    context = Context(ContextConfig())
    context.add(final("Some words.", 0))
    context.add(final("", 2))
    assert context.before(at(4)) == "Some words."
    context.add(final("Andere Worte.", 4, language="de"))
    assert (context.before(at(6)), context.language) == ("Andere Worte.", "de")


def test_it_can_be_switched_off() -> None:
    context = Context(ContextConfig(enabled=False))
    context.add(final("Some words.", 0))
    assert context.before(at(2)) == ""


@given(st.lists(st.text(alphabet="ab ", min_size=1, max_size=60), max_size=12), st.integers(0, 100))
def test_it_never_grows_beyond_its_limit_and_is_a_tail_of_what_was_said(texts: list[str], limit: int) -> None:
    context = Context(ContextConfig(max_chars=limit))
    for number, text in enumerate(texts):
        context.add(final(text.strip(), number * 2))
    kept = context.before(at(2 * len(texts)))
    assert len(kept) <= limit
    assert "".join(texts).replace(" ", "").endswith(kept.replace(" ", ""))
