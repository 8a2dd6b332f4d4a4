"""What a session returns: a closed union of outputs, which the shell matches on.

All positions are samples at 16 kHz since the start of the stream.
"""

from dataclasses import dataclass

from streaming.errors import SttError
from streaming.types import DecodeRequest, Word


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Someone began to speak at ``at_sample``; exactly one SpeechStopped follows, then one final or failure."""

    utterance_id: int
    channel: int
    at_sample: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The utterance's speech ended at ``at_sample`` (the start of the pause that closed it, or a forced cut)."""

    utterance_id: int
    channel: int
    at_sample: int


@dataclass(frozen=True, slots=True)
class PartialTranscript:
    """The text so far: ``committed`` only grows within an utterance, ``tentative`` may change with the next one.

    ``words`` are those of both, in order; their times and probabilities may still change.
    """

    utterance_id: int
    channel: int
    committed: str
    tentative: str
    start_sample: int
    end_sample: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalTranscript:
    """The utterance's settled text ("" where no words were said). ``confidence`` is in [0, 1].

    ``continues`` is True where the utterance was opened by a forced cut, so no pause lies before it.
    """

    utterance_id: int
    channel: int
    text: str
    words: tuple[Word, ...]
    language: str
    language_probability: float
    confidence: float
    start_sample: int
    end_sample: int
    continues: bool = False
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """The utterance's audio could not be decoded; nothing was said about it."""

    utterance_id: int
    channel: int
    start_sample: int
    end_sample: int
    error: SttError


@dataclass(frozen=True, slots=True)
class Decode:
    """Ask the recognizer, then give the answer to ``receive_hypothesis`` or the error to ``receive_failure``."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """The answer to this request is no longer wanted; the shell may stop it. A late answer changes nothing."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SessionDone:
    """After ``receive_eof``: every utterance has its final or failure. Nothing follows."""

    received_samples: int


Transcript = PartialTranscript | FinalTranscript | TranscriptFailed
ClientEvent = SpeechStarted | SpeechStopped | Transcript | SessionDone  # what a client is told
Output = SpeechStarted | SpeechStopped | Transcript | Decode | CancelDecode | SessionDone
