"""Cues: nothing lost, nothing overlapping, lines short enough to read, both file formats by their rules."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wire.subtitles import Cue, CueLimits, columns, cues, to_srt, to_vtt
from streaming.audio import SAMPLE_RATE
from streaming.events import FinalTranscript
from streaming.types import Word

LIMITS = CueLimits()


def final(
    words: list[tuple[str, float, float]], *, text: str | None = None, start_s: float = 0.0, end_s: float = 0.0
) -> FinalTranscript:
    made = tuple(Word(t, round(a * SAMPLE_RATE), round(b * SAMPLE_RATE), 0.9) for t, a, b in words)
    return FinalTranscript(
        utterance_id=1,
        channel=0,
        text="".join(t for t, _, _ in words).strip() if text is None else text,
        words=made,
        language="en",
        language_probability=1.0,
        confidence=0.9,
        start_sample=made[0].start_sample if made else round(start_s * SAMPLE_RATE),
        end_sample=made[-1].end_sample if made else round(end_s * SAMPLE_RATE),
    )


def evenly(text: str, word_s: float = 0.3, start_s: float = 0.0) -> FinalTranscript:
    parts = text.split()
    return final([(" " + p, start_s + i * word_s, start_s + (i + 1) * word_s) for i, p in enumerate(parts)])


def test_a_short_utterance_is_one_cue_with_its_own_times() -> None:
    assert cues([evenly("Hello there, world.", start_s=2.0)]) == [Cue(2.0, 2.9, "Hello there, world.")]


def test_srt_has_numbers_commas_and_hours() -> None:
    text = to_srt([Cue(0.0, 1.0005, "One"), Cue(3661.9996, 3663.25, "Two\nlines")])
    assert text == ("1\n00:00:00,000 --> 00:00:01,000\nOne\n\n2\n01:01:02,000 --> 01:01:03,250\nTwo\nlines\n"), (
        "milliseconds carry over into seconds, hours are counted"
    )


def test_vtt_has_a_header_dots_and_escapes() -> None:
    text = to_vtt([Cue(359_999.5, 360_000.0, "a < b --> c & d")])
    assert text == "WEBVTT\n\n99:59:59.500 --> 100:00:00.000\na &lt; b --&gt; c &amp; d\n"


def test_an_arrow_in_the_text_cannot_pass_for_a_time_line_in_srt() -> None:
    assert to_srt([Cue(0, 1, "x --> y")]).count("-->") == 1


def test_nothing_said_is_an_empty_file_and_not_a_broken_one() -> None:
    silent = final([], text="", end_s=3.0)
    assert cues([silent]) == []
    assert to_srt([]) == ""
    assert to_vtt([]).startswith("WEBVTT\n")


def test_a_long_utterance_is_cut_at_the_end_of_a_sentence() -> None:
    text = (
        "The first sentence is long enough to fill a line. The second one does not fit into the same subtitle any more."
    )
    texts = [cue.text.replace("\n", " ") for cue in cues([evenly(text)])]
    assert texts[0] == "The first sentence is long enough to fill a line."


def test_a_long_pause_between_words_ends_the_cue() -> None:
    made = cues([final([(" Wait", 0.0, 0.4), (" for", 0.4, 0.6), (" it.", 4.0, 4.4)])])
    assert [cue.text for cue in made] == ["Wait for", "it."]
    assert made[0].end_s < 1.0


def test_punctuation_stays_with_its_word_and_unspaced_scripts_are_wrapped() -> None:
    characters = "今日はとても良い天気ですね。" * 4
    made = cues([final([(c, i * 0.2, (i + 1) * 0.2) for i, c in enumerate(characters)])])
    lines = [line for cue in made for line in cue.text.split("\n")]
    assert "".join(lines) == characters
    assert all(columns(line) <= LIMITS.line_columns for line in lines)
    assert not any(line.startswith("。") for line in lines)


def test_apostrophes_and_subwords_without_a_space_are_not_torn() -> None:
    made = cues([final([(" do", 0, 0.2), ("n't", 0.2, 0.3), (" go", 0.3, 0.6)])])
    assert [cue.text for cue in made] == ["don't go"]


@pytest.mark.parametrize("text", ["word " * 60, "字" * 200])
def test_a_text_without_word_times_is_spread_over_its_utterance(text: str) -> None:
    made = cues([final([], text=text.strip(), start_s=10.0, end_s=40.0)])
    assert len(made) > 2
    assert made[0].start_s == 10.0
    assert made[-1].end_s == pytest.approx(40.0, abs=0.9)
    assert re.sub(r"\s", "", "".join(cue.text for cue in made)) == re.sub(r"\s", "", text)


words_strategy = st.lists(
    st.tuples(
        st.text(alphabet="abcdefgh.,!?'-é字語。", min_size=1, max_size=14),
        st.booleans(),
        st.floats(0.0, 2.0),
        st.floats(0.0, 1.5),
    ),
    min_size=1,
    max_size=80,
)


@given(words_strategy, st.floats(0, 7200))
def test_cues_hold_every_word_once_in_order_and_never_overlap(
    raw: list[tuple[str, bool, float, float]], start_s: float
) -> None:
    words, at = [], start_s
    for text, spaced, gap_s, length_s in raw:
        words.append(((" " if spaced else "") + text, at + gap_s, at + gap_s + length_s))
        at += gap_s + length_s
    made = cues([final(words)])
    assert re.sub(r"\s", "", "".join(c.text for c in made)) == re.sub(r"\s", "", "".join(t for t, _, _ in words))
    for cue, following in itertools.pairwise(made):
        assert cue.end_s <= max(following.start_s, cue.start_s + 0.0011)
    for cue in made:
        assert cue.end_s > cue.start_s
        assert cue.text.strip()
        lines = cue.text.split("\n")
        assert len(lines) <= 2
        pieces = cue.text.split()
        if max(map(columns, pieces)) <= LIMITS.line_columns // 2 and len(pieces) > 3:
            assert max(map(columns, lines)) <= LIMITS.line_columns


@given(st.lists(st.floats(0.2, 0.6), min_size=5, max_size=60))
def test_a_cue_of_ordinary_words_stays_no_longer_than_the_limit(lengths: list[float]) -> None:
    words, at = [], 0.0
    for length_s in lengths:
        words.append((" word", at, at + length_s))
        at += length_s
    for cue in cues([final(words)]):
        assert cue.end_s - cue.start_s <= LIMITS.max_duration_s + 1e-6
