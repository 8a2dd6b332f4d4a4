"""Many sessions, one engine: who is decoded next.

Live finals go first, then live partials, then files; within a kind, who came first. A request waits here and not in
the engine, so that a final never stands behind work that was asked for later with less right, and so that a partial
which had to wait is decoded with the audio that came meanwhile: it is renewed when its turn comes. Partials and files
together get at most half of what the engine takes at once, files alone three quarters; a final finds room there at any
time, and the engine lets it in between their steps. So finals do not wait for partials, and partials use what finals
leave: their cadence follows the load by itself, fairly, since each channel has one at most and all stand in one line.

A file that has waited for ``file_patience_s`` goes before partials, so that it is done some day however busy it is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from app.admission import LoadConfig, LoadMeter
from streaming.audio import SAMPLE_RATE
from streaming.errors import Overloaded
from streaming.ports import Recognizer
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo

Renew = Callable[[], DecodeRequest | None]  # the request as it should be asked now; None: as it was


class Decoder(Protocol):
    """What a session asks: a Recognizer that may let a request wait."""

    @property
    def info(self) -> RecognizerInfo: ...

    async def decode(self, request: DecodeRequest, renew: Renew | None = None) -> Hypothesis:
        """Raises SttError. ``renew`` is called once, if the request had to wait and when its turn comes."""
        ...


class DispatchObserver(Protocol):
    """Told what the dispatcher does, for the metrics."""

    def decoded(self, priority: Priority, waited_s: float, took_s: float) -> None: ...
    def answered(self, hypothesis: Hypothesis) -> None: ...
    def shed(self, priority: Priority) -> None: ...
    def queue_depth(self, waiting: int, running: int) -> None: ...


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How many requests may wait, in all and as partials; beyond that a request is refused at once.

    ``live_memory_s``: for so long after a live request, files leave live ones more room. ``file_patience_s``: what has
    waited longer goes before partials.
    """

    max_waiting: int = 512
    max_waiting_partials: int = 128
    live_memory_s: float = 3.0
    file_patience_s: float = 5.0
    load: LoadConfig = field(default_factory=LoadConfig)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    priority: Priority
    asked_s: float
    turn: "asyncio.Future[None]"


class Line:
    """Who waits and who runs; pure but for the values it is told. Times in seconds on any one clock."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._waiting: dict[Priority, list[_Waiting]] = {priority: [] for priority in Priority}
        self._running = dict.fromkeys(Priority, 0)
        self._last_live_s = float("-inf")

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    @property
    def running(self) -> int:
        return sum(self._running.values())

    def arrived(self, priority: Priority, now_s: float) -> None:
        if priority is not Priority.FILE:
            self._last_live_s = now_s

    def must_refuse(self, priority: Priority) -> bool:
        """Whether too much waits for one more of this kind to wait too."""
        partials = len(self._waiting[Priority.LIVE_PARTIAL])
        is_full = self.waiting >= self._config.max_waiting
        return is_full or (priority is Priority.LIVE_PARTIAL and partials >= self._config.max_waiting_partials)

    def has_room(self, priority: Priority, capacity: int, now_s: float) -> bool:
        """Whether the engine, which takes so many at once, may be given one more of this kind."""
        if self.running >= capacity:
            return False
        if priority is Priority.LIVE_FINAL:
            return True
        others = self._running[Priority.LIVE_PARTIAL] + self._running[Priority.FILE]
        if now_s - self._last_live_s >= self._config.live_memory_s:
            return others < max(1, min(capacity - 1, capacity * 3 // 4))
        if priority is Priority.FILE and self._running[priority] >= max(1, capacity // 4):
            return False
        return others < max(1, capacity // 2)

    def begin(self, priority: Priority) -> None:
        self._running[priority] += 1

    def end(self, priority: Priority) -> None:
        self._running[priority] -= 1

    def join(self, entry: _Waiting) -> None:
        self._waiting[entry.priority].append(entry)

    def leave(self, entry: _Waiting) -> None:
        """No error where it is not there any more."""
        line = self._waiting[entry.priority]
        if entry in line:
            line.remove(entry)

    def next(self, capacity: int, now_s: float) -> _Waiting | None:
        """Takes out the one whose turn it is; None where nobody's is."""
        for priority in self._order(now_s):
            if self._waiting[priority] and self.has_room(priority, capacity, now_s):
                return self._waiting[priority].pop(0)
        return None

    def _order(self, now_s: float) -> list[Priority]:
        files = self._waiting[Priority.FILE]
        if files and now_s - files[0].asked_s >= self._config.file_patience_s:
            return [Priority.LIVE_FINAL, Priority.FILE, Priority.LIVE_PARTIAL]
        return list(Priority)


class Dispatcher:
    """A Recognizer in front of another one: same port, with an order."""

    def __init__(self, recognizer: Recognizer, config: DispatchConfig, observer: DispatchObserver) -> None:
        self._recognizer = recognizer
        self._observer = observer
        self._line = Line(config)
        self.load = LoadMeter(config.load)

    @property
    def info(self) -> RecognizerInfo:
        return self._recognizer.info

    async def decode(self, request: DecodeRequest, renew: Renew | None = None) -> Hypothesis:
        """Raises Overloaded when too much waits already, and whatever the engine raises.

        Giving up the call takes it out of the line at once. ``renew``: see ``Decoder``.
        """
        clock = asyncio.get_running_loop()
        asked_s, priority = clock.time(), request.priority  # renewing may change it: an early final becomes a partial
        if await self._turn(priority, asked_s) and renew is not None:
            request = renew() or request
        started_s = clock.time()
        try:
            hypothesis = await self._recognizer.decode(request)
        finally:
            self._end(priority)
            self._observer.decoded(priority, started_s - asked_s, clock.time() - started_s)
        self.load.decoded(priority, hypothesis.decode_s, request.audio.size / SAMPLE_RATE)
        self._observer.answered(hypothesis)
        return hypothesis

    async def _turn(self, priority: Priority, asked_s: float) -> bool:
        """Returns when the engine may be asked, and whether that had to be waited for."""
        self._line.arrived(priority, asked_s)
        if self._line.has_room(priority, self._recognizer.info.capacity, asked_s) and not self._line.waiting:
            self._begin(priority)
            return False
        if self._line.must_refuse(priority):
            self._observer.shed(priority)
            raise Overloaded("the engine has more work than it can take")
        entry = _Waiting(priority, asked_s, asyncio.get_running_loop().create_future())
        self._line.join(entry)
        self._call()
        try:
            await entry.turn
        except asyncio.CancelledError:
            if entry.turn.done() and not entry.turn.cancelled():
                self._end(priority)  # the turn came in the same moment: pass it on
            else:
                self._line.leave(entry)
                self._tell()
            raise
        return True

    def _begin(self, priority: Priority) -> None:
        self._line.begin(priority)
        self._tell()

    def _end(self, priority: Priority) -> None:
        self._line.end(priority)
        self._call()

    def _call(self) -> None:
        """Give every free place to who is next."""
        now_s = asyncio.get_running_loop().time()
        while (entry := self._line.next(self._recognizer.info.capacity, now_s)) is not None:
            if not entry.turn.done():
                self._line.begin(entry.priority)
                entry.turn.set_result(None)
        self._tell()

    def _tell(self) -> None:
        self._observer.queue_depth(self._line.waiting, self._line.running)
