"""bench.replay: the tracks that it plays, what it makes of events, the player, and all of it against a service."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import replay
from bench.corpus import Recording, SpeechMissing, recordings
from bench.measures import (
    Measures,
    Received,
    ShownWord,
    final_of,
    measure,
    percentile,
    plain_words,
    retractions,
    shown_words,
    update_gaps,
)
from bench.player import Played, PlayFailed, play
from bench.replay import holds, search
from bench.scoring import Score
from bench.tracks import ROOM_NOISE_LSB, Spoken, Track, build_track, deal, speech_bounds
from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16

# Tracks --------------------------------------------------------------------------------------------------------------


def tone(seconds: float, level: int = 8_000) -> Pcm16:
    """Loud enough in every frame to be speech."""
    wave: Pcm16 = (level * np.sin(np.arange(round(seconds * SAMPLE_RATE)) * 0.3)).astype(np.int16)
    return wave


def quiet(seconds: float, level: float = 5.0) -> Pcm16:
    return np.random.default_rng(3).normal(0, level, round(seconds * SAMPLE_RATE)).astype(np.int16)


def tones(seconds: float = 1.0) -> Any:
    return (Recording(f"tone {n}", tone(seconds), "la la", "en") for n in itertools.count())


def test_speech_bounds_leave_out_the_silence_around() -> None:
    audio = np.concatenate([quiet(0.5), tone(1.0), quiet(0.3), tone(0.7), quiet(0.8)])
    start, end = speech_bounds(audio)
    assert abs(start - 0.5 * SAMPLE_RATE) <= 160
    assert abs(end - 2.5 * SAMPLE_RATE) <= 160


def test_a_click_after_the_speech_is_not_its_end() -> None:
    audio = np.concatenate([tone(1.0), quiet(0.5), tone(0.01), quiet(0.5)])
    assert abs(speech_bounds(audio)[1] - SAMPLE_RATE) <= 160


@pytest.mark.parametrize("audio", [np.zeros(16_000, np.int16), tone(0.005), np.zeros(0, np.int16)])
def test_a_recording_without_sound_has_no_bounds(audio: Pcm16) -> None:
    with pytest.raises(ValueError, match="no sound"):
        speech_bounds(audio)


@settings(deadline=None)  # machines may be busy
@given(seconds=st.floats(0.5, 20), seed=st.integers(0, 1_000), length_s=st.floats(0.2, 4))
def test_a_track_says_its_recordings_with_pauses_between_and_after(seconds: float, seed: int, length_s: float) -> None:
    track = build_track(tones(length_s), seconds, seed)
    assert track.duration_s >= seconds
    starts = [spoken.start_sample for spoken in track.utterances]
    ends = [spoken.end_sample for spoken in track.utterances]
    for end, next_start in zip(ends, [*starts[1:], track.audio.size], strict=True):
        assert 1.15 * SAMPLE_RATE <= next_start - end <= 2.7 * SAMPLE_RATE
        pause = track.audio[end + 320 : next_start - 320].astype(float)
        assert 0.8 * ROOM_NOISE_LSB < np.sqrt(np.mean(pause**2)) < 1.2 * ROOM_NOISE_LSB  # neither digital zero nor loud
    assert track.speech_s == pytest.approx(len(track.utterances) * length_s, abs=0.03 * len(track.utterances))


def test_streams_get_different_recordings_and_the_same_ones_however_many_there_are() -> None:
    four, two = deal(tones(), 4, 6.0, seed=5), deal(tones(), 2, 6.0, seed=5)
    said = [{spoken.recording for spoken in track.utterances} for track in four]
    assert sum(map(len, said)) == len(set.union(*said))
    assert len({track.utterances[0].start_sample for track in four}) > 1  # they do not speak in step
    for one, other in zip(two, four, strict=False):
        assert one.utterances == other.utterances
        assert np.array_equal(one.audio, other.audio)


def test_nothing_to_play_is_said_and_ends_with_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("HARK_CORPUS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpeechMissing, match=r"HARK_CORPUS.*espeak-ng"):
        recordings(["read-en"], 1)
    assert replay.main([]) == replay.EXIT_NO_SPEECH
    assert "corpus is missing" in capsys.readouterr().err


def test_a_corpus_gives_each_usable_recording_once_before_any_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "set": "one", "text": "yes", "duration_s": 3.0},
        {"id": "b", "set": "one", "text": "no", "duration_s": 4.0},
        {"id": "long", "set": "one", "text": "x", "duration_s": 40.0},
        {"id": "silent", "set": "one", "text": "", "duration_s": 3.0},
        {"id": "other", "set": "two", "text": "x", "duration_s": 3.0},
    ]
    lines = [json.dumps(row | {"path": f"{row['id']}.wav", "language": "en"}) for row in rows]
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("HARK_CORPUS", str(tmp_path))
    monkeypatch.setattr("bench.corpus.read_audio", lambda path: tone(1.0))
    _, source = recordings(["one"], 1)
    ids = [recording.id for recording in itertools.islice(source, 6)]
    assert [sorted(ids[i : i + 2]) for i in (0, 2, 4)] == [["a", "b"]] * 3
    with pytest.raises(SpeechMissing, match="nowhere"):
        recordings(["nowhere"], 1)


# Measures ------------------------------------------------------------------------------------------------------------


def partial(
    at_s: float, committed: str, tentative: str = "", *, start_s: float = 1.0, end_s: float, n: int = 0
) -> Received:
    span = {"utterance": n, "channel": 0, "start_ms": round(start_s * 1_000), "end_ms": round(end_s * 1_000)}
    return Received(at_s, {"type": "partial", **span, "committed": committed, "tentative": tentative})


def final(at_s: float, *words: tuple[str, float, float], n: int = 0, end_s: float | None = None) -> Received:
    """Words with the seconds of their start and end."""
    timed = [
        {"word": w, "start_ms": round(a * 1_000), "end_ms": round(b * 1_000), "probability": 1.0} for w, a, b in words
    ]
    ends_s = (words[-1][2] if words else 2.0) if end_s is None else end_s
    span = {"utterance": n, "channel": 0, "start_ms": round(1_000 * words[0][1]) if words else 1_000}
    text = " ".join(word for word, _, _ in words)
    return Received(at_s, {"type": "final", **span, "end_ms": round(ends_s * 1_000), "text": text, "words": timed})


def spoken(start_s: float, end_s: float, text: str = "") -> Spoken:
    return Spoken("r", text, "en", round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE))


SENTENCE = (("The", 1.0, 1.2), ("cat", 1.3, 1.6), ("saw", 1.7, 2.0), ("the", 2.1, 2.2), ("dog.", 2.3, 2.6))


def test_percentiles_are_measured_values_by_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (0, 50, 80, 81, 95, 100)] == [1, 3, 4, 5, 5, 5]
    assert percentile(list(range(1, 101)), 95) == 95
    assert percentile([], 50) is None


@settings(deadline=None)  # machines may be busy
@given(st.lists(st.floats(-5, 50), min_size=1), st.floats(0, 100))
def test_at_least_so_many_percent_lie_at_or_below_a_percentile(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert found is not None
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-9


def test_each_word_counts_from_its_end_to_the_first_text_that_shows_it() -> None:
    events = [
        partial(1.9, "", "The cat", end_s=1.65),
        partial(2.4, "The", " cats so", end_s=2.1),  # what was shown once was shown
        partial(2.7, "The cat", " saw the", end_s=2.3),
        final(3.2, *SENTENCE),
    ]
    assert shown_words(events) == {
        0: [
            ShownWord(1.2, 1.9, True),
            ShownWord(1.6, 1.9, True),
            ShownWord(2.0, 2.7, True),
            ShownWord(2.2, 2.7, True),
            ShownWord(2.6, 3.2, False),
        ]
    }
    assert [round(word.delay_s, 3) for word in shown_words(events)[0]] == [0.7, 0.3, 0.7, 0.5, 0.6]


def test_a_word_is_not_shown_before_it_began() -> None:
    events = [partial(1.5, "", "a cat the", end_s=1.4), final(3.2, *SENTENCE)]
    by_partial = [word.by_partial for word in shown_words(events)[0]]
    assert by_partial == [False, True, False, False, False]  # the second "the" came later


def test_partials_of_other_utterances_or_after_the_final_show_nothing() -> None:
    events = [partial(1.5, "", "The cat", end_s=2.0, n=1), final(3.0, *SENTENCE, n=0)]
    assert set(shown_words(events)) == {0}
    assert not any(word.by_partial for word in shown_words(events)[0])


def test_the_screen_stands_still_between_updates_while_someone_speaks() -> None:
    def bound(kind: str, at_s: float, n: int = 0) -> Received:
        return Received(at_s + 0.1, {"type": kind, "utterance": n, "channel": 0, "at_ms": round(at_s * 1_000)})

    events = [
        bound("speech_started", 1.0),
        partial(1.5, "", "a", end_s=1.4),
        partial(3.0, "", "a b", end_s=2.9),
        partial(4.5, "", "a b c", end_s=3.9),  # after the end of speech: nobody waits for more
        bound("speech_stopped", 4.0),
        bound("speech_started", 6.0, n=1),
        bound("speech_stopped", 6.8, n=1),
    ]
    assert [round(gap, 3) for gap in update_gaps(events)] == [0.5, 1.5, 1.0, 0.8]


def test_the_final_of_an_utterance_is_the_last_that_reaches_its_end() -> None:
    said = spoken(1.0, 9.0)
    first, second = final(4.0, ("one", 1.0, 3.5), n=0), final(9.7, ("two", 4.0, 8.9), n=1)
    empty, after = final(11.0, n=2, end_s=8.95), final(12.0, ("hm", 9.6, 9.9), n=3)
    assert final_of(said, [first, second, empty, after]) is second
    assert final_of(said, [first, after]) is None  # its end never came


def test_outcomes_count_from_the_speech_in_the_track() -> None:
    track = Track(
        np.zeros(SAMPLE_RATE * 9, np.int16), (spoken(1.0, 2.5, "the cat saw the dog"), spoken(5.0, 7.0, "lost"))
    )
    events = [
        partial(1.75, "", "The cat", end_s=1.65),
        Received(2.0, {"type": "lag", "audio_ms": 2_000, "lag_ms": 350}),
        partial(2.9, "The cat", " saw the dog", end_s=2.7),
        final(3.25, *SENTENCE, end_s=2.6),
        Received(9.0, {"type": "failed", "utterance": 1, "channel": 0, "start_ms": 5_000, "end_ms": 7_000}),
    ]
    found = measure(track, events)
    heard, lost = found.outcomes
    times = (heard.first_text_s, heard.last_word_s, heard.final_s, heard.final_detected_s)
    assert times == pytest.approx((0.75, 0.4, 0.75, 0.65))
    assert (lost.first_text_s, lost.last_word_s, lost.final_s, lost.final_detected_s) == (None, None, None, None)
    assert found.score == Score(6, 0, 1, 0)
    assert (found.partials, found.failed, found.max_lag_s, found.retractions) == (2, 1, 0.35, ())
    assert found.speech_s == pytest.approx(3.5)


def test_words_doubled_between_finals_are_errors() -> None:
    track = Track(np.zeros(SAMPLE_RATE, np.int16), (spoken(0.1, 0.9, "one red fox"),))
    events = [final(1.0, ("one", 0.1, 0.3), ("red", 0.3, 0.5)), final(2.0, ("red", 0.4, 0.5), ("fox", 0.5, 0.9), n=1)]
    assert measure(track, events).score == Score(3, 0, 0, 1)


def test_measures_of_streams_add_up() -> None:
    a = Measures(speech_s=2.0, partials=3, retractions=("x",), failed=1, max_lag_s=0.5, update_gaps_s=(0.1,))
    b = Measures(speech_s=1.0, partials=1, score=Score(5, 1), max_lag_s=0.2, update_gaps_s=(0.4,))
    assert a + b == Measures(3.0, (), (), (0.1, 0.4), Score(5, 1), 4, ("x",), 1, 0.5)


def test_case_and_punctuation_may_change_in_a_committed_word() -> None:
    events = [
        partial(1.0, "The cat, saw", " x", end_s=1),
        partial(2.0, "the cat saw -- The", end_s=2),
        final(3.0, *SENTENCE),
    ]
    assert retractions(events) == []


@pytest.mark.parametrize(
    ("events", "taken_back"),
    [
        ([partial(1, "The cat", end_s=1), partial(2, "The", " cat saw", end_s=2), final(3, *SENTENCE)], ["cat"]),
        ([partial(1, "The cat sat", end_s=1), final(3, *SENTENCE)], ["sat"]),
        ([partial(1, "The cat saw", end_s=1), final(3)], ["the", "cat", "saw"]),
        ([partial(1, "The", end_s=1), partial(2, "A", end_s=2), final(3, ("A", 1, 2))], ["the"]),  # counted once
        ([partial(1, "Oh", end_s=1, n=1), final(3, *SENTENCE, n=0)], []),  # another utterance's promise
    ],
)
def test_a_committed_word_that_is_not_in_its_place_was_taken_back(
    events: list[Received], taken_back: list[str]
) -> None:
    found = retractions(events)
    assert len(found) == len(taken_back)
    assert all(repr(word) in line for word, line in zip(taken_back, found, strict=True))


WORDS = st.lists(st.sampled_from(["alpha", "bravo", "charlie", "delta"]), min_size=1, max_size=8)


@settings(deadline=None)  # machines may be busy
@given(WORDS, st.data())
def test_a_committed_text_that_only_grows_takes_nothing_back_and_one_changed_word_is_found(
    words: list[str], data: st.DataObject
) -> None:
    lengths = sorted(data.draw(st.lists(st.integers(0, len(words)), max_size=5)))
    events = [partial(1.0, " ".join(words[:n]), " tail", end_s=1.0) for n in lengths]
    whole = [final(2.0, *((word, 1.0, 2.0) for word in words))]
    assert retractions([*events, *whole]) == []
    place = data.draw(st.integers(0, len(words) - 1))
    changed = [*words[:place], "zulu", *words[place + 1 :]]
    expected = 1 if any(n > place for n in lengths) else 0
    assert len(retractions([*events, final(2.0, *((word, 1.0, 2.0) for word in changed))])) == expected


def test_words_are_compared_plain() -> None:
    assert plain_words("Don't -- go, ÉCOLE!  Ｔwo") == ["dont", "go", "école", "two"]


# The player ----------------------------------------------------------------------------------------------------------

READY = json.dumps({"type": "ready", "session": "s", "model": "m", "config": {"pause_ms": 500}})
Handler = Callable[[websockets.ServerConnection], Awaitable[None]]


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[str]:
    async with websockets.serve(handler, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1/stream"


def short_track(seconds: float = 0.5) -> Track:
    return Track(tone(seconds), (spoken(0.0, seconds, "la"),))


async def play_one(url: str, *, patience_s: float = 5.0, seconds: float = 0.5) -> Played:
    [played] = await play(
        url, [short_track(seconds)], parameters={"pause_ms": "300"}, message_ms=30, patience_s=patience_s
    )
    return played


async def test_messages_leave_when_their_last_sample_is_spoken() -> None:
    arrivals: list[tuple[float, bytes]] = []
    paths: list[str] = []
    before_s = asyncio.get_running_loop().time()

    async def handler(connection: websockets.ServerConnection) -> None:
        assert connection.request is not None
        paths.append(connection.request.path)
        await connection.send(READY)
        async for message in connection:
            if isinstance(message, str):
                assert json.loads(message) == {"type": "eof"}
                await connection.send('{"type":"done","audio_ms":500}')
                return
            arrivals.append((asyncio.get_running_loop().time(), message))

    async with service(handler) as url:
        played = await play_one(url)
    assert paths == ["/v1/stream?pause_ms=300"]
    assert b"".join(data for _, data in arrivals) == short_track().audio.tobytes()
    assert [len(data) for _, data in arrivals[:-1]] == [960] * 16
    for number, (at_s, _) in enumerate(arrivals[:-1], start=1):
        assert at_s - before_s >= 0.03 * number  # never before its last sample
    assert len(played.late_s) == len(arrivals)
    assert min(played.late_s) >= 0.0
    assert played.ended_s is not None
    assert played.ended_s >= 0.5
    assert (played.error, [r.kind for r in played.received]) == ("", ["done"])


async def test_a_refused_stream_is_a_failure_of_the_run() -> None:
    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.send('{"type":"error","code":"overloaded","message":"no place left","fatal":true}')

    async with service(handler) as url:
        with pytest.raises(PlayFailed, match="no place left"):
            await play_one(url)
    with pytest.raises(PlayFailed, match="cannot connect"):
        await play_one(url)


@pytest.mark.parametrize(
    ("last_words", "error"),
    [
        ('{"type":"error","code":"engine","message":"the engine died","fatal":true}', "the engine died"),
        (None, "closed"),
    ],
)
async def test_a_stream_that_breaks_off_keeps_what_came_and_says_why(last_words: str | None, error: str) -> None:
    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.send(READY)
        await connection.recv()
        await connection.send('{"type":"lag","audio_ms":30,"lag_ms":0}')
        if last_words is not None:
            await connection.send(last_words)

    async with service(handler) as url:
        played = await play_one(url)
    assert played.received[0].kind == "lag"
    assert error in played.error
    assert played.ended_s is None


async def test_a_service_that_is_never_done_is_given_up() -> None:
    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.send(READY)
        async for _ in connection:
            pass

    async with service(handler) as url:
        played = await play_one(url, patience_s=0.1, seconds=0.1)
    assert "not done" in played.error
    assert played.ended_s is None


# The whole -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 80), st.integers(1, 80))
def test_the_largest_number_that_holds_is_found_in_few_runs(most: int, limit: int) -> None:
    searching, tried = search(limit), list[int]()
    found: int | None = None
    count = next(searching)
    while found is None:
        tried.append(count)
        try:
            count = searching.send(count <= most)
        except StopIteration as end:
            found = end.value
    assert found == min(most, limit)
    assert len(tried) == len(set(tried)) <= 14
    assert all(1 <= count <= limit for count in tried)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"final_after_speech_s": {"p95": 1.51}}, False),
        ({"final_after_speech_s": {"p95": None}}, False),
        ({"update_gap_s": {"p95": 3.1}}, False),
        ({"never_final": 0.1}, False),
        ({"errors": ["it broke"]}, False),
    ],
)
def test_streams_are_served_in_time_when_finals_and_partials_are(change: dict[str, Any], expected: bool) -> None:
    figures = {"final_after_speech_s": {"p95": 1.5}, "update_gap_s": {"p95": 3.0}, "never_final": 0.0, "errors": []}
    assert holds(figures | change, pause_ms=500) is expected


def test_a_late_client_makes_the_run_invalid() -> None:
    def run(late_s: list[float]) -> replay.Run:
        return replay.Run([short_track()], [Played({}, late_s=late_s, ended_s=0.6)], Measures(), None, 1.0)

    assert run([0.001] * 100 + [0.4]).is_valid  # one hiccup in a hundred
    assert not run([0.001] * 90 + [0.2] * 10).is_valid
    figures = replay.summary(run([0.2] * 10))
    assert (figures["valid"], figures["client_late_s"]) == (False, {"p99": 0.2, "max": 0.2})
    assert "200 / 200" in replay.table([figures], 500)


@pytest.mark.slow
def test_replay_of_the_scripted_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Everything real but the model: service and client processes, sockets, pace. The words are known exactly."""
    monkeypatch.setenv("HARK_ENGINE", "scripted")
    out = tmp_path / "out.json"
    code = replay.main(["--sets", "scripted", "--streams", "1,2", "--seconds", "2", "--json", str(out)])
    document = json.loads(out.read_text())
    one, two = document["runs"]
    assert code == (0 if one["valid"] and two["valid"] else replay.EXIT_INVALID)
    assert [one["streams"], two["streams"]] == [1, 2]
    for run in (one, two):
        assert (run["wer"], run["never_final"], run["retractions"], run["failed"]) == (0.0, 0.0, 0, 0)
        assert run["errors"] == []
        assert run["final_after_speech_s"]["p50"] > 0.4  # the pause of 500 ms, less what the detector adds
        assert 0.0 < run["last_word_shown_s"]["p50"] <= run["final_after_speech_s"]["p50"]
        assert run["words_shown_by_partial"] > 0.5
        assert run["partials_per_speech_s"] > 0.5
        assert run["gateway_cpu_percent"] > 0
        assert run["gateway_rss_mib"] > run["engine_rss_mib"] / 10 > 0
    said = [u["recording"] for stream in two["details"] for u in stream["utterances"]]
    assert len(said) == len(set(said))
    assert document["settings"]["model"] == "scripted"
    assert document["settings"]["service"] == {"HARK_ENGINE": "scripted"}
    assert document["machine"]["cores"] >= 1
    assert "final after end of speech (pause 500 ms), s" in capsys.readouterr().out
