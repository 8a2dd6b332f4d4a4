"""Puts the tracks of a call, which come in messages of their own, side by side on the call's clock. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np

from app.dialect import Audio, Complaint, Gap
from streaming.audio import SAMPLE_RATE
from streaming.errors import BadMessage

Placed = Audio | Gap | Complaint
T = TypeVar("T")

# A first timestamp beyond this is the time of day or the like, and no time since the call began.
_LATEST_START_MS = 60_000


@dataclass(frozen=True, slots=True)
class TracksConfig:
    """``silence``: one sample of it. ``awaited``: every track is known to come, so that none has to be heard first.

    Timestamps are rounded and jitter: a piece within ``tolerance_ms`` of the one before it follows it at once.
    A track is waited for until it is ``max_skew_ms`` behind the other; then silence takes its place.
    """

    sample_rate_hz: int = 8_000
    sample_bytes: int = 1
    silence: bytes = b"\xff"
    channels: int = 1
    awaited: bool = True
    max_skew_ms: int = 200
    tolerance_ms: int = 60
    max_jump_ms: int = 600_000


@dataclass(slots=True)
class _Track:
    """``end``: up to where it is known, in samples. ``is_awaited``: nothing is given out before it has come too."""

    is_awaited: bool
    end: int = 0
    pieces: deque[tuple[int, bytes]] = field(default_factory=deque)  # where each begins; in order, without overlap


class Tracks:
    """Pieces of tracks in, interleaved audio and gaps out. Holds no more than the skew and the newest piece."""

    def __init__(self, config: TracksConfig) -> None:
        self._config = config
        self._tracks = [_Track(config.awaited) for _ in range(config.channels)]
        self._given = 0  # samples
        self._origin_ms: int | None = None

    @property
    def position_ms(self) -> int:
        """Up to where audio has come, on whichever track."""
        return max(track.end for track in self._tracks) * 1000 // self._config.sample_rate_hz

    def place(self, channel: int, at_ms: int | None, data: bytes) -> Sequence[Placed]:
        """``data``: whole samples. ``at_ms``: where it begins on the call's clock; None for right behind the last.

        Audio is never left out: what comes too late for its place, or has a timestamp that cannot be, follows what is
        there. The time that is missing before a piece is silence.
        """
        track, config = self._tracks[channel], self._config
        begin, complaint = self._begin(track, at_ms)
        if data:  # a piece of nothing would never be over
            track.pieces.append((begin, data))
        track.end = begin + len(data) // config.sample_bytes
        track.is_awaited = True
        return [*complaint, *self._give(self._complete())]

    def flush(self) -> Sequence[Placed]:
        """What still waited for the other track."""
        return self._give(max(track.end for track in self._tracks))

    def _begin(self, track: _Track, at_ms: int | None) -> tuple[int, Sequence[Placed]]:
        if at_ms is None:
            return track.end, []
        if self._origin_ms is None:
            self._origin_ms = at_ms if at_ms > _LATEST_START_MS else 0
        begin = (at_ms - self._origin_ms) * self._config.sample_rate_hz // 1000
        if begin - track.end > self._samples(self._config.max_jump_ms):
            limit_s = self._config.max_jump_ms / 1000
            return track.end, [Complaint(BadMessage(f"the timestamp {at_ms} leaves more than {limit_s:g} s out"))]
        is_missing = begin - track.end > self._samples(self._config.tolerance_ms)
        return (begin if is_missing else track.end), []

    def _samples(self, ms: int) -> int:
        return ms * self._config.sample_rate_hz // 1000

    def _complete(self) -> int:
        """Up to where every track is known, or is not waited for."""
        latest = max(track.end for track in self._tracks) - self._samples(self._config.max_skew_ms)
        for track in self._tracks:
            track.is_awaited = track.is_awaited and track.end >= latest
        until = min(track.end for track in self._tracks if track.is_awaited)
        for track in self._tracks:
            track.end = max(track.end, until)
        return until

    def _give(self, until: int) -> list[Placed]:
        """Gaps where no track has anything, else audio of all."""
        given: list[Placed] = []
        while self._given < until:
            begin = min((track.pieces[0][0] for track in self._tracks if track.pieces), default=until)
            if begin > self._given:
                stop = min(begin, until)
                given.append(Gap((stop - self._given) * SAMPLE_RATE // self._config.sample_rate_hz))
            else:
                stop = min(until, max(self._first_end(track) for track in self._tracks))
                given.append(Audio(self._interleave(stop)))
            self._given = stop
        return given

    def _first_end(self, track: _Track) -> int:
        """Where its first piece ends, if that has begun already."""
        if not track.pieces or track.pieces[0][0] > self._given:
            return 0
        begin, data = track.pieces[0]
        return begin + len(data) // self._config.sample_bytes

    def _interleave(self, stop: int) -> bytes:
        kind = np.uint8 if self._config.sample_bytes == 1 else np.uint16
        columns = [np.frombuffer(self._take(track, stop), kind) for track in self._tracks]
        return np.stack(columns, axis=1).tobytes()

    def _take(self, track: _Track, stop: int) -> bytes:
        """The track from what was given to ``stop``, with silence where it has nothing; that is its no more."""
        width = self._config.sample_bytes
        taken = bytearray(self._config.silence * (stop - self._given))
        while track.pieces and track.pieces[0][0] < stop:
            begin, data = track.pieces.popleft()
            count = min(len(data) // width, stop - begin)
            start = (begin - self._given) * width
            taken[start : start + count * width] = data[: count * width]
            if count * width < len(data):
                track.pieces.appendleft((stop, data[count * width :]))
        return bytes(taken)


class Reorder(Generic[T]):
    """Numbered things, from 1 on, in the order of their numbers, though they come a little out of it.

    A thing waits for those before it until ``window`` others wait with it. One that comes after its place was passed,
    or twice, is left out.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._next = 1
        self._waiting: list[tuple[int, int, T]] = []  # a heap; the second number keeps things from being compared
        self._count = 0

    def take(self, number: int, thing: T) -> list[T]:
        if number < self._next or any(number == waiting[0] for waiting in self._waiting):
            return []
        self._count += 1
        heappush(self._waiting, (number, self._count, thing))
        given: list[T] = []
        while self._waiting and (self._waiting[0][0] == self._next or len(self._waiting) > self._window):
            given.append(self._pop())
        return given

    def flush(self) -> list[T]:
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> T:
        number, _, thing = heappop(self._waiting)
        self._next = number + 1
        return thing
