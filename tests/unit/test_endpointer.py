"""The endpointer against a table of its transitions, a naive model of the rules, and configs that cannot be."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.config import EndpointerConfig
from streaming.endpointer import Endpoint, Endpointer, Event, Onset, PauseBegan, Resumed, State, windows_for
from streaming.errors import BadMessage

LOUD, MIDDLE, QUIET = 0.9, 0.4, 0.1
CONFIG = EndpointerConfig(threshold=0.5, release_threshold=0.35, min_speech_ms=96, pause_ms=128)  # 3 and 4 windows


def feed(endpointer: Endpointer, probabilities: Sequence[float]) -> list[Event]:
    return [event for probability in probabilities for event in endpointer.step(probability)]


# How to come into each state, and how many windows that takes.
WAYS = {
    State.QUIET: [],
    State.STARTING: [LOUD],
    State.SPEAKING: [LOUD] * 3,
    State.STOPPING: [LOUD] * 3 + [QUIET],
}


@pytest.mark.parametrize(
    ("state", "probability", "next_state", "events"),
    [
        (State.QUIET, QUIET, State.QUIET, []),
        (State.QUIET, MIDDLE, State.QUIET, []),
        (State.QUIET, LOUD, State.STARTING, []),
        (State.STARTING, QUIET, State.QUIET, []),
        (State.STARTING, MIDDLE, State.STARTING, []),
        (State.STARTING, LOUD, State.STARTING, []),
        (State.SPEAKING, QUIET, State.STOPPING, [PauseBegan(3)]),
        (State.SPEAKING, MIDDLE, State.SPEAKING, []),
        (State.SPEAKING, LOUD, State.SPEAKING, []),
        (State.STOPPING, QUIET, State.STOPPING, []),
        (State.STOPPING, MIDDLE, State.STOPPING, []),
        (State.STOPPING, LOUD, State.SPEAKING, [Resumed(4)]),
    ],
)
def test_each_transition(state: State, probability: float, next_state: State, events: list[Event]) -> None:
    endpointer = Endpointer(CONFIG)
    feed(endpointer, WAYS[state])
    assert endpointer.state is state
    assert endpointer.step(probability) == events
    assert endpointer.state is next_state


@pytest.mark.parametrize(
    ("state", "events"),
    [
        (State.QUIET, []),
        (State.STARTING, []),  # a single window is what an earlier close left of a word
        (State.SPEAKING, [Endpoint(3)]),
        (State.STOPPING, [Endpoint(3)]),
    ],
)
def test_closing_in_each_state_ends_what_is_open_once(state: State, events: list[Event]) -> None:
    endpointer = Endpointer(CONFIG)
    feed(endpointer, WAYS[state])
    assert endpointer.close() == events
    assert endpointer.state is State.QUIET
    assert endpointer.close() == []


def test_a_start_of_two_windows_is_closed_as_speech() -> None:
    endpointer = Endpointer(CONFIG)
    feed(endpointer, [LOUD, LOUD])
    assert endpointer.state is State.STARTING
    assert endpointer.close() == [Onset(0), Endpoint(2)]


def test_a_whole_utterance() -> None:
    endpointer = Endpointer(CONFIG)
    probabilities = [QUIET] * 2 + [LOUD] * 5 + [QUIET] * 2 + [LOUD] + [MIDDLE] * 3 + [QUIET] * 4
    assert feed(endpointer, probabilities) == [Onset(2), PauseBegan(7), Resumed(9), PauseBegan(13), Endpoint(13)]


def test_what_is_shorter_than_the_least_speech_is_none() -> None:
    assert feed(Endpointer(CONFIG), ([LOUD] * 2 + [QUIET]) * 20) == []


def test_a_pause_of_one_window_begins_and_ends_together() -> None:
    endpointer = Endpointer(EndpointerConfig(min_speech_ms=32, pause_ms=32))
    assert feed(endpointer, [LOUD, QUIET, LOUD]) == [Onset(0), PauseBegan(1), Endpoint(1), Onset(2)]


@pytest.mark.parametrize(("ms", "windows"), [(0, 0), (1, 1), (32, 1), (33, 2), (96, 3), (500, 16)])
def test_a_duration_takes_as_many_windows_as_last_that_long(ms: int, windows: int) -> None:
    assert windows_for(ms) == windows


@pytest.mark.parametrize(
    "values",
    [
        {"threshold": 0.3, "release_threshold": 0.4},
        {"threshold": 1.0},
        {"threshold": 0.0, "release_threshold": 0.0},
        {"threshold": -0.5},
        {"release_threshold": 0.0},
        {"threshold": float("nan")},
        {"release_threshold": float("nan")},
        {"threshold": float("inf")},
        {"min_speech_ms": 31},
        {"min_speech_ms": 2_001},
        {"min_speech_ms": -96},
        {"pause_ms": 0},
        {"pause_ms": 31},
        {"pause_ms": 10_001},
    ],
)
def test_impossible_configs_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(BadMessage) as raised:
        EndpointerConfig(**values)  # type: ignore[arg-type]
    assert raised.value.code == "bad_parameter"


def test_equal_thresholds_are_possible() -> None:
    endpointer = Endpointer(EndpointerConfig(threshold=0.5, release_threshold=0.5, min_speech_ms=32, pause_ms=32))
    assert feed(endpointer, [0.5, 0.49]) == [Onset(0), PauseBegan(1), Endpoint(1)]


@given(
    st.lists(st.floats(0, 1), max_size=200),
    st.integers(32, 300),
    st.integers(32, 300),
    st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)),
)
def test_events_alternate_and_utterances_keep_their_least_lengths(
    probabilities: list[float], min_speech_ms: int, pause_ms: int, thresholds: tuple[float, float]
) -> None:
    release, threshold = sorted(thresholds)
    config = EndpointerConfig(threshold, release, min_speech_ms, pause_ms)
    endpointer = Endpointer(config)
    events = feed(endpointer, probabilities)
    follows: dict[type[Event], tuple[type[Event], ...]] = {
        Onset: (PauseBegan,),
        PauseBegan: (Resumed, Endpoint),
        Resumed: (PauseBegan,),
        Endpoint: (Onset,),
    }
    assert not events or isinstance(events[0], Onset)
    for before, after in pairwise(events):
        assert isinstance(after, follows[type(before)])
    for event in events:
        if isinstance(event, Onset):
            assert probabilities[event.window] >= threshold
            assert all(p >= release for p in probabilities[event.window : event.window + windows_for(min_speech_ms)])
        if isinstance(event, PauseBegan):
            assert probabilities[event.window] < release
        if isinstance(event, Resumed):
            assert probabilities[event.window] >= threshold
        if isinstance(event, Endpoint):
            assert all(p < threshold for p in probabilities[event.window : event.window + windows_for(pause_ms)])


@given(st.lists(st.floats(0, 1), max_size=100))
def test_after_closing_it_is_as_new_but_for_its_count_of_windows(probabilities: list[float]) -> None:
    used, new = Endpointer(CONFIG), Endpointer(CONFIG)
    feed(used, probabilities)
    used.close()
    feed(new, [QUIET] * len(probabilities))
    tail = [LOUD] * 4 + [QUIET] * 5
    assert feed(used, tail) == feed(new, tail)
