"""Many sessions, one engine: who is decoded next. Live finals go before live partials, and those before files.

A request waits here, not in the engine, so that a final never stands behind work that was asked for later with less
right. Giving up a call (a stale partial, a client that left) takes it out of the queue at once.
"""

import asyncio
import heapq
import itertools
import time
from dataclasses import dataclass
from typing import Protocol

from streaming.errors import Overloaded
from streaming.ports import Recognizer
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo


class DispatchObserver(Protocol):
    """Told what the dispatcher does, for the metrics."""

    def decoded(self, priority: Priority, waited_s: float, took_s: float) -> None: ...
    def answered(self, hypothesis: Hypothesis) -> None: ...
    def shed(self, priority: Priority) -> None: ...
    def queue_depth(self, waiting: int, running: int) -> None: ...


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How many requests may wait, in all and as partials; beyond that a request is refused at once."""

    max_waiting: int = 512
    max_waiting_partials: int = 64


class Dispatcher:
    """A Recognizer in front of another one: same port, with an order."""

    def __init__(self, recognizer: Recognizer, config: DispatchConfig, observer: DispatchObserver) -> None:
        self._recognizer = recognizer
        self._config = config
        self._observer = observer
        self._order = itertools.count()
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._running = 0

    @property
    def info(self) -> RecognizerInfo:
        return self._recognizer.info

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Raises Overloaded when too much waits already, and whatever the engine raises."""
        asked_s = time.monotonic()
        await self._acquire(request.priority)
        started_s = time.monotonic()
        try:
            hypothesis = await self._recognizer.decode(request)
        finally:
            self._release()
            self._observer.decoded(request.priority, started_s - asked_s, time.monotonic() - started_s)
        self._observer.answered(hypothesis)
        return hypothesis

    async def _acquire(self, priority: Priority) -> None:
        if self._running < self._recognizer.info.capacity and not self._waiting:
            self._running += 1
            self._observer.queue_depth(len(self._waiting), self._running)
            return
        self._admit(priority)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), turn))
        self._observer.queue_depth(len(self._waiting), self._running)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the turn came in the same moment: pass it on
            else:
                self._forget(turn)
            raise

    def _admit(self, priority: Priority) -> None:
        partials = sum(1 for entry in self._waiting if entry[0] is Priority.LIVE_PARTIAL)
        is_full = len(self._waiting) >= self._config.max_waiting
        if is_full or (priority is Priority.LIVE_PARTIAL and partials >= self._config.max_waiting_partials):
            self._observer.shed(priority)
            raise Overloaded("the engine has more work than it can take")

    def _release(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self._recognizer.info.capacity:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._running += 1
                turn.set_result(None)
        self._observer.queue_depth(len(self._waiting), self._running)

    def _forget(self, turn: asyncio.Future[None]) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
        heapq.heapify(self._waiting)
        self._observer.queue_depth(len(self._waiting), self._running)
