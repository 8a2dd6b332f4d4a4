"""What is said in telephone calls, for those who follow them: each call's events, while it lasts and for a while after.

An exchange that sends a call's audio reads no results. So an application asks for the events of the call that it knows,
by its id. It may come late, or before the call does, and reads at its own pace: a follower holds nothing but its place.
"""

import asyncio
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streaming.errors import ClientError, Overloaded


@dataclass(frozen=True, slots=True)
class CallsConfig:
    """``keep_s``: how long a call's events stay after its end. ``max_call_chars``: of one call; the oldest go first.
    ``max_kept_chars``: of all calls that have ended. ``max_followers``: of all calls together."""

    keep_s: float = 300.0
    max_call_chars: int = 4 * 2**20
    max_kept_chars: int = 64 * 2**20
    max_followers: int = 1_024


class UnknownCall(ClientError):
    """No call of this id is open, or was until a while ago."""

    code = "unknown_call"


class Call:
    """One call's events, numbered from 1. A CallLog of app/wire/calls.py. Never raises."""

    def __init__(self, calls: "Calls", max_chars: int) -> None:
        self._calls = calls
        self._max_chars = max_chars
        self._numbers: list[int] = []  # rising; parallel to the texts
        self._texts: list[str] = []
        self._newest: dict[object, int] = {}  # what is replaced by a newer one of its kind → its number
        self._next = 1
        self._lost = 0  # the last number that had to go for want of room
        self._changed = asyncio.Event()
        self.ids: tuple[str, ...] = ()
        self.chars = 0
        self.has_ended = False

    def begin(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        self._calls.register(self)

    def put(self, event: Mapping[str, Any]) -> None:
        """A partial or a heartbeat takes the place of the one before it; an utterance's final ends its partials."""
        kind, utterance = event["type"], event.get("utterance")
        if kind in ("partial", "final", "failed"):
            self._drop(("partial", utterance))
        elif kind == "lag":
            self._drop("lag")
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        text = text.encode(errors="replace").decode()  # halves of surrogate pairs, which JSON can escape, are no UTF-8
        self._numbers.append(self._next)
        self._texts.append(text)
        self.chars += len(text)
        if kind in ("partial", "lag"):
            self._newest[("partial", utterance) if kind == "partial" else "lag"] = self._next
        self._next += 1
        self._make_room()
        self._wake()

    def end(self) -> None:
        """Nothing more will be put."""
        self.has_ended = True
        self._calls.ended(self)
        self._wake()

    def _drop(self, key: object) -> None:
        number = self._newest.pop(key, None)
        index = bisect_right(self._numbers, number) - 1 if number is not None else -1
        if index >= 0 and self._numbers[index] == number:
            self.chars -= len(self._texts.pop(index))
            del self._numbers[index]

    def _make_room(self) -> None:
        count = 0
        while self.chars > self._max_chars and count < len(self._texts) - 1:
            self.chars -= len(self._texts[count])
            count += 1
        if count:
            self._lost = self._numbers[count - 1]
            del self._numbers[:count], self._texts[:count]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int = 0, quiet_s: float | None = None) -> AsyncIterator[tuple[int, str]]:
        """Every event's number and JSON, from behind that number to the call's end; partials that were replaced before
        they could be read are not among them. Where events had to go, ``truncated`` says so first. After each
        ``quiet_s`` without any comes one without text."""
        while True:
            if after < self._lost:
                after = self._lost
                yield after, '{"type":"truncated"}'
            index = bisect_right(self._numbers, after)
            if index < len(self._numbers):
                after = self._numbers[index]
                yield after, self._texts[index]
            elif self.has_ended:
                return
            else:
                try:
                    async with asyncio.timeout(quiet_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield after, ""


class Calls:
    """All calls that are open, and those that have ended a while ago."""

    def __init__(self, config: CallsConfig | None = None) -> None:
        self._config = config or CallsConfig()
        self._by_id: dict[str, Call] = {}
        self._ended: OrderedDict[Call, asyncio.TimerHandle] = OrderedDict()  # the longest ended first
        self._kept_chars = 0
        self._begun = asyncio.Event()
        self._followers = 0
        self._is_closed = False

    def open(self) -> Call:
        """A call that is about to begin; its ``end`` must be called."""
        return Call(self, self._config.max_call_chars)

    @contextmanager
    def follower(self) -> Iterator[None]:
        """A place for one. Raises Overloaded where all are taken."""
        if self._followers >= self._config.max_followers:
            raise Overloaded(f"all {self._config.max_followers} places for followers of calls are in use")
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1

    async def find(self, call_id: str, wait_s: float = 0.0) -> Call:
        """The newest call of this id, which may begin within ``wait_s``. Raises UnknownCall, or Overloaded where the
        service goes down."""
        try:
            async with asyncio.timeout(wait_s):
                while call_id not in self._by_id:
                    if self._is_closed:
                        raise Overloaded("the service is going down", code="shutting_down", retry_after_s=1)
                    if wait_s <= 0:
                        raise TimeoutError
                    await self._begun.wait()
        except TimeoutError:
            raise UnknownCall(f"there is no call {call_id[:100]!r}") from None
        return self._by_id[call_id]

    def close(self) -> None:
        """No call will begin any more: nobody waits for one."""
        self._is_closed = True
        self._tell()

    def register(self, call: Call) -> None:
        for name in call.ids:
            self._by_id[name] = call
        self._tell()

    def _tell(self) -> None:
        self._begun.set()
        self._begun = asyncio.Event()

    def ended(self, call: Call) -> None:
        if not call.ids:
            return
        timer = asyncio.get_running_loop().call_later(self._config.keep_s, self._forget, call)
        self._ended[call] = timer
        self._kept_chars += call.chars
        while self._kept_chars > self._config.max_kept_chars:
            self._forget(next(iter(self._ended)))

    def _forget(self, call: Call) -> None:
        self._ended.pop(call).cancel()
        self._kept_chars -= call.chars
        for name in call.ids:
            if self._by_id.get(name) is call:
                del self._by_id[name]
