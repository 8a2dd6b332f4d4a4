"""Speech probabilities → onsets, pauses and endpoints. Knows no audio and no model.

                p >= threshold                  min_speech reached: Onset
      QUIET ───────────────────────▶ STARTING ───────────────────────▶ SPEAKING ◀─────────────┐
        ▲                               │                                 │  p < release        │ p >= threshold:
        │◀──────────────────────────────┘ p < release                     ▼  PauseBegan         │ Resumed
        │◀─────────────────────────────────────────────────────────── STOPPING ───────────────┘
                              pause reached: Endpoint

Positions are window indices since the start of the stream.
"""

from dataclasses import dataclass
from enum import Enum, auto

from streaming.config import WINDOW_MS, EndpointerConfig

_SHORTEST_CLOSED_WINDOWS = 2


class State(Enum):
    QUIET = auto()
    STARTING = auto()
    SPEAKING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class Onset:
    """Speech began with ``window``."""

    window: int


@dataclass(frozen=True, slots=True)
class PauseBegan:
    """``window`` is the first without speech; the utterance may be over."""

    window: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Speech went on at ``window``; the pause was none."""

    window: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Speech ended; ``window`` is the first that is not part of it."""

    window: int


Event = Onset | PauseBegan | Resumed | Endpoint


def windows_for(ms: int) -> int:
    """How many whole windows last at least ``ms``."""
    return -(-ms // WINDOW_MS)


class Endpointer:
    """Feed it one probability a window, in order."""

    def __init__(self, config: EndpointerConfig) -> None:
        self._config = config
        self._min_speech_windows = windows_for(config.min_speech_ms)
        self._pause_windows = windows_for(config.pause_ms)
        self._next_window = 0
        self._since = 0  # where the current STARTING or STOPPING began
        self.state = State.QUIET

    def step(self, probability: float) -> list[Event]:
        """The events of one window; a pause as short as a window gives PauseBegan and Endpoint together."""
        window = self._next_window
        self._next_window += 1
        loud, quiet = probability >= self._config.threshold, probability < self._config.release_threshold
        match self.state:
            case State.QUIET if loud:
                self.state, self._since = State.STARTING, window
                return self._try_onset(window)
            case State.STARTING:
                if quiet:
                    self.state = State.QUIET
                    return []
                return self._try_onset(window)
            case State.SPEAKING if quiet:
                self.state, self._since = State.STOPPING, window
                return [PauseBegan(window), *self._try_endpoint(window)]
            case State.STOPPING:
                if loud:
                    self.state = State.SPEAKING
                    return [Resumed(window)]
                return self._try_endpoint(window)
            case _:
                return []

    def close(self) -> list[Event]:
        """End what is open now, as a client's commit or the end of the stream does.

        Speech still too short to count is taken at the client's word: it gives Onset and Endpoint. A single window is
        not: it is what an earlier close left of a word.
        """
        state, self.state = self.state, State.QUIET
        match state:
            case State.QUIET:
                return []
            case State.STARTING if self._next_window - self._since < _SHORTEST_CLOSED_WINDOWS:
                return []
            case State.STARTING:
                return [Onset(self._since), Endpoint(self._next_window)]
            case State.SPEAKING:
                return [Endpoint(self._next_window)]
            case State.STOPPING:
                return [Endpoint(self._since)]

    def _try_onset(self, window: int) -> list[Event]:
        if window - self._since + 1 < self._min_speech_windows:
            return []
        self.state = State.SPEAKING
        return [Onset(self._since)]

    def _try_endpoint(self, window: int) -> list[Event]:
        if window - self._since + 1 < self._pause_windows:
            return []
        self.state = State.QUIET
        return [Endpoint(self._since)]
