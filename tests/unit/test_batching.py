"""Which steps an engine's worker takes up next."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.batching import BatchConfig, Kind, Waiting, choose
from streaming.types import Priority

CONFIG = BatchConfig(max_batch=4, spread=1.25, slack=6)
FINAL, PARTIAL, FILE = Priority.LIVE_FINAL, Priority.LIVE_PARTIAL, Priority.FILE


def steps() -> st.SearchStrategy[list[Waiting]]:
    one = st.builds(
        Waiting,
        kind=st.sampled_from(Kind),
        priority=st.sampled_from(Priority),
        order=st.integers(1, 50),
        group=st.sampled_from([None, "a", "b"]),
        length=st.integers(0, 60),
    )
    return st.lists(one, max_size=20)


@given(steps(), st.integers(1, 8))
def test_a_call_is_led_by_who_has_most_right_and_holds_only_what_can_share_it(
    waiting: list[Waiting], size: int
) -> None:
    chosen = choose(waiting, replace(CONFIG, max_batch=size))
    assert (chosen == []) == (waiting == [])
    assert len(chosen) <= size
    assert len(set(chosen)) == len(chosen)
    if not chosen:
        return
    first = waiting[chosen[0]]
    assert all((step.priority, step.kind) >= (first.priority, first.kind) for step in waiting)
    for index in chosen[1:]:
        assert first.group is not None
        assert (waiting[index].kind, waiting[index].group) == (first.kind, first.group)
        if waiting[index].priority != first.priority:
            assert waiting[index].length <= 1.25 * first.length + 6


@given(steps())
def test_whatever_waits_is_taken_up_in_the_end(waiting: list[Waiting]) -> None:
    left = list(waiting)
    for _ in range(len(waiting)):
        chosen = set(choose(left, CONFIG))
        left = [step for index, step in enumerate(left) if index not in chosen]
    assert left == []


def test_a_final_goes_before_a_partial_that_came_first_and_that_before_a_file() -> None:
    waiting = [Waiting(Kind.ENCODE, FILE, 1), Waiting(Kind.ENCODE, PARTIAL, 2), Waiting(Kind.ENCODE, FINAL, 3)]
    assert choose(waiting, CONFIG) == [2]
    assert choose(waiting[:2], CONFIG) == [1]


def test_a_final_gets_in_between_the_steps_of_a_partial() -> None:
    assert choose([Waiting(Kind.ALIGN, PARTIAL, 1, "a"), Waiting(Kind.ENCODE, FINAL, 2)], CONFIG) == [1]


def test_among_equals_what_ends_a_request_goes_first_and_encoding_before_decoding() -> None:
    waiting = [
        Waiting(Kind.DECODE, PARTIAL, 1, "a", 9),
        Waiting(Kind.ENCODE, PARTIAL, 2),
        Waiting(Kind.ALIGN, PARTIAL, 3, "a"),
    ]
    assert choose(waiting, CONFIG) == [2]
    assert choose(waiting[:2], CONFIG) == [1]


@pytest.mark.parametrize(("length", "comes"), [(20, True), (31, True), (32, False)])
def test_a_partial_comes_along_with_a_final_only_where_it_is_no_longer(length: int, comes: bool) -> None:
    waiting = [Waiting(Kind.DECODE, PARTIAL, 1, "a", length), Waiting(Kind.DECODE, FINAL, 2, "a", 20)]
    assert choose(waiting, CONFIG) == ([1, 0] if comes else [1])


def test_finals_come_along_with_a_final_however_long_they_are() -> None:
    waiting = [Waiting(Kind.DECODE, FINAL, 1, "a", 5), Waiting(Kind.DECODE, FINAL, 2, "a", 60)]
    assert choose(waiting, CONFIG) == [0, 1]


def test_the_oldest_come_along_where_there_is_no_room_for_all() -> None:
    waiting = [Waiting(Kind.DECODE, PARTIAL, order, "a", 5) for order in (9, 7, 5, 3, 1)]
    assert choose(waiting, CONFIG) == [4, 3, 2, 1]


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"spread": 0.5}, {"slack": -1}])
def test_a_config_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least"):
        replace(CONFIG, **wrong)
