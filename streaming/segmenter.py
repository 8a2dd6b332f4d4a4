"""Windows with their speech probabilities → utterances with their audio. Memory is bounded by the longest utterance.

Every window that the endpointer calls speech lies in exactly one utterance: utterances never overlap in speech, and a
forced cut ends one exactly where it begins the next.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from streaming.audio import WINDOW_SAMPLES, to_pcm16
from streaming.config import EndpointerConfig, SegmenterConfig
from streaming.endpointer import Endpoint, Endpointer, Onset, PauseBegan, Resumed, State, windows_for
from streaming.types import Float32, Pcm16

_CUT_SMOOTHING_WINDOWS = 3  # ~100 ms: shorter dips are stop consonants inside a word
_CUT_GUARD_WINDOWS = 3  # the newest windows are not cut: the dip may not be over


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a channel's audio: int16 at 16 kHz, where it starts, and how much of it is speech."""

    audio: Pcm16
    start_sample: int
    speech_samples: int


@dataclass(frozen=True, slots=True)
class Opened:
    """An utterance began; ``continues`` after a forced cut."""

    start_sample: int
    continues: bool


@dataclass(frozen=True, slots=True)
class Unpaused:
    """The open utterance goes on after ``is_paused`` had been true."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The open utterance ended at ``end_sample``. ``early``: what its early final decodes; ``segment``: all of it."""

    end_sample: int
    early: Segment
    segment: Segment


SegmenterEvent = Opened | Unpaused | Closed


@dataclass(slots=True)
class _Window:
    pcm: Pcm16
    probability: float
    energy: float


class Segmenter:
    """One channel's cutter: push windows, get utterance events."""

    def __init__(self, endpointer: EndpointerConfig, config: SegmenterConfig) -> None:
        self._endpointer = Endpointer(endpointer)
        self._release_threshold = endpointer.release_threshold
        self._pre_roll = windows_for(config.pre_roll_ms)
        self._post_roll = min(windows_for(config.post_roll_ms), windows_for(endpointer.pause_ms))
        self._early_roll = min(windows_for(config.early_roll_ms), self._post_roll)
        self._longest = windows_for(config.max_utterance_ms)
        self._cut_zone = windows_for(config.cut_zone_ms)
        # STARTING windows are kept besides the pre-roll, until the onset is sure.
        self._kept_when_quiet = self._pre_roll + windows_for(endpointer.min_speech_ms)
        self._windows: deque[_Window] = deque()
        self._base = 0  # index of _windows[0]
        self._next = 0  # index of the next window
        self._audio_start = 0  # first window of the open utterance's audio
        self._speech_start = 0
        self._pause_start: int | None = None
        self._paused = False
        self._used = 0  # windows before this went into an earlier utterance's audio
        self.is_open = False

    @property
    def retained_samples(self) -> int:
        return len(self._windows) * WINDOW_SAMPLES

    @property
    def position(self) -> int:
        """Samples pushed so far."""
        return self._next * WINDOW_SAMPLES

    @property
    def speech_start(self) -> int:
        """Sample where the open utterance's speech began."""
        return self._speech_start * WINDOW_SAMPLES

    @property
    def cut_limit(self) -> int:
        """Sample before which a forced cut of the open utterance will not fall."""
        return (self._speech_start + self._longest - self._cut_zone) * WINDOW_SAMPLES

    @property
    def speech_windows(self) -> int:
        """How many windows the open utterance's speech has lasted, pauses included."""
        return self._next - self._speech_start

    @property
    def is_paused(self) -> bool:
        """Is the open utterance in a pause, with the audio that its early final needs all there?"""
        return self._paused

    @property
    def is_quiet(self) -> bool:
        """Has the open utterance's speech stopped, for however short a time so far?"""
        return self._pause_start is not None

    def push(self, window: Float32, probability: float) -> list[SegmenterEvent]:
        """One window, float32 (512,), and its probability."""
        self._windows.append(_Window(to_pcm16(window), probability, float(np.dot(window, window))))
        self._next += 1
        events: list[SegmenterEvent] = []
        for event in self._endpointer.step(probability):
            events += self._on_endpointer(event)
        if self.is_open:
            events += self._on_open()
        self._forget()
        return events

    def close(self) -> list[SegmenterEvent]:
        """End the open utterance now (commit, or the end of the stream)."""
        events: list[SegmenterEvent] = []
        for event in self._endpointer.close():
            events += self._on_endpointer(event)
        self._forget()
        return events

    def segment(self) -> Segment:
        """The open utterance's audio: all of it so far, or in a pause as much as its early final decodes."""
        end = self._next
        if self._pause_start is not None:
            end = min(end, self._pause_start + self._early_roll)
        return self._cut(end)

    def _on_endpointer(self, event: Onset | PauseBegan | Resumed | Endpoint) -> list[SegmenterEvent]:
        match event:
            case Onset(window):
                return [self._open(window, max(window - self._pre_roll, self._used, self._base), continues=False)]
            case PauseBegan(window):
                self._pause_start, self._paused = window, False
                return []
            case Resumed():
                was_paused, self._pause_start, self._paused = self._paused, None, False
                return [Unpaused()] if was_paused else []
            case Endpoint(window):
                return [self._close(window, min(self._next, window + self._post_roll))]

    def _on_open(self) -> list[SegmenterEvent]:
        if self._pause_start is not None and self._next - self._pause_start >= self._early_roll:
            self._paused = True
        return self._force() if self.speech_windows >= self._longest else []

    def _force(self) -> list[SegmenterEvent]:
        """The utterance is as long as may be: end it at its pause, or cut it where it is quietest."""
        if self._endpointer.state is State.STOPPING:
            return self.close()
        cut = self._quietest()
        return [self._close(cut, cut), self._open(cut, cut, continues=True)]

    def _quietest(self) -> int:
        """The window of least energy, smoothed, in the open utterance's cut zone."""
        first = self.cut_limit // WINDOW_SAMPLES
        last = max(first + 1, self._next - _CUT_GUARD_WINDOWS)
        half = _CUT_SMOOTHING_WINDOWS // 2
        energy = np.array([w.energy for w in self._between(first - half, last + half)])
        smooth = np.convolve(energy, np.ones(_CUT_SMOOTHING_WINDOWS), mode="valid")
        return first + int(np.argmin(smooth))

    def _open(self, speech_start: int, audio_start: int, *, continues: bool) -> Opened:
        self.is_open = True
        self._speech_start, self._audio_start = speech_start, audio_start
        self._pause_start, self._paused = None, False
        return Opened(speech_start * WINDOW_SAMPLES, continues)

    def _close(self, speech_end: int, audio_end: int) -> Closed:
        early_end = min(audio_end, speech_end + self._early_roll)
        closed = Closed(speech_end * WINDOW_SAMPLES, self._cut(early_end), self._cut(audio_end))
        self.is_open, self._pause_start, self._paused = False, None, False
        self._used = audio_end
        return closed

    def _between(self, first: int, last: int) -> list[_Window]:
        return [self._windows[i - self._base] for i in range(max(first, self._base), min(last, self._next))]

    def _cut(self, audio_end: int) -> Segment:
        windows = self._between(self._audio_start, audio_end)
        speech = sum(w.probability >= self._release_threshold for w in windows)
        audio = np.concatenate([w.pcm for w in windows])
        return Segment(audio, self._audio_start * WINDOW_SAMPLES, speech * WINDOW_SAMPLES)

    def _forget(self) -> None:
        keep = self._audio_start if self.is_open else self._next - self._kept_when_quiet
        while self._base < keep:
            self._windows.popleft()
            self._base += 1
