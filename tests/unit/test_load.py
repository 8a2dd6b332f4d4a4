"""For how many live streams there is time, from what their finals have cost."""

from contextlib import ExitStack

import pytest

from app.admission import LoadConfig, LoadMeter
from streaming.errors import Overloaded
from streaming.types import Priority


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def speak(meter: LoadMeter, clock: Clock, streams: int, seconds: int, *, cost_s: float, audio_s: float = 5.0) -> None:
    """Every 10 s each stream has a final of 5 s of audio that takes the engine ``cost_s``."""
    for _ in range(0, seconds, 10):
        clock.now_s += 10
        for _ in range(streams):
            meter.decoded(Priority.LIVE_FINAL, cost_s, audio_s)


def let_in(meter: LoadMeter, already: int, workers: int = 1) -> int:
    """How many more can be opened in one moment. They are closed again."""
    with ExitStack() as opened:
        for n in range(100):
            try:
                opened.enter_context(meter.stream(already + n, workers))
            except Overloaded:
                return n
    return 100


def test_the_load_is_the_share_of_time_that_finals_take_and_fades_when_they_stop() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(memory_s=20.0), clock)
    speak(meter, clock, streams=4, seconds=200, cost_s=1.0)
    assert meter.load == pytest.approx(0.4, rel=0.3)
    clock.now_s += 100
    assert meter.load < 0.01


def test_who_is_first_always_gets_in() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(), clock)
    speak(meter, clock, streams=1, seconds=100, cost_s=9.0)
    with meter.stream(0, 1):
        pass


def test_streams_are_let_in_until_their_finals_fill_the_engine() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(max_load=0.8), clock)
    speak(meter, clock, streams=4, seconds=200, cost_s=0.5)  # each takes 5 % of the engine
    assert 8 <= let_in(meter, already=4) <= 14


def test_twice_the_workers_are_enough_for_more() -> None:
    counts = []
    for workers in (1, 2):
        clock = Clock()
        meter = LoadMeter(LoadConfig(), clock)
        speak(meter, clock, streams=4, seconds=200, cost_s=0.5)
        counts.append(let_in(meter, 4, workers))
    assert counts[1] > 2 * counts[0]


def test_streams_that_open_in_one_moment_count_before_they_have_said_anything() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(), clock)
    meter.decoded(Priority.LIVE_FINAL, 1.0, 5.0)  # half of the time spoken: 10 % of the engine each
    assert 6 <= let_in(meter, already=1) <= 9
    assert 6 <= let_in(meter, already=1) <= 9, "who has left takes no place"


def test_a_stream_that_has_been_heard_counts_with_what_it_says() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(), clock)
    meter.decoded(Priority.LIVE_FINAL, 1.0, 5.0)
    with ExitStack() as opened:
        for n in range(6):
            opened.enter_context(meter.stream(n, 1))
        before = let_in(meter, already=6)
        clock.now_s += 100  # and none of them says a word
        assert before <= 2 < 6 <= let_in(meter, already=6)


def test_partials_and_files_take_no_streams_place() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(), clock)
    for priority in (Priority.LIVE_PARTIAL, Priority.FILE):
        meter.decoded(priority, 1e6, 1.0)
    assert meter.load == 0
    assert let_in(meter, already=5) == 100


def test_without_a_limit_everybody_gets_in() -> None:
    clock = Clock()
    meter = LoadMeter(LoadConfig(max_load=0), clock)
    speak(meter, clock, streams=4, seconds=100, cost_s=99.0)
    assert let_in(meter, already=4) == 100


@pytest.mark.parametrize("wrong", [{"max_load": -1}, {"memory_s": 0}, {"speech_share": 0}, {"speech_share": 1.1}])
def test_a_config_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least"):
        LoadConfig(**wrong)
