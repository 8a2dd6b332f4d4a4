"""The dispatcher: its order, its bounds, and that no request and no place in the engine is ever lost."""

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dispatch import DispatchConfig, Dispatcher
from app.telemetry import Metrics
from streaming.errors import Overloaded, RecognizerFailed
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo
from tests.support import virtual_time


@dataclass
class Engine:
    """Decodes for ``took_s[request_id]`` each; notes the order, and how many at once."""

    capacity: int = 1
    took_s: dict[int, float] = field(default_factory=dict)
    fails: frozenset[int] = frozenset()
    begun: list[int] = field(default_factory=list)
    begun_s: list[float] = field(default_factory=list)
    asked: list[DecodeRequest] = field(default_factory=list)
    running: int = 0
    most: int = 0

    @property
    def info(self) -> RecognizerInfo:
        return RecognizerInfo("slow", frozenset({"en"}), self.capacity)

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        self.begun.append(request.request_id)
        self.begun_s.append(asyncio.get_running_loop().time())
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.took_s.get(request.request_id, 1.0))
            if request.request_id in self.fails:
                raise RecognizerFailed("it broke")
            return Hypothesis(request.request_id, f"text {request.request_id}")
        finally:
            self.running -= 1


@dataclass
class Observer:
    waits_s: list[float] = field(default_factory=list)
    shed_kinds: list[Priority] = field(default_factory=list)
    depths: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    then: Callable[[], object] = lambda: None

    def decoded(self, priority: Priority, waited_s: float, took_s: float) -> None:
        self.waits_s.append(waited_s)

    def answered(self, hypothesis: Hypothesis) -> None:
        self.texts.append(hypothesis.text)

    def shed(self, priority: Priority) -> None:
        self.shed_kinds.append(priority)

    def queue_depth(self, waiting: int, running: int) -> None:
        self.depths.append((waiting, running))
        self.then()


def ask(request_id: int, priority: Priority = Priority.LIVE_FINAL) -> DecodeRequest:
    return DecodeRequest(request_id, 0, 0, priority, np.zeros(160, np.int16), 0, 160)


def make(engine: Engine, **bounds: float) -> tuple[Dispatcher, Observer]:
    observer = Observer()
    return Dispatcher(engine, DispatchConfig(**bounds), observer), observer  # type: ignore[arg-type]


def test_finals_before_partials_before_files_and_first_come_first_served_within_each() -> None:
    engine = Engine()
    dispatcher, observer = make(engine, file_patience_s=60.0)
    kinds = [Priority.FILE, Priority.LIVE_PARTIAL, Priority.LIVE_FINAL] * 3

    async def main() -> list[Hypothesis]:
        first = asyncio.create_task(dispatcher.decode(ask(99)))
        await asyncio.sleep(0)
        return await asyncio.gather(first, *(dispatcher.decode(ask(i, kind)) for i, kind in enumerate(kinds)))

    answers = virtual_time.run(main())
    assert engine.begun == [99, 2, 5, 8, 1, 4, 7, 0, 3, 6]
    assert [answer.text for answer in answers] == ["text 99", *(f"text {i}" for i in range(9))]
    assert observer.depths[-1] == (0, 0)
    assert max(observer.depths) == (9, 1)


def test_a_request_cancelled_while_it_waits_never_reaches_the_engine() -> None:
    engine = Engine()
    dispatcher, observer = make(engine)

    async def main() -> None:
        tasks = [asyncio.create_task(dispatcher.decode(ask(i))) for i in range(4)]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(main())
    assert engine.begun == [0, 2]
    assert observer.depths[-1] == (0, 0)


def test_a_request_cancelled_while_it_runs_gives_its_place_to_the_next() -> None:
    engine = Engine(took_s={0: 1e6})
    dispatcher, _ = make(engine)

    async def main() -> str:
        endless = asyncio.create_task(dispatcher.decode(ask(0)))
        waiting = asyncio.create_task(dispatcher.decode(ask(1)))
        await asyncio.sleep(1)
        endless.cancel()
        return (await waiting).text

    assert virtual_time.run(main()) == "text 1"


def test_a_request_cancelled_in_the_moment_its_turn_comes_passes_the_turn_on() -> None:
    engine = Engine()
    dispatcher, observer = make(engine)

    async def main() -> list[object]:
        running, *tasks = (asyncio.create_task(dispatcher.decode(ask(i))) for i in range(3))
        await asyncio.sleep(0.5)
        # Told by the release that has just given the place to the second, which has not woken up yet.
        observer.then = tasks[0].cancel
        return list(await asyncio.gather(running, *tasks, return_exceptions=True))

    first, second, third = virtual_time.run(main())
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(first, Hypothesis)
    assert isinstance(third, Hypothesis)
    assert engine.begun == [0, 2]


