"""Synthetic speech whose words can be read back from the samples, and a driver that plays recognizer for a session.

A word is a stretch of constant amplitude that encodes its number; words are separated by short dips that the detector
still calls speech, and utterances by silence.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from streaming.audio import SAMPLE_RATE, to_pcm16
from streaming.errors import RecognizerFailed
from streaming.events import (
    CancelDecode,
    Decode,
    FinalTranscript,
    Output,
    PartialTranscript,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.session import Session
from streaming.types import DecodeRequest, Float32, Hypothesis, Pcm16, Priority, Word

T = TypeVar("T")

DIP_LEVEL = 0.02
FIRST_LEVEL = 0.05
LEVEL_STEP = 0.01
SHORTEST_WORD_SAMPLES = 1_600


class LevelDetector:
    """Probability 0.9 where a window is louder than any silence, 0.1 elsewhere."""

    def probabilities(self, windows: Float32) -> Float32:
        rms = np.sqrt(np.mean(windows**2, axis=1))
        return np.where(rms > DIP_LEVEL / 3, 0.9, 0.1).astype(np.float32)


def silence(ms: int) -> Float32:
    return np.zeros(ms * SAMPLE_RATE // 1000, np.float32)


def speech(numbers: Sequence[int], word_ms: int = 240, dip_ms: int = 96) -> Float32:
    """The words with these numbers (0 to 80), one after the other."""
    dip = np.full(dip_ms * SAMPLE_RATE // 1000, DIP_LEVEL, np.float32)
    words = [np.full(word_ms * SAMPLE_RATE // 1000, FIRST_LEVEL + LEVEL_STEP * n, np.float32) for n in numbers]
    return np.concatenate([part for word in words for part in (word, dip)])


def read_words(audio: Pcm16) -> tuple[Word, ...]:
    """The words in the audio; one that is cut by an edge of it counts from 100 ms on, as real ones do."""
    if not audio.size:
        return ()
    level = audio.astype(np.float32) / 32768
    number = np.where(level > FIRST_LEVEL - LEVEL_STEP / 2, np.rint((level - FIRST_LEVEL) / LEVEL_STEP), -1)
    edges = np.flatnonzero(np.diff(number)) + 1
    bounds = [0, *edges.tolist(), number.size]
    return tuple(
        Word(f" w{int(number[start])}", start, end, 0.9)
        for start, end in itertools.pairwise(bounds)
        if number[start] >= 0 and end - start >= SHORTEST_WORD_SAMPLES
    )


def recognize(request: DecodeRequest) -> Hypothesis:
    words = read_words(request.audio)
    text = "".join(word.text for word in words).strip()
    return Hypothesis(request.request_id, text, words, language="en", language_probability=0.9)


def pcm_bytes(samples: Float32) -> bytes:
    return to_pcm16(samples).tobytes()


@dataclass
class Driver:
    """Carries out a session's decodes. ``order`` picks which waiting request is answered next."""

    session: Session
    recognize: Callable[[DecodeRequest], Hypothesis] = recognize
    fails: Callable[[DecodeRequest], bool] = lambda request: False
    outputs: list[Output] = field(default_factory=list)
    requests: list[DecodeRequest] = field(default_factory=list)
    waiting: list[DecodeRequest] = field(default_factory=list)

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Decode(request):
                    self.waiting.append(request)
                    self.requests.append(request)
                    partials = [r for r in self.waiting if r.priority is Priority.LIVE_PARTIAL]
                    assert len({r.channel for r in partials}) == len(partials), "two partials in flight"
                case CancelDecode(request_id):
                    self.waiting = [r for r in self.waiting if r.request_id != request_id]
                case _:
                    self.outputs.append(output)

    def answer(self, index: int = 0) -> None:
        request = self.waiting.pop(index)
        if request.priority is Priority.LIVE_PARTIAL and request.request_id % 2:  # as if it had waited for its turn
            request = self.session.renew(request.request_id) or request
        if self.fails(request):
            self.take(self.session.receive_failure(request.request_id, RecognizerFailed("it died")))
        else:
            self.take(self.session.receive_hypothesis(self.recognize(request)))

    def answer_all(self) -> None:
        while self.waiting:
            self.answer()

    def of_type(self, kind: type[T]) -> list[T]:
        return [output for output in self.outputs if isinstance(output, kind)]

    def settled(self) -> list[tuple[object, ...]]:
        """The outputs that must not depend on how the audio was cut, in a comparable form."""
        kept: list[tuple[object, ...]] = []
        for output in self.outputs:
            match output:
                case SpeechStarted(utterance, channel, at):
                    kept.append(("started", utterance, channel, at))
                case SpeechStopped(utterance, channel, at):
                    kept.append(("stopped", utterance, channel, at))
                case FinalTranscript():
                    kept.append(("final", output.utterance_id, output.text, output.start_sample, output.end_sample))
                case TranscriptFailed():
                    kept.append(("failed", output.utterance_id, output.start_sample, output.end_sample))
                case PartialTranscript():
                    pass
        return sorted(kept, key=repr)

    def final_questions(self) -> dict[int, tuple[int, int, str]]:
        """What each final was asked with: where its audio starts, how long it is, and the context."""
        asked = {r.utterance_id: r for r in self.requests if r.priority is Priority.LIVE_FINAL}  # the last one counts
        return {number: (r.start_sample, r.audio.size, r.context) for number, r in asked.items()}
