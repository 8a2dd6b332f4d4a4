"""What has come over a WebRTC connection and was not taken yet. Nothing holds the sender back there, so it is bounded
by letting go of the oldest audio, in whose place a gap stays: the positions of what follows remain true.
"""

import asyncio
from collections import deque

from app.live import Gap
from streaming.errors import BadMessage

_SAMPLE_BYTES = 2


class Inbox:
    """Audio, gaps and messages in their order. Audio is held until ``release``."""

    def __init__(self, max_samples: int, max_messages: int) -> None:
        """Bounds on what waits: samples of audio at 16 kHz, and text messages."""
        self._max_samples = max_samples
        self._max_messages = max_messages
        self._items: deque[str | bytes | Gap] = deque()
        self._samples = 0
        self._messages = 0
        self._filled = asyncio.Event()
        self._end: Exception | type[Exception] | None = None
        self.is_held = True
        self.dropped_samples = 0

    def put_audio(self, audio: bytes | Gap) -> None:
        """int16, mono, 16 kHz; or how much of it never came."""
        if isinstance(audio, Gap):
            self._append_gap(audio.samples)
        else:
            self._items.append(audio)
            self._samples += len(audio) // _SAMPLE_BYTES
        while self._samples > self._max_samples:
            self._drop_oldest()
        self._filled.set()

    def put_message(self, text: str, *, ahead: bool = False) -> None:
        """``ahead``: before all that waits. Raises BadMessage when too many wait."""
        if self._messages >= self._max_messages:
            raise BadMessage(f"more than {self._max_messages} messages wait to be read")
        self._messages += 1
        (self._items.appendleft if ahead else self._items.append)(text)
        self._filled.set()

    def release(self) -> None:
        """Give out audio too."""
        self.is_held = False
        self._filled.set()

    def end(self, why: Exception | type[Exception]) -> None:
        """Nothing more is given out; ``get`` raises this. The first reason holds."""
        self._end = self._end or why
        self._filled.set()

    async def get(self) -> str | bytes | Gap:
        """The oldest. May be cancelled without losing one."""
        while True:
            if self._end is not None:
                raise self._end
            if self._items and not self.is_held:
                return self._take()
            self._filled.clear()
            await self._filled.wait()

    def _take(self) -> str | bytes | Gap:
        item = self._items.popleft()
        match item:
            case bytes():
                self._samples -= len(item) // _SAMPLE_BYTES
            case str():
                self._messages -= 1
        return item

    def _append_gap(self, samples: int) -> None:
        if self._items and isinstance(last := self._items[-1], Gap):
            self._items[-1] = Gap(last.samples + samples)
        else:
            self._items.append(Gap(samples))

    def _drop_oldest(self) -> None:
        """Gaps and messages before it stay. Its gap joins those beside it: they do not pile up."""
        index, audio = next((i, item) for i, item in enumerate(self._items) if isinstance(item, bytes))
        lost = len(audio) // _SAMPLE_BYTES
        self._samples -= lost
        self.dropped_samples += lost
        if index + 1 < len(self._items) and isinstance(after := self._items[index + 1], Gap):
            lost += after.samples
            del self._items[index + 1]
        if index and isinstance(before := self._items[index - 1], Gap):
            lost += before.samples
            del self._items[index]
            index -= 1
        self._items[index] = Gap(lost)
