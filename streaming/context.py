"""What was said just before, as a recognizer may be told it. One memory a channel."""

from streaming.audio import ms_to_samples
from streaming.config import ContextConfig
from streaming.events import FinalTranscript, TranscriptFailed


class Context:
    """Remembers the end of the newest finals, while they are sure and recent enough to help."""

    def __init__(self, config: ContextConfig) -> None:
        self._config = config
        self._max_gap = ms_to_samples(config.max_gap_ms)
        self._text = ""
        self._end_sample = 0
        self.language = ""

    def add(self, outcome: FinalTranscript | TranscriptFailed) -> None:
        """The next outcome, in the order of speech. One that is unsure or failed ends what was remembered.

        An utterance without words changes nothing: a cough is no change of subject.
        """
        if isinstance(outcome, TranscriptFailed):
            self._text = ""
        elif outcome.text:
            before = self.before(outcome.start_sample) if outcome.language == self.language else ""
            is_sure = outcome.confidence >= self._config.min_confidence
            self._text = self._tail(f"{before} {outcome.text}".strip()) if is_sure else ""
            self._end_sample, self.language = outcome.end_sample, outcome.language

    def before(self, start_sample: int) -> str:
        """The text for an utterance that starts here, "" where there is none."""
        is_recent = start_sample - self._end_sample <= self._max_gap
        return self._text if self._config.enabled and is_recent else ""

    def _tail(self, text: str) -> str:
        """The last whole words that fit."""
        if len(text) <= self._config.max_chars:
            return text
        cut = text[len(text) - self._config.max_chars :]
        _, space, rest = cut.partition(" ")
        return rest if space else cut
