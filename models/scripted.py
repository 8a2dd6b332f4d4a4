"""A detector and a recognizer with no model: the whole service on synthetic audio, and faults on demand.

A word is 100 ms of constant amplitude, and the amplitude says which word. Levels grow by 12 %, so that they survive
mu-law (at most 3 % off) and resampling. The recognizer looks at one sample each 100 ms of stream position, so it sees
a word of 100 ms exactly once however the stream is cut into requests, and longer audio gives the same words, then more.
"""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streaming.errors import BadAudio, Overloaded, RecognizerFailed
from streaming.types import DecodeRequest, Float32, Hypothesis, Pcm16, RecognizerInfo, Word

WORD_SAMPLES = 1_600
# fmt: off
VOCABULARY = (
    "alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima",
    "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor", "whiskey",
    "xray", "yankee", "zulu", "amber", "copper",
)
# fmt: on
_LOWEST_LEVEL = 1_000.0
_LEVEL_RATIO = 1.12
_SPEECH_RMS = 0.01  # -40 dBFS: a third of the quietest word


def encode_words(words: Sequence[str | None]) -> Pcm16:
    """Audio that says these words, int16, shape (1600 * len(words),); None is 100 ms of silence."""
    levels = [0.0 if word is None else _LOWEST_LEVEL * _LEVEL_RATIO ** VOCABULARY.index(word) for word in words]
    return np.repeat(np.round(levels).astype(np.int16), WORD_SAMPLES)


