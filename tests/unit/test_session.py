"""The properties of docs/architecture.md, over any speech, any cut of the audio and any order of the answers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.audio import SAMPLE_RATE, ms_to_samples
from streaming.config import AudioFormat, EndpointerConfig, PartialConfig, SegmenterConfig, SessionConfig
from streaming.errors import BadAudio, BadMessage
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.session import Session
from streaming.stabilizer import normalize
from streaming.types import DecodeRequest, Float32, Hypothesis, Priority, Word
from tests.support.speech import Driver, LevelDetector, pcm_bytes, read_words, recognize, silence, speech

CONFIG = SessionConfig(
    endpointer=EndpointerConfig(pause_ms=400),
    segmenter=SegmenterConfig(max_utterance_ms=4_000, cut_zone_ms=1_500),
    partials=PartialConfig(interval_ms=300, hold_back_ms=300),
)


def make_driver(config: SessionConfig = CONFIG, **kwargs: object) -> Driver:
    return Driver(Session(config, [LevelDetector() for _ in range(config.audio.channels)]), **kwargs)  # type: ignore[arg-type]


def make_scene(lead_ms: int, utterances: list[tuple[list[int], int, int]]) -> Float32:
    """Utterances of a few to many words, with pauses of any length around the configured one."""
    parts = [silence(lead_ms)]
    for words, word_ms, pause_ms in utterances:
        parts += [speech(words, word_ms), silence(pause_ms)]
    return np.concatenate(parts)


def scenes() -> st.SearchStrategy[Float32]:
    words = st.lists(st.integers(0, 80), min_size=1, max_size=24)
    utterance = st.tuples(words, st.integers(160, 400), st.integers(40, 1500))
    return st.builds(make_scene, st.integers(0, 900), st.lists(utterance, max_size=4))


def play(driver: Driver, data: bytes, cuts: list[int], choices: list[int]) -> Driver:
    """Feed the bytes cut as told; after each piece answer some of the waiting requests, in any order."""
    position = step = 0
    while position < len(data):
        size = cuts[step % len(cuts)]
        driver.take(driver.session.receive_audio(data[position : position + size]))
        position += size
        for _ in range(choices[step % len(choices)] % 3):
            if driver.waiting:
                driver.answer(choices[step % len(choices)] % len(driver.waiting))
        step += 1
    driver.take(driver.session.receive_eof())
    driver.answer_all()
    return driver


CUTS = st.lists(st.integers(1_501, 60_000), min_size=1, max_size=8)  # smaller ones have a test of their own
CHOICES = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(scenes(), CUTS, CHOICES)
def test_events_and_finals_do_not_depend_on_the_cut(scene: Float32, cuts: list[int], choices: list[int]) -> None:
    data = pcm_bytes(scene)
    whole = play(make_driver(), data, [len(data) or 1], [0])
    pieces = play(make_driver(), data, cuts, choices)
    assert pieces.settled() == whole.settled()
    assert pieces.final_questions() == whole.final_questions()


@pytest.mark.parametrize("piece", [1, 2, 3, 640, 1023])
def test_small_messages_give_what_one_large_message_gives(piece: int) -> None:
    data = pcm_bytes(np.concatenate((silence(100), speech([1, 2, 3], 160), silence(450), speech([4, 5], 160))))
    whole = play(make_driver(), data, [len(data)], [0])
    assert [final.text for final in whole.of_type(FinalTranscript)] == ["w1 w2 w3", "w4 w5"]
    assert play(make_driver(), data, [piece], [1]).settled() == whole.settled()


@given(scenes(), CUTS, CHOICES, st.integers(0, 6))
def test_every_utterance_is_started_stopped_and_settled_once_and_in_order(
    scene: Float32, cuts: list[int], choices: list[int], failing: int
) -> None:
    driver = make_driver(fails=lambda request: request.request_id % 7 == failing)
    play(driver, pcm_bytes(scene), cuts, choices)
    started = [e.utterance_id for e in driver.of_type(SpeechStarted)]
    assert started == [e.utterance_id for e in driver.of_type(SpeechStopped)]
    settled = [o.utterance_id for o in driver.outputs if isinstance(o, FinalTranscript | TranscriptFailed)]
    assert settled == started == sorted(set(started))
    assert isinstance(driver.outputs[-1], SessionDone)
    assert len(driver.of_type(SessionDone)) == 1
    order = [(type(o).__name__, o.utterance_id) for o in driver.outputs if not isinstance(o, SessionDone)]
    for utterance in started:
        mine = [kind for kind, number in order if number == utterance]
        assert mine[0] == "SpeechStarted"
        assert mine[-1] in ("FinalTranscript", "TranscriptFailed")
        assert mine.index("SpeechStopped") < len(mine) - 1


@given(scenes(), CUTS, CHOICES, st.integers(0, 2**32))
def test_committed_text_only_grows_and_the_final_keeps_it(
    scene: Float32, cuts: list[int], choices: list[int], seed: int
) -> None:
    """Even with a recognizer that changes its mind about a third of the words each time."""
    rng = np.random.default_rng(seed)

    def fickle(request: DecodeRequest) -> Hypothesis:
        hypothesis = recognize(request)
        words = tuple(
            Word(" other" if rng.random() < 0.3 else w.text, w.start_sample, w.end_sample, w.probability)
            for w in hypothesis.words
        )
        return Hypothesis(request.request_id, "".join(w.text for w in words).strip(), words)

    driver = play(make_driver(recognize=fickle), pcm_bytes(scene), cuts, choices)
    committed: dict[int, str] = {}
    for output in driver.outputs:
        if isinstance(output, PartialTranscript):
            assert output.committed.startswith(committed.get(output.utterance_id, ""))
            committed[output.utterance_id] = output.committed
        if isinstance(output, FinalTranscript):
            promised = [normalize(w) for w in committed.get(output.utterance_id, "").split()]
            assert [normalize(w) for w in output.text.split()][: len(promised)] == promised


@given(scenes(), CUTS, CHOICES)
def test_positions_lie_within_what_was_received_and_rise(scene: Float32, cuts: list[int], choices: list[int]) -> None:
    driver = play(make_driver(), pcm_bytes(scene), cuts, choices)
    received = driver.session.received_samples
    assert received == scene.size
    last_end = 0
    for final in driver.of_type(FinalTranscript):
        assert last_end <= final.start_sample <= final.end_sample <= received
        last_end = final.end_sample
        starts = [word.start_sample for word in final.words]
        assert starts == sorted(starts)
        assert all(0 <= w.start_sample <= w.end_sample <= received for w in final.words)
    for partial in driver.of_type(PartialTranscript):
        assert 0 <= partial.start_sample <= partial.end_sample <= received


@given(scenes(), CUTS, CHOICES)
def test_every_speech_sample_is_decoded_in_exactly_one_utterance(
    scene: Float32, cuts: list[int], choices: list[int]
) -> None:
    driver = play(make_driver(), pcm_bytes(scene), cuts, choices)
    finals = {r.utterance_id: r for r in driver.requests if r.priority == 0}  # the last one asked is the final
    covered: Counter[int] = Counter()
    for final in driver.of_type(FinalTranscript):
        request = finals[final.utterance_id]
        assert request.start_sample <= final.start_sample
        assert request.start_sample + request.audio.size >= final.end_sample
        covered.update(range(final.start_sample, final.end_sample, 512))
    padded = np.pad(scene, (0, -scene.size % 512)).reshape(-1, 512)
    loud = LevelDetector().probabilities(padded) >= 0.5 if padded.size else np.zeros(0, bool)
    runs = np.flatnonzero(np.diff(np.concatenate(([0], loud.astype(int), [0])))).reshape(-1, 2)
    long_enough = -(-CONFIG.endpointer.min_speech_ms // 32)
    for start, end in runs:
        if end - start >= long_enough:
            assert all(covered[int(window) * 512] == 1 for window in range(start, end))


@given(scenes(), CUTS, CHOICES)
def test_no_word_is_lost_or_doubled_by_forced_cuts(scene: Float32, cuts: list[int], choices: list[int]) -> None:
    driver = play(make_driver(), pcm_bytes(scene), cuts, choices)
    said = [w.text.strip() for w in read_words((scene * 32768).astype(np.int16))]
    heard = " ".join(final.text for final in driver.of_type(FinalTranscript)).split()
    assert heard == said


@given(scenes(), st.integers(100, 5_000))
def test_memory_is_bounded_by_the_longest_utterance(scene: Float32, piece: int) -> None:
    driver = make_driver()
    limit = ms_to_samples(CONFIG.segmenter.max_utterance_ms + CONFIG.segmenter.pre_roll_ms + 200)
    data = pcm_bytes(np.concatenate((scene, speech([1] * 60), scene)))
    for position in range(0, len(data), piece):
        driver.take(driver.session.receive_audio(data[position : position + piece]))
        assert driver.session.retained_samples <= limit
        assert all(request.audio.size <= limit for request in driver.waiting)
        if len(driver.waiting) > 2:
            driver.answer()


def test_late_repeated_and_unknown_answers_change_nothing() -> None:
    driver = make_driver()
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([1, 2, 3]), silence(200))))))
    requests = list(driver.requests)
    driver.answer_all()
    seen = len(driver.outputs)
    for request in requests:
        driver.take(driver.session.receive_hypothesis(recognize(request)))
    driver.take(driver.session.receive_hypothesis(Hypothesis(999, "never asked")))
    driver.take(driver.session.receive_failure(999, BadAudio("never asked")))
    assert len(driver.outputs) == seen


def test_after_eof_only_finals_are_asked() -> None:
    driver = make_driver()
    driver.take(driver.session.receive_audio(pcm_bytes(speech([1, 2, 3, 4]))))
    before = len(driver.requests)
    driver.take(driver.session.receive_eof())
    assert [r.priority for r in driver.requests[before:]] == [0]
    assert driver.session.receive_eof() == []
    with pytest.raises(BadMessage, match="after the end"):
        driver.session.receive_audio(b"\0\0")
    with pytest.raises(BadMessage):
        driver.session.receive_commit()


def test_the_final_is_asked_when_the_pause_begins_and_said_when_it_ends() -> None:
    driver = make_driver()
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([7, 8]), silence(350))))))
    driver.answer_all()
    asked = len(driver.requests)
    assert driver.of_type(FinalTranscript) == []
    driver.take(driver.session.receive_audio(pcm_bytes(silence(150))))
    assert len(driver.requests) == asked, "the early final serves as the final"
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w7 w8"]


@pytest.mark.parametrize("piece_ms", [20, 100, 2_000])
@pytest.mark.parametrize(("logprob", "lengths_ms"), [(-0.4, [128]), (-0.6, [128, 320])])
def test_an_early_final_that_is_unsure_is_asked_again_with_more_of_the_pause(
    piece_ms: int, logprob: float, lengths_ms: list[int]
) -> None:
    """However the audio was cut, and even where the pause was over before anybody could ask early."""

    def unsure(request: DecodeRequest) -> Hypothesis:
        return replace(recognize(request), average_logprob=logprob)

    driver = make_driver(replace(CONFIG, partials=PartialConfig(enabled=False)), recognize=unsure)
    data, piece = pcm_bytes(np.concatenate((speech([7, 8], 160), silence(900)))), 2 * ms_to_samples(piece_ms)
    for start in range(0, len(data), piece):
        driver.take(driver.session.receive_audio(data[start : start + piece]))
        driver.answer_all()
    ends = [request.start_sample + request.audio.size for request in driver.requests]
    assert [end - ends[0] for end in ends] == [ms_to_samples(length_ms - 128) for length_ms in lengths_ms]
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w7 w8"]


def test_without_partials_an_early_final_that_was_too_early_shows_nothing() -> None:
    config = replace(CONFIG, partials=PartialConfig(enabled=False))
    driver = make_driver(config)
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([7, 8]), silence(350))))))
    assert [request.priority for request in driver.waiting] == [Priority.LIVE_FINAL]
    driver.answer()
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([9]), silence(600))))))
    driver.answer_all()
    assert driver.of_type(PartialTranscript) == []
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w7 w8 w9"]


def test_an_early_final_is_a_partial_when_speech_resumes() -> None:
    driver = make_driver()
    scene = np.concatenate((speech([7, 8]), silence(350)))
    driver.take(driver.session.receive_audio(pcm_bytes(scene)))
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([9]), silence(600))))))
    driver.answer_all()
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w7 w8 w9"]


def test_commit_ends_the_utterance_at_once() -> None:
    driver = make_driver()
    driver.take(driver.session.receive_audio(pcm_bytes(speech([1, 2]))))
    driver.take(driver.session.receive_commit())
    driver.answer_all()
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w1 w2"]
    assert driver.session.receive_commit() == []
    driver.take(driver.session.receive_audio(pcm_bytes(speech([3, 4]))))
    driver.take(driver.session.receive_eof())
    driver.answer_all()
    assert [final.text for final in driver.of_type(FinalTranscript)] == ["w1 w2", "w3 w4"]


@pytest.mark.parametrize("extra_samples", [0, 1, 300, 511])
def test_nothing_is_made_up_of_what_a_commit_leaves_of_a_window(extra_samples: int) -> None:
    driver = make_driver()
    said = speech([1, 2], word_ms=320)[: 10 * 512 + extra_samples]
    driver.take(driver.session.receive_audio(pcm_bytes(said)))
    driver.take(driver.session.receive_commit())
    driver.take(driver.session.receive_eof())
    driver.answer_all()
    assert len(driver.of_type(FinalTranscript)) == 1


def test_a_failing_engine_is_not_asked_in_a_loop_and_the_failure_is_reported_once() -> None:
    driver = make_driver(fails=lambda request: True)
    driver.take(driver.session.receive_audio(pcm_bytes(np.concatenate((speech([1, 2, 3]), silence(300))))))
    driver.answer_all()
    assert len(driver.requests) <= 2
    driver.take(driver.session.receive_audio(pcm_bytes(silence(300))))
    driver.answer_all()
    assert len(driver.of_type(TranscriptFailed)) == 1
    assert len(driver.requests) <= 3


def test_a_gap_keeps_the_clock_true() -> None:
    driver = make_driver()
    driver.take(driver.session.receive_gap(3 * SAMPLE_RATE))
    driver.take(driver.session.receive_audio(pcm_bytes(speech([5, 6]))))
    driver.take(driver.session.receive_eof())
    driver.answer_all()
    assert driver.of_type(SpeechStarted)[0].at_sample == pytest.approx(3 * SAMPLE_RATE, abs=512)


def test_two_channels_are_two_speakers_with_one_clock() -> None:
    left = np.concatenate((speech([1, 2]), silence(1500), speech([3])))
    right = np.concatenate((silence(700), speech([11, 12])))
    size = max(left.size, right.size) + SAMPLE_RATE
    stereo = np.stack([np.pad(c, (0, size - c.size)) for c in (left, right)], axis=1)
    config = SessionConfig(audio=AudioFormat(channels=2), endpointer=CONFIG.endpointer)
    driver = play(make_driver(config), pcm_bytes(stereo.reshape(-1)), [3_333], [1])
    finals = {(final.channel, final.text) for final in driver.of_type(FinalTranscript)}
    assert finals == {(0, "w1 w2"), (0, "w3"), (1, "w11 w12")}
    starts = {e.channel: e.at_sample for e in driver.of_type(SpeechStarted)}
    assert starts[1] == pytest.approx(ms_to_samples(700), abs=512)


def test_int16_sent_as_float32_is_refused() -> None:
    from streaming.config import Encoding

    config = SessionConfig(audio=AudioFormat(Encoding.FLOAT32))
    noise = np.random.default_rng(0).integers(-20_000, 20_000, 16_000).astype(np.int16)
    with pytest.raises(BadAudio, match="linear16"):
        make_driver(config).session.receive_audio(noise.tobytes())
