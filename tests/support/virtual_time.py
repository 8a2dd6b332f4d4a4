"""An event loop whose time is virtual: where every task waits, the clock jumps to the next deadline.

An hour of timeouts takes milliseconds, and the same code gives the same run each time. Nothing is patched: the loop
has a clock of its own. Where nothing can happen any more (no timer, nothing ready) it raises instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(Exception):
    """Every task waits for something that no timer and no other task will bring."""


class _JumpingSelector(selectors.BaseSelector):
    """Never blocks; the time it would have blocked is added to ``now_s``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingWillHappen
        self.now_s += max(0.0, timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, in virtual time. Fails when it leaves a task behind or something nobody handled."""
    unhandled: list[Mapping[str, Any]] = []

    async def watched() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        result = await main
        for _ in range(3):  # what was cancelled last needs a turn of the loop to end
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(watched())
    assert not unhandled, unhandled
    return result
