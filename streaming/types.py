"""The values that travel between the core and a recognizer. All are frozen.

Positions are integers in samples at ``SAMPLE_RATE`` (16 kHz). Whether they count from the start of the stream
or from the start of a request's audio is said at each field.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

Pcm16 = NDArray[np.int16]
Float32 = NDArray[np.float32]


class Task(Enum):
    """What Whisper is asked to do with the speech."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"  # into English


class Priority(IntEnum):
    """Who goes first when an engine is shared; a smaller number goes first."""

    LIVE_FINAL = 0
    LIVE_PARTIAL = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a session asks of every decode.

    ``language`` fixes the language (ISO 639-1 code as Whisper spells it); None detects it for each utterance,
    among ``languages`` when that is not empty. ``prompt`` is text that might have come before; ``hotwords`` are
    words to expect. ``language_hint`` is the language of the session's last confident utterance: a recognizer
    uses it only where its own detection is unsure. ``temperature``, 0 to 1, is where sampling starts: 0 always takes
    the likeliest token.
    """

    language: str | None = None
    languages: tuple[str, ...] = ()
    task: Task = Task.TRANSCRIBE
    prompt: str = ""
    hotwords: tuple[str, ...] = ()
    language_hint: str | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a hypothesis.

    ``text`` keeps Whisper's leading space and punctuation, so that the concatenation of all words is the text in
    every script. ``probability`` is in [0, 1].
    """

    text: str
    start_sample: int
    end_sample: int
    probability: float


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """One question to a recognizer: what is said in this audio?

    ``audio``: int16, shape (n,), mono, 16 kHz, n >= 1 and at most 30 s. ``start_sample``: position of audio[0] in
    the stream. ``speech_samples``: how many of the samples the detector called speech, for the guard against text
    that covers far less. ``committed``: text already shown as settled, which the answer should start with.
    ``context``: what was said just before this audio, in ``context_language``; a recognizer may condition its answer
    on it, where that is the language of this audio too. ``request_id`` is unique within its session.
    """

    request_id: int
    utterance_id: int
    channel: int
    priority: Priority
    audio: Pcm16
    start_sample: int
    speech_samples: int
    committed: str = ""
    context: str = ""
    context_language: str = ""
    options: DecodeOptions = field(default_factory=DecodeOptions)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A recognizer's answer to the request with the same ``request_id``.

    Word positions count from the start of the request's audio. ``text`` is "" where nothing is said; then
    ``rejected`` may name the guard that dropped a text ("no_speech", "repetition", ...). ``average_logprob`` is per
    token, natural logarithm. ``full_window`` says that the 30 s window was decoded instead of the shaped one.
    ``decode_s``: the engine's time that it took, its share where several were decoded together.
    ``decoder_steps``: steps that made text, over all rungs; ``decoder_steps_saved``: those that a draft spared.
    An engine that does not count them leaves both 0.
    """

    request_id: int
    text: str
    words: tuple[Word, ...] = ()
    language: str = ""
    language_probability: float = 1.0
    average_logprob: float = 0.0
    no_speech_probability: float = 0.0
    compression_ratio: float = 0.0
    temperature: float = 0.0
    full_window: bool = False
    rejected: str = ""
    decode_s: float = 0.0
    decoder_steps: int = 0
    decoder_steps_saved: int = 0


@dataclass(frozen=True, slots=True)
class RecognizerInfo:
    """What a ready recognizer is: its model's name, the language codes it knows, and how many decodes run at once.

    ``workers``: how much it can do, in seconds of ``Hypothesis.decode_s`` a second.
    """

    model: str
    languages: frozenset[str]
    capacity: int
    workers: int = 1
