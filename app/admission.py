"""How many may come in. Slots are held by context managers, so that none is leaked by a way out nobody thought of."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from streaming.errors import Overloaded


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
