"""Followers of calls: early, late, slow, too many; and what is kept of a call, and for how long."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.calls import Call, Calls, CallsConfig, UnknownCall
from streaming.errors import Overloaded
from tests.support import virtual_time


def event(kind: str, utterance: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": kind, **({"utterance": utterance} if kind in ("partial", "final", "failed") else {}), **more}


async def read(call: Call, after: int = 0) -> list[dict[str, Any]]:
    return [json.loads(text) async for _, text in call.follow(after)]


def test_a_late_follower_gets_all_that_is_settled_and_the_newest_of_what_is_not() -> None:
    async def play() -> None:
        call = Calls().open()
        call.begin(["a"])
        for number in range(5):
            call.put(event("partial", 0, text=number))
            call.put(event("partial", 1, text=number))
            call.put(event("lag", n=number))
        call.put(event("final", 0))
        call.put(event("dtmf"))
        call.end()
        assert [(e["type"], e.get("utterance")) for e in await read(call)] == [
            ("partial", 1),
            ("lag", None),
            ("final", 0),
            ("dtmf", None),
        ]

    virtual_time.run(play())


@given(st.lists(st.tuples(st.sampled_from(["partial", "final", "lag", "dtmf"]), st.integers(0, 3)), max_size=60))
def test_who_follows_from_the_beginning_misses_nothing_that_is_settled(puts: list[tuple[str, int]]) -> None:
    """However fast it reads; and who comes back with the number of the last event gets the rest."""

    async def play() -> None:
        call = Calls().open()
        call.begin(["a"])
        live = asyncio.create_task(read(call))
        for index, (kind, utterance) in enumerate(puts):
            call.put(event(kind, utterance, index=index))
            if index % 3 == 0:
                await asyncio.sleep(0)
        call.end()
        settled = [index for index, (kind, _) in enumerate(puts) if kind in ("final", "dtmf")]
        heard = await live
        assert [e["index"] for e in heard if e["type"] in ("final", "dtmf")] == settled
        assert [e["index"] for e in heard] == sorted(e["index"] for e in heard)
        numbered = [(number, json.loads(text)["index"]) async for number, text in call.follow()]
        for place, (number, _) in enumerate(numbered):
            assert [e["index"] for e in await read(call, number)] == [index for _, index in numbered[place + 1 :]]

    virtual_time.run(play())


def test_a_follower_that_comes_first_waits_for_the_call() -> None:
    async def play() -> None:
        calls = Calls()
        early = asyncio.create_task(calls.find("b", wait_s=10))
        await asyncio.sleep(9)
        calls.open().begin(["other"])
        call = calls.open()
        call.begin(["a", "b"])
        assert await early is call
        with pytest.raises(UnknownCall):
            await calls.find("nobody")
        with pytest.raises(UnknownCall):
            await calls.find("nobody", wait_s=1)

    virtual_time.run(play())


def test_a_call_is_kept_for_a_while_after_its_end_and_no_longer() -> None:
    async def play() -> None:
        calls = Calls(CallsConfig(keep_s=300))
        call = calls.open()
        call.begin(["a", "b"])
        await asyncio.sleep(1_000)
        call.end()
        await asyncio.sleep(299)
        assert await calls.find("a") is call
        again = calls.open()
        again.begin(["a"])  # the same id, of a new stream
        await asyncio.sleep(2)
        assert await calls.find("a") is again
        with pytest.raises(UnknownCall):
            await calls.find("b")

    virtual_time.run(play())


def test_what_is_kept_of_calls_that_have_ended_is_bounded() -> None:
    async def play() -> None:
        calls = Calls(CallsConfig(max_kept_chars=1_000))
        for name in "abcdef":
            call = calls.open()
            call.begin([name])
            call.put(event("dtmf", text="x" * 300))
            call.end()
        with pytest.raises(UnknownCall):
            await calls.find("c")
        assert len(await read(await calls.find("d"))) == 1

    virtual_time.run(play())


def test_of_a_call_that_says_too_much_the_oldest_goes_and_followers_are_told() -> None:
    async def play() -> None:
        call = Calls(CallsConfig(max_call_chars=1_000)).open()
        call.begin(["a"])
        for number in range(50):
            call.put(event("final", number, text="x" * 100))
        call.end()
        first, *rest = await read(call)
        assert first == {"type": "truncated"}
        assert [e["utterance"] for e in rest] == list(range(50 - len(rest), 50))
        assert 5 <= len(rest) <= 9

    virtual_time.run(play())


def test_a_quiet_call_says_that_it_is_still_there() -> None:
    async def play() -> None:
        call = Calls().open()
        call.begin(["a"])
        following = call.follow(0, 15)
        assert [await anext(following) for _ in range(2)] == [(0, ""), (0, "")]
        call.end()
        assert [one async for one in following] == []

    virtual_time.run(play())


def test_a_follower_too_many_is_refused() -> None:
    calls = Calls(CallsConfig(max_followers=1))
    with calls.follower(), pytest.raises(Overloaded), calls.follower():
        pass
    with calls.follower():
        pass


def test_every_event_can_be_sent_as_utf_8() -> None:
    async def play() -> None:
        call = Calls().open()
        call.put(event("dtmf", digit="\ud800"))
        call.end()
        assert await read(call) == [{"type": "dtmf", "digit": "?"}]

    virtual_time.run(play())
