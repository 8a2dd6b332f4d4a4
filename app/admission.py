"""How many may come in. Slots are held by context managers, so that none is leaked by a way out nobody thought of."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streaming.errors import Overloaded
from streaming.types import Priority


class Admission:
    """Counts what is open and refuses what is too much. ``is_draining`` refuses everything."""

    def __init__(self, limit: int, noun: str) -> None:
        self._limit = limit
        self._noun = noun
        self.open = 0
        self.is_draining = False
        self._emptied = asyncio.Event()

    async def wait_empty(self) -> None:
        """Returns when nothing is open."""
        while self.open:
            self._emptied.clear()
            await self._emptied.wait()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Raises Overloaded when every slot is taken or the service is going down."""
        if self.is_draining:
            raise Overloaded("the service is going down; try another instance", code="shutting_down", retry_after_s=1)
        if self.open >= self._limit:
            raise Overloaded(f"all {self._limit} {self._noun} are in use; try again later")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._emptied.set()


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """When the engine has enough live streams.

    ``max_load``: the share of its time that live finals may take before no more are let in; 0 lets everybody in. What
    is left is for partials, which shrink, and for chance: near a share of 1 waiting times grow without end.
    ``memory_s``: how far back is looked. ``speech_share``: how much of its time a stream is taken to speak until it has
    been heard.
    """

    max_load: float = 0.85
    memory_s: float = 20.0
    speech_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_load < 0 or self.memory_s <= 0 or not 0 < self.speech_share <= 1:
            raise ValueError("max_load must be at least 0, memory_s above 0, speech_share above 0 and at most 1")


class LoadMeter:
    """How much of the engine the live finals take, from what each has cost, and whether one more stream fits."""

    def __init__(self, config: LoadConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._config = config
        self._clock = clock
        self._busy_s = 0.0  # of the engine's time, with what is older weighing less
        self._at_s = clock()
        self._cost_s = self._audio_s = 0.0  # of the finals so far, likewise by their number
        self._opened_s: list[float] = []  # of the streams that are open

    def decoded(self, priority: Priority, cost_s: float, audio_s: float) -> None:
        """A request of so much audio took so much of the engine's time."""
        if priority is not Priority.LIVE_FINAL:
            return
        self._decay()
        self._busy_s += cost_s
        self._cost_s, self._audio_s = 0.95 * self._cost_s + cost_s, 0.95 * self._audio_s + audio_s

    @property
    def load(self) -> float:
        """Seconds of the engine's time that live finals take in a second."""
        self._decay()
        return self._busy_s / self._config.memory_s

    @contextmanager
    def stream(self, others: int, workers: int) -> Iterator[None]:
        """One more stream beside so many others, on an engine with so many workers.

        The first is always let in. Raises Overloaded.
        """
        now_s = self._clock()
        if others and 0 < self._config.max_load * workers < self._expected(now_s):
            raise Overloaded(
                "the engine has as many live streams as it can answer in time; try again later",
                retry_after_s=self._config.memory_s / 2,
            )
        self._opened_s.append(now_s)
        try:
            yield
        finally:
            self._opened_s.remove(now_s)

    def _expected(self, now_s: float) -> float:
        """The load with one more stream; what is open has been heard the less the younger it is."""
        each = self._config.speech_share * self._cost_s / self._audio_s if self._audio_s else 0.0
        unheard = sum(max(0.0, 1 - (now_s - opened_s) / self._config.memory_s) for opened_s in self._opened_s)
        return self.load + (1 + unheard) * each

    def _decay(self) -> None:
        now_s = self._clock()
        self._busy_s *= math.exp((self._at_s - now_s) / self._config.memory_s)
        self._at_s = now_s