def read_words(audio: Pcm16, start_sample: int) -> tuple[Word, ...]:
    """The words in audio whose first sample has this position in the stream; their positions count from audio[0]."""
    words = []
    first_block = -(-(start_sample - WORD_SAMPLES // 2) // WORD_SAMPLES)
    for middle in range(first_block * WORD_SAMPLES + WORD_SAMPLES // 2 - start_sample, len(audio), WORD_SAMPLES):
        text = _word_at(audio, middle)
        if text is not None:
            begin, end = max(0, middle - WORD_SAMPLES // 2), min(len(audio), middle + WORD_SAMPLES // 2)
            words.append(Word(f" {text}", begin, end, 0.9))
    return tuple(words)


def _word_at(audio: Pcm16, middle: int) -> str | None:
    level = abs(float(audio[middle]))
    if level < _LOWEST_LEVEL / _LEVEL_RATIO**0.5:
        return None
    rank = round(math.log(level / _LOWEST_LEVEL, _LEVEL_RATIO))
    return VOCABULARY[min(rank, len(VOCABULARY) - 1)]


class ScriptedDetector:
    """A SpeechDetector that needs no model: first the probabilities of ``script``, one a window, then loudness."""

    def __init__(self, script: Sequence[float] = ()) -> None:
        self._script = np.asarray(script, dtype=np.float32)

    def probabilities(self, windows: Float32) -> Float32:
        """Windows, float32, shape (n, 512) → probabilities, float32, shape (n,).

        By loudness: 0 in digital silence, 0.5 at -40 dBFS RMS, over 0.9 for the quietest word.
        """
        power = np.mean(np.square(windows, dtype=np.float64), axis=1)
        result: Float32 = (power / (power + _SPEECH_RMS**2)).astype(np.float32)
        scripted, self._script = self._script[: len(result)], self._script[len(result) :]
        result[: len(scripted)] = scripted
        return result


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """How the scripted recognizer behaves. The faults happen on requests whose audio says a given word.

    ``fail_on``: raises RecognizerFailed. ``fault_on``: raises an error that nobody foresaw. ``hang_on``: never
    answers. ``crash_on``: the process dies at once, as from SIGKILL; in-process this is RecognizerFailed.
    ``fail_load``: the engine does not start, with this message. ``garble``: every answer is wrong.
    """

    capacity: int = 2
    max_pending: int = 1_000
    delay_s: float = 0.0
    load_s: float = 0.0
    fail_on: str = ""
    fault_on: str = ""
    hang_on: str = ""
    crash_on: str = ""
    fail_load: str = ""
    garble: bool = False

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.max_pending < 1 or self.delay_s < 0 or self.load_s < 0:
            raise ValueError("capacity and max_pending must be at least 1, delay_s and load_s at least 0")
        for word in (self.fail_on, self.fault_on, self.hang_on, self.crash_on):
            if word and word not in VOCABULARY:
                raise ValueError(f"{word!r} is not in the vocabulary")

    @property
    def info(self) -> RecognizerInfo:
        return RecognizerInfo(
            model="scripted", languages=frozenset({"de", "en", "fr"}), capacity=self.capacity, workers=self.capacity
        )

    def answer(self, request: DecodeRequest) -> Hypothesis:
        """What is said in the request's audio. Raises RecognizerFailed on ``fail_on``, OSError on ``fault_on``."""
        if request.audio.dtype != np.int16 or request.audio.ndim != 1 or len(request.audio) == 0:
            raise BadAudio("a request's audio must be int16, one channel, not empty")
        words = read_words(request.audio, request.start_sample)
        if self.says(self.fail_on, words):
            raise RecognizerFailed("scripted failure")
        if self.says(self.fault_on, words):
            raise OSError("scripted fault")
        text = "".join(word.text for word in words).strip()
        return Hypothesis(
            request_id=request.request_id,
            text="garbled" if self.garble else text,
            words=() if self.garble else words,
            language=request.options.language or "en",
            average_logprob=-0.1,
            no_speech_probability=0.0 if words else 1.0,
            compression_ratio=1.0,
            decode_s=self.delay_s,
        )

    @staticmethod
    def says(trigger: str, words: Sequence[Word]) -> bool:
        return bool(trigger) and any(word.text.strip() == trigger for word in words)


class ScriptedRecognizer:
    """The Recognizer port, in-process. ``capacity`` decodes run at once; ``max_pending`` may wait and run."""

    def __init__(self, config: ScriptedConfig | None = None) -> None:
        self._config = config or ScriptedConfig()
        self._slots = asyncio.Semaphore(self._config.capacity)
        self._pending = 0

    @property
    def info(self) -> RecognizerInfo:
        return self._config.info

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Raises RecognizerFailed on the words ``fail_on``, ``fault_on`` and ``crash_on``, Overloaded when full."""
        if self._pending >= self._config.max_pending:
            raise Overloaded("too many requests are waiting")
        self._pending += 1
        try:
            async with self._slots:
                return await self._decode(request)
        finally:
            self._pending -= 1

    async def _decode(self, request: DecodeRequest) -> Hypothesis:
        words = read_words(request.audio, request.start_sample)
        if self._config.says(self._config.hang_on, words):
            await asyncio.Event().wait()
        await asyncio.sleep(self._config.delay_s)
        if self._config.says(self._config.crash_on, words):
            raise RecognizerFailed("scripted crash")
        try:
            return self._config.answer(request)
        except OSError as error:
            raise RecognizerFailed(str(error)) from error


class ScriptedEngine:
    """The twin that blocks, for the engine process. Raises RecognizerFailed from ``fail_load``."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        time.sleep(config.load_s)
        if config.fail_load:
            raise RecognizerFailed(config.fail_load)

    @property
    def info(self) -> RecognizerInfo:
        return self._config.info

    def decode(self, request: DecodeRequest) -> Hypothesis:
        words = read_words(request.audio, request.start_sample)
        if self._config.says(self._config.crash_on, words):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._config.says(self._config.hang_on, words):
            threading.Event().wait()
        time.sleep(self._config.delay_s)
        return self._config.answer(request)


class ScriptedAsyncEngine:
    """The twin that is awaited, for the engine process. A cancelled decode ends at once, even one that hangs."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config

    @property
    def info(self) -> RecognizerInfo:
        return self._config.info

    async def start(self) -> None:
        """Raises RecognizerFailed from ``fail_load``."""
        await asyncio.sleep(self._config.load_s)
        if self._config.fail_load:
            raise RecognizerFailed(self._config.fail_load)

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        words = read_words(request.audio, request.start_sample)
        if self._config.says(self._config.crash_on, words):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._config.says(self._config.hang_on, words):
            await asyncio.Event().wait()
        await asyncio.sleep(self._config.delay_s)
        return self._config.answer(request)

    async def close(self) -> None:
        """Nothing is held."""
