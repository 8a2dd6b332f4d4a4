"""The ledger of the engine process: who is asked next, who is to blame. No process, no clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models.remote import Job, Ledger, RemoteConfig
from streaming.errors import Overloaded

MAX_ATTEMPTS = 3
CAPACITY = 3


def ledger_with(count: int, max_pending: int = 100) -> Ledger[Job]:
    ledger: Ledger[Job] = Ledger(max_pending=max_pending, max_attempts=MAX_ATTEMPTS)
    for key in range(count):
        ledger.add(Job(key))
    return ledger


def send_all(ledger: Ledger[Job], capacity: int = CAPACITY) -> list[int]:
    sent = []
    while (job := ledger.next(capacity)) is not None:
        sent.append(job.key)
    return sent


def test_no_more_than_capacity_is_in_flight_in_order_of_arrival() -> None:
    ledger = ledger_with(5)
    assert send_all(ledger) == [0, 1, 2]
    ledger.finish(1)
    assert send_all(ledger) == [3]


def test_more_than_max_pending_is_refused_wherever_the_others_are() -> None:
    ledger = ledger_with(4, max_pending=4)
    send_all(ledger)
    with pytest.raises(Overloaded):
        ledger.add(Job(9))
    ledger.finish(0)
    ledger.add(Job(9))


def test_after_a_crash_the_suspects_go_alone_and_first() -> None:
    ledger = ledger_with(5)
    send_all(ledger)
    assert ledger.crash() == []
    order = []
    for _ in range(3):
        (key,) = send_all(ledger)
        order.append(key)
        ledger.finish(key)
    assert order == [0, 1, 2]
    assert send_all(ledger) == [3, 4]


def test_only_the_poison_is_given_up() -> None:
    ledger, poison = ledger_with(6), 1
    answered, given_up, crashes = [], [], 0
    while len(ledger):
        sent = [*ledger.in_flight, *send_all(ledger)]
        if poison in sent:
            crashes += 1
            given_up += [job.key for job in ledger.crash()]
        else:
            answered.append(sent[0])
            ledger.finish(sent[0])
    assert given_up == [poison]
    assert sorted(answered) == [0, 2, 3, 4, 5]
    assert crashes == MAX_ATTEMPTS


def test_a_stuck_request_does_not_incriminate_its_neighbours() -> None:
    ledger = ledger_with(4)
    send_all(ledger)
    assert ledger.crash(guilty=[1]) == []
    assert [job.key for job in ledger.suspects] == [1]
    assert [job.key for job in ledger.waiting] == [0, 2, 3]


def test_an_abandoned_request_keeps_its_place_until_the_reply_and_is_not_sent_again() -> None:
    ledger = ledger_with(4)
    send_all(ledger)
    assert ledger.abandon(ledger.in_flight[0])
    assert send_all(ledger) == []  # a worker is still busy with it
    ledger.crash()
    assert 0 not in [job.key for job in ledger.suspects]


def test_an_abandoned_request_that_waits_is_forgotten() -> None:
    ledger = ledger_with(5)
    send_all(ledger)
    assert not ledger.abandon(ledger.waiting[0])
    assert [job.key for job in ledger.waiting] == [4]


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events: each job is answered, given up or abandoned once, and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[Job] = Ledger(max_pending=20, max_attempts=MAX_ATTEMPTS)
        self.open: dict[int, Job] = {}
        self.next_key = 0

    @rule()
    def ask(self) -> None:
        job = Job(self.next_key)
        try:
            self.ledger.add(job)
        except Overloaded:
            assert len(self.ledger) == 20
            return
        self.open[job.key] = job
        self.next_key += 1

    @rule(capacity=st.integers(1, CAPACITY))
    def send(self, capacity: int) -> None:
        send_all(self.ledger, capacity)

    @precondition(lambda self: self.ledger.in_flight)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ledger.in_flight)))
        assert self.ledger.finish(key) is self.open.pop(key)

    @precondition(lambda self: self.ledger.in_flight)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ledger.in_flight)))
        self.close([self.ledger.fault(key)])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        job = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        if not self.ledger.abandon(job):
            del self.open[job.key]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        flying = sorted(self.ledger.in_flight)
        guilty = data.draw(st.none() | st.sets(st.sampled_from(flying)) if flying else st.none())
        gone = {key for key, job in self.ledger.in_flight.items() if job.abandoned}
        given_up = self.ledger.crash(guilty)
        assert all(job.abandoned or job.blamed == MAX_ATTEMPTS for job in given_up)
        for key in gone | {job.key for job in given_up}:
            del self.open[key]
        assert not self.ledger.in_flight

    def close(self, jobs: list[Job | None]) -> None:
        for job in jobs:
            if job is not None:
                assert job.abandoned or job.blamed == MAX_ATTEMPTS
                del self.open[job.key]

    @invariant()
    def every_open_job_is_in_one_place(self) -> None:
        ledger = self.ledger
        held = [job.key for job in (*ledger.waiting, *ledger.suspects, *ledger.in_flight.values())]
        assert sorted(held) == sorted(self.open)

    @invariant()
    def a_suspect_is_alone(self) -> None:
        flying = self.ledger.in_flight.values()
        assert len(flying) <= CAPACITY
        assert len(flying) <= 1 or not any(job.blamed for job in flying)

    def teardown(self) -> None:
        """Whatever happened, an engine that works again answers everything."""
        for _ in range(len(self.open) + 1):
            send_all(self.ledger)
            for key in list(self.ledger.in_flight):
                self.ledger.finish(key)
        assert len(self.ledger) == 0


TestLedger = LedgerMachine.TestCase


@given(st.sampled_from(["max_attempts", "max_pending", "request_timeout_s", "start_timeout_s", "backoff_s"]))
def test_settings_out_of_range_are_refused(name: str) -> None:
    setting: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match="must be"):
        RemoteConfig(engine={"kind": "scripted"}, **setting)
    with pytest.raises(ValueError, match="kind"):
        RemoteConfig(engine={})
