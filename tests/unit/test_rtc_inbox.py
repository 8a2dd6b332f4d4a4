"""The inbox of a WebRTC connection: nothing is out of order, nothing piles up, and the clock stays true."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.live import ClientGone, Gap
from app.rtc.inbox import Inbox
from streaming.errors import BadMessage

MAX_SAMPLES = 50
Item = str | bytes | Gap


def opened(**bounds: int) -> Inbox:
    inbox = Inbox(**{"max_samples": MAX_SAMPLES, "max_messages": 1_000, **bounds})
    inbox.release()
    return inbox


def put(inbox: Inbox, item: Item) -> None:
    if isinstance(item, str):
        inbox.put_message(item)
    else:
        inbox.put_audio(item)


async def take(inbox: Inbox, at_most: int = 1_000_000) -> list[Item]:
    """All that waits."""
    taken: list[Item] = []
    with contextlib.suppress(TimeoutError):
        while len(taken) < at_most:
            async with asyncio.timeout(0):
                taken.append(await inbox.get())
    return taken


def samples(items: list[Item]) -> int:
    return sum(item.samples if isinstance(item, Gap) else len(item) // 2 for item in items if not isinstance(item, str))


items = st.one_of(
    st.integers(1, 30).map(lambda count: bytes(2 * count)),
    st.integers(1, 100).map(Gap),
    st.sampled_from(["a", "b"]),
)


@given(st.lists(st.one_of(items, st.none()), max_size=60))
def test_what_is_taken_is_what_was_put_but_for_gaps_in_place_of_audio(deeds: list[Item | None]) -> None:
    """None takes one. Positions and the order of messages never change; only the latest audio is kept as it was."""

    async def play() -> None:
        inbox = opened()
        given_, taken = list[Item](), list[Item]()
        for deed in deeds:
            if deed is not None:
                put(inbox, deed)
                given_.append(deed)
            else:
                taken += await take(inbox, at_most=1)
        taken += await take(inbox)
        assert samples(taken) == samples(given_)
        assert positions(taken) == positions(given_)

    asyncio.run(play())


def positions(taken: list[Item]) -> list[tuple[int, str]]:
    """Each message and how much audio came before it."""
    return [(samples(taken[:index]), item) for index, item in enumerate(taken) if isinstance(item, str)]


async def test_the_oldest_audio_makes_room_and_leaves_a_gap() -> None:
    inbox = opened()
    for number in range(8):
        inbox.put_audio(bytes([number]) * 20)
    assert await take(inbox) == [Gap(30), *[bytes([number]) * 20 for number in range(3, 8)]]
    assert inbox.dropped_samples == 30


async def test_what_waits_is_bounded_however_much_comes() -> None:
    inbox = opened()
    for _ in range(10_000):
        inbox.put_audio(bytes(20))
        inbox.put_audio(Gap(5))
    waiting = await take(inbox)
    assert len(waiting) <= 2 * MAX_SAMPLES // 10 + 2
    assert samples(waiting) == 150_000


async def test_messages_are_bounded() -> None:
    inbox = opened(max_messages=3)
    for _ in range(3):
        inbox.put_message("x")
    with pytest.raises(BadMessage):
        inbox.put_message("x")
    assert await inbox.get() == "x"
    inbox.put_message("x")


async def test_audio_is_held_until_it_is_released_and_a_message_may_go_ahead() -> None:
    inbox = Inbox(MAX_SAMPLES, 10)
    inbox.put_audio(bytes(20))
    assert await take(inbox) == []
    inbox.put_message("config", ahead=True)
    inbox.release()
    assert await take(inbox) == ["config", bytes(20)]


async def test_after_the_end_nothing_is_given_out() -> None:
    inbox = opened()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.end(ClientGone)
    inbox.end(BadMessage("the first reason holds"))
    with pytest.raises(ClientGone):
        await waiting
    inbox.put_audio(bytes(20))
    with pytest.raises(ClientGone):
        await inbox.get()