def test_an_engine_that_fails_frees_its_place() -> None:
    engine = Engine(fails=frozenset({0}))
    dispatcher, observer = make(engine)

    async def main() -> list[object]:
        return list(await asyncio.gather(*(dispatcher.decode(ask(i)) for i in (0, 1)), return_exceptions=True))

    failed, answered = virtual_time.run(main())
    assert isinstance(failed, RecognizerFailed)
    assert isinstance(answered, Hypothesis)
    assert observer.texts == [answered.text]
    assert observer.depths[-1] == (0, 0)


def test_partials_are_shed_before_finals_and_both_at_once_with_overloaded() -> None:
    dispatcher, observer = make(Engine(), max_waiting=4, max_waiting_partials=2)

    async def main() -> list[object]:
        kinds = [Priority.LIVE_FINAL] + [Priority.LIVE_PARTIAL] * 3 + [Priority.LIVE_FINAL] * 3
        asked = (dispatcher.decode(ask(i, kind)) for i, kind in enumerate(kinds))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    answers = virtual_time.run(main())
    assert [isinstance(answer, Overloaded) for answer in answers] == [False, False, False, True, False, False, True]
    assert observer.shed_kinds == [Priority.LIVE_PARTIAL, Priority.LIVE_FINAL]


@dataclass(frozen=True)
class Plan:
    """One request: when it is asked, what it is, how long it takes, and after how long its caller gives up."""

    at_s: float
    priority: Priority
    took_s: float
    patience_s: float | None


TENTHS = st.integers(0, 30).map(lambda n: n / 10)
PLANS = st.lists(
    st.builds(Plan, TENTHS, st.sampled_from(Priority), TENTHS, st.none() | TENTHS), min_size=1, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(PLANS, st.integers(1, 4), st.sets(st.integers(0, 29)))
def test_whatever_happens_each_request_ends_once_and_the_capacity_is_kept(
    plans: list[Plan], capacity: int, failing: set[int]
) -> None:
    took_s = {number: plan.took_s for number, plan in enumerate(plans)}
    engine = Engine(capacity, took_s, frozenset(failing))
    dispatcher, observer = make(engine, max_waiting=8, max_waiting_partials=4)

    async def one(number: int, plan: Plan) -> str:
        await asyncio.sleep(plan.at_s)
        try:
            async with asyncio.timeout(plan.patience_s):
                return (await dispatcher.decode(ask(number, plan.priority))).text
        except (TimeoutError, Overloaded, RecognizerFailed) as error:
            return type(error).__name__

    async def main() -> list[str]:
        ends = await asyncio.gather(*(one(number, plan) for number, plan in enumerate(plans)))
        # Every place is free again: as many at once as there are places begin at once.
        before = len(engine.begun)
        more = [asyncio.create_task(dispatcher.decode(ask(1_000 + n))) for n in range(capacity)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(engine.begun) - before == capacity
        await asyncio.gather(*more)
        return list(ends)

    ends = virtual_time.run(main())
    assert engine.most <= capacity
    assert len(set(engine.begun)) == len(engine.begun)
    assert observer.depths[-1] == (0, 0)
    assert all(waiting <= 8 and running <= capacity for waiting, running in observer.depths)
    for number, (plan, end) in enumerate(zip(plans, ends, strict=True)):
        allowed = {"RecognizerFailed"} if number in failing else {f"text {number}"}
        allowed |= {"Overloaded"} | ({"TimeoutError"} if plan.patience_s is not None else set())
        assert end in allowed


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(Priority), min_size=2, max_size=40))
def test_among_those_that_wait_the_order_is_by_kind_then_by_arrival(kinds: list[Priority]) -> None:
    engine = Engine()
    dispatcher, _ = make(engine, max_waiting=64, max_waiting_partials=64, file_patience_s=1e6)

    async def main() -> None:
        await asyncio.gather(*(dispatcher.decode(ask(number, kind)) for number, kind in enumerate(kinds)))

    virtual_time.run(main())
    waited = [(kinds[number], number) for number in engine.begun[1:]]
    assert all(a < b for a, b in itertools.pairwise(waited))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([Priority.LIVE_PARTIAL, Priority.FILE]), min_size=1, max_size=40), st.integers(2, 8))
def test_a_final_never_waits_for_partials_and_files_that_came_before(kinds: list[Priority], capacity: int) -> None:
    """Nor for any number of them: some of the engine's places are beyond their reach."""
    engine = Engine(capacity)
    dispatcher, _ = make(engine)

    async def main() -> None:
        others = [asyncio.create_task(dispatcher.decode(ask(number, kind))) for number, kind in enumerate(kinds)]
        await asyncio.sleep(0.5)
        assert engine.running < capacity
        await dispatcher.decode(ask(99))
        assert engine.begun_s[engine.begun.index(99)] == 0.5
        await asyncio.gather(*others)

    virtual_time.run(main())


def test_with_one_place_a_final_waits_for_the_decode_that_runs_and_no_other() -> None:
    engine = Engine()
    dispatcher, _ = make(engine)

    async def main() -> None:
        others = [asyncio.create_task(dispatcher.decode(ask(n, Priority.LIVE_PARTIAL))) for n in range(5)]
        await asyncio.sleep(0.5)
        await asyncio.gather(dispatcher.decode(ask(99)), *others)

    virtual_time.run(main())
    assert engine.begun == [0, 99, 1, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(2, 8), st.booleans())
