"""Two tracks of a call, put side by side: nothing is lost, and everything is where its timestamp says."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from app.dialect import Audio, Complaint, Gap
from app.wire.tracks import Placed, Reorder, Tracks, TracksConfig

SILENCE = 0xFF
MS = 8  # samples
STEREO = TracksConfig(channels=2)


def columns(placed: Sequence[Placed], channels: int = 2) -> np.ndarray:
    """What was given out, shape (samples, channels), with silence for gaps."""
    parts = []
    for one in placed:
        if isinstance(one, Audio):
            parts.append(np.frombuffer(one.data, np.uint8).reshape(-1, channels))
        elif isinstance(one, Gap):
            assert one.samples > 0
            parts.append(np.full((one.samples // 2, channels), SILENCE, np.uint8))
    return np.concatenate(parts) if parts else np.zeros((0, channels), np.uint8)


def tone(number: int, ms: int) -> bytes:
    return bytes([number]) * (ms * MS)


# Pieces of one track: how much time is left out before each (ms), and how long it is.
pieces = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 0, 80, 500, 30_000]), st.sampled_from([10, 20, 100])), min_size=1, max_size=12
)


@given(pieces, pieces, st.sampled_from([True, False]))
def test_every_piece_lies_where_its_timestamp_says(
    first: list[tuple[int, int]], second: list[tuple[int, int]], awaited: bool
) -> None:
    sent, expected = [], []
    for channel, track in enumerate((first, second)):
        at_ms, places = 0, []
        for number, (missing_ms, length_ms) in enumerate(track):
            at_ms += missing_ms
            data = tone(channel * 100 + number + 1, length_ms)
            sent.append((at_ms, channel, data))
            places.append((at_ms * MS, data))
            at_ms += length_ms
        expected.append(places)
    tracks = Tracks(TracksConfig(channels=2, awaited=awaited))
    given_out: list[Placed] = []
    for at_ms, channel, data in sorted(sent, key=lambda one: (one[0], one[1])):  # as an exchange sends them
        given_out += tracks.place(channel, at_ms, data)
    given_out += tracks.flush()
    heard = columns(given_out)
    end = max(begin + len(data) for track in expected for begin, data in track)
    late = 100 * MS  # a track that was not waited for comes in a piece of the other one late
    # A step within the tolerance is jitter, so the last piece may lie so much early.
    assert -STEREO.tolerance_ms * MS <= len(heard) - end <= late
    for channel, placed in enumerate(expected):
        for begin, data in placed:
            found = np.flatnonzero(heard[:, channel] == data[0])
            assert len(found) == len(data)
            assert abs(found[0] - begin) <= STEREO.tolerance_ms * MS + late


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.one_of(st.none(), st.integers(0, 90_000)), st.integers(0, 400), st.integers(1, 200)
        ),
        max_size=20,
    )
)
@example([(0, None, 0, 179), (0, None, 228, 179)])  # a piece of nothing went round for ever
def test_no_audio_is_left_out_whatever_the_timestamps_are(sent: list[Any]) -> None:
    """And what is held stays within the skew and one piece."""
    tracks = Tracks(STEREO)
    given_out: list[Placed] = []
    position_ms = given_samples = 0
    for channel, at_ms, length, value in sent:
        new = tracks.place(channel, at_ms, bytes([value]) * length)
        given_out += new
        given_samples += len(columns(new)) if new else 0
        assert tracks.position_ms >= position_ms
        position_ms = tracks.position_ms
        held = position_ms * MS - given_samples
        assert held <= STEREO.max_skew_ms * MS + 400 + MS
    heard = columns([*given_out, *tracks.flush()])
    for channel in (0, 1):
        values = heard[:, channel]
        sent_here = [value for c, _, length, value in sent for _ in range(length) if c == channel]
        assert values[values != SILENCE].tolist() == sent_here


def test_a_track_that_is_late_is_waited_for_no_longer_than_the_skew() -> None:
    tracks = Tracks(STEREO)
    assert tracks.place(0, 0, tone(1, 200)) == []
    assert len(columns(tracks.place(0, 200, tone(1, 20)))) == 220 * MS, "from here on it is not waited for"
    assert len(columns(tracks.place(0, 220, tone(1, 20)))) == 20 * MS
    assert tracks.place(1, 240, tone(2, 20)) == []
    [audio] = tracks.place(0, 240, tone(1, 20))
    assert columns([audio]).tolist() == [[1, 2]] * (20 * MS)


def test_tracks_that_nobody_announced_are_not_waited_for_before_they_come() -> None:
    tracks = Tracks(TracksConfig(channels=2, awaited=False))
    [audio] = tracks.place(1, 0, tone(2, 20))
    assert columns([audio]).tolist() == [[SILENCE, 2]] * (20 * MS)


def test_small_steps_of_the_timestamps_are_rounding_and_leave_no_holes() -> None:
    tracks = Tracks(TracksConfig())
    placed = [one for at_ms in (5, 26, 44, 95) for one in tracks.place(0, at_ms, tone(1, 20))]
    assert columns(placed, 1)[:, 0].tolist() == [1] * (80 * MS)


def test_a_clock_that_does_not_begin_with_the_call_begins_with_its_first_audio() -> None:
    tracks = Tracks(TracksConfig())
    now_ms = 1_796_135_802_646
    placed = [*tracks.place(0, now_ms, tone(1, 20)), *tracks.place(0, now_ms + 120, tone(2, 20))]
    assert columns(placed, 1)[:, 0].tolist() == [1] * 160 + [SILENCE] * 800 + [2] * 160


def test_a_step_of_more_than_ten_minutes_is_no_gap() -> None:
    tracks = Tracks(TracksConfig())
    tracks.place(0, 0, tone(1, 20))
    complaint, audio = tracks.place(0, 10**17, tone(2, 20))
    assert isinstance(complaint, Complaint)
    assert columns([audio], 1)[:, 0].tolist() == [2] * 160


def test_samples_of_16_bits_stay_whole() -> None:
    tracks = Tracks(TracksConfig(sample_rate_hz=16_000, sample_bytes=2, silence=b"\0\0", channels=2))
    one, two = np.arange(320, dtype=np.int16), np.arange(1_000, 1_320, dtype=np.int16)
    placed = [*tracks.place(0, 0, one.tobytes()), *tracks.place(1, 0, two.tobytes())]
    [audio] = placed
    assert isinstance(audio, Audio)
    assert np.frombuffer(audio.data, np.int16).reshape(-1, 2).T.tolist() == [one.tolist(), two.tolist()]


# --- order -----------------------------------------------------------------------------------------------------------


@st.composite
def displaced(draw: st.DrawFn, window: int) -> list[int]:
    """Numbers from 1 on, none of which comes after more than ``window`` later ones."""
    keys = [number + draw(st.floats(0, window)) for number in range(1, draw(st.integers(1, 40)))]
    return [index + 1 for index in sorted(range(len(keys)), key=keys.__getitem__)]


@given(displaced(5))
def test_what_comes_a_little_out_of_order_is_put_in_order(numbers: list[int]) -> None:
    order: Reorder[str] = Reorder(5)
    taken = [thing for number in numbers for thing in order.take(number, str(number))]
    assert taken + order.flush() == [str(number) for number in sorted(numbers)]


@given(st.lists(st.integers(1, 30), max_size=60))
def test_order_never_goes_back_and_holds_no_more_than_its_window(numbers: list[int]) -> None:
    order: Reorder[int] = Reorder(5)
    taken: list[int] = []
    for count, number in enumerate(numbers, 1):
        taken += order.take(number, number)
        passed = max(taken, default=0)
        assert len({waiting for waiting in numbers[:count] if waiting > passed}) <= 5
    taken += order.flush()
    assert taken == sorted(set(taken))


def test_in_order_nothing_waits() -> None:
    order: Reorder[int] = Reorder(5)
    assert [order.take(number, number) for number in (1, 2, 3)] == [[1], [2], [3]]
    assert [order.take(number, number) for number in (5, 4, 4, 2)] == [[], [4, 5], [], []]
    assert [order.take(number, number) for number in (8, 9, 10, 11, 12, 13)] == [
        [],
        [],
        [],
        [],
        [],
        [8, 9, 10, 11, 12, 13],
    ]
