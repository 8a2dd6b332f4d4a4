"""Where a session lies on the clock of its connection, which may have had others before it. Pure."""

from dataclasses import dataclass, replace

from app.dialect import Complaint, Lag, Marked, ToClient
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import Word


@dataclass(frozen=True, slots=True)
class Offset:
    """How much came before the session: samples at 16 kHz, and utterances."""

    samples: int = 0
    utterances: int = 0

    def apply(self, event: ToClient) -> ToClient:
        """The event as the connection counts."""
        if self == Offset():
            return event
        match event:
            case SpeechStarted(utterance, _, at) | SpeechStopped(utterance, _, at):
                return replace(event, utterance_id=utterance + self.utterances, at_sample=at + self.samples)
            case FinalTranscript(utterance, start_sample=start, end_sample=end) | PartialTranscript(
                utterance, start_sample=start, end_sample=end
            ):
                words = tuple(self._word(word) for word in event.words)
                utterance, start, end = utterance + self.utterances, start + self.samples, end + self.samples
                return replace(event, utterance_id=utterance, start_sample=start, end_sample=end, words=words)
            case TranscriptFailed(utterance, start_sample=start, end_sample=end):
                utterance, start, end = utterance + self.utterances, start + self.samples, end + self.samples
                return replace(event, utterance_id=utterance, start_sample=start, end_sample=end)
            case SessionDone(received):
                return SessionDone(received + self.samples)
            case Lag(received, covered):
                return Lag(received + self.samples, covered + self.samples)
            case Complaint() | Marked():
                return event

    def _word(self, word: Word) -> Word:
        return replace(word, start_sample=word.start_sample + self.samples, end_sample=word.end_sample + self.samples)