def test_no_stream_waits_longer_for_its_partial_than_a_round_of_all_takes(
    streams: int, capacity: int, with_finals: bool
) -> None:
    """Each asks again as soon as it has been answered, while finals take half of the engine, or none of it."""
    engine = Engine(capacity)
    dispatcher, _ = make(engine)
    longest_s = math.ceil(streams / (capacity // 2))

    async def partials(stream: int) -> None:
        for n in range(6):
            asked_s = asyncio.get_running_loop().time()
            await dispatcher.decode(ask(100 * stream + n, Priority.LIVE_PARTIAL))
            assert asyncio.get_running_loop().time() - asked_s <= longest_s + 1e-6

    async def finals() -> None:
        for n in range(6 * streams):
            await dispatcher.decode(ask(10_000 + n))

    async def main() -> None:
        flows = capacity - capacity // 2 if with_finals else 0
        await asyncio.gather(*(partials(stream) for stream in range(streams)), *(finals() for _ in range(flows)))

    virtual_time.run(main())


def test_a_file_gets_its_turn_however_many_partials_come() -> None:
    engine = Engine()
    dispatcher, _ = make(engine, file_patience_s=5.0)

    async def partials(stream: int) -> None:
        for n in range(30):
            await dispatcher.decode(ask(100 * stream + n, Priority.LIVE_PARTIAL))

    async def main() -> None:
        await asyncio.gather(partials(1), partials(2), dispatcher.decode(ask(7, Priority.FILE)))

    virtual_time.run(main())
    assert 5.0 <= engine.begun_s[engine.begun.index(7)] <= 6.0


def test_files_leave_live_streams_more_room_than_each_other() -> None:
    engine = Engine(8)
    dispatcher, _ = make(engine, live_memory_s=3.0)

    async def main() -> list[int]:
        files = [asyncio.create_task(dispatcher.decode(ask(n, Priority.FILE))) for n in range(20)]
        await asyncio.sleep(0.5)
        alone = engine.running
        await dispatcher.decode(ask(99))  # until 1.5 s; the first files end at 1 s
        await asyncio.sleep(0.1)
        beside = engine.running
        await asyncio.gather(*files)
        return [alone, beside]

    assert virtual_time.run(main()) == [6, 2]


def test_a_partial_that_had_to_wait_is_asked_as_it_should_be_when_its_turn_comes() -> None:
    engine = Engine()
    dispatcher, _ = make(engine)
    newer = replace(ask(1, Priority.LIVE_PARTIAL), audio=np.zeros(320, np.int16))
    renewed_s: list[float] = []

    def renew() -> DecodeRequest:
        renewed_s.append(asyncio.get_running_loop().time())
        return newer

    async def main() -> None:
        first = dispatcher.decode(ask(0, Priority.LIVE_PARTIAL), renew)  # which does not wait
        second = dispatcher.decode(ask(1, Priority.LIVE_PARTIAL), renew)
        third = dispatcher.decode(ask(2, Priority.LIVE_PARTIAL), lambda: None)
        await asyncio.gather(first, second, third)

    virtual_time.run(main())
    assert renewed_s == [1.0]
    assert [request.audio.size for request in engine.asked] == [160, 320, 160]
    assert [request.request_id for request in engine.asked] == [0, 1, 2]


def test_a_final_that_has_become_a_partial_gives_back_the_place_that_it_took() -> None:
    """Speech may have gone on while an early final waited. Half of the places stay the partials' limit."""
    engine = Engine(4)
    dispatcher, _ = make(engine)

    async def main() -> int:
        finals = [dispatcher.decode(ask(n), lambda n=n: ask(n, Priority.LIVE_PARTIAL)) for n in range(12)]  # type: ignore[misc]
        await asyncio.gather(*finals)
        partials = [asyncio.create_task(dispatcher.decode(ask(50 + n, Priority.LIVE_PARTIAL))) for n in range(8)]
        await asyncio.sleep(0.5)
        at_once = engine.running
        await asyncio.gather(*partials)
        return at_once

    assert virtual_time.run(main()) == 2


def test_decoder_steps_are_counted_over_all_answers() -> None:
    metrics = Metrics()
    for taken, saved in ((7, 3), (5, 0)):
        metrics.answered(Hypothesis(1, "text", decoder_steps=taken, decoder_steps_saved=saved))
    assert metrics.registry.get_sample_value("hark_decoder_steps_total") == 12
    assert metrics.registry.get_sample_value("hark_decoder_steps_saved_total") == 3


def test_info_is_the_engines_own() -> None:
    engine = Engine(3)
    assert make(engine)[0].info == engine.info


def test_a_loop_in_which_nothing_can_happen_is_told_apart_from_one_that_waits() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.NothingWillHappen):
        virtual_time.run(main())
