"""When an utterance's audio is worth a decode, and what an answer that comes back is good for.

While speech goes on, one partial at a time, each ``interval_ms`` of new audio, always of the newest audio. When a pause
begins, the final is asked before the pause is long enough to end the utterance (the early final): its audio is already
all there, so if the pause holds, the final is ready or nearly so; if speech resumes, the answer was a partial.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from streaming.audio import ms_to_samples
from streaming.config import PartialConfig
from streaming.segmenter import Segment
from streaming.types import Hypothesis


class Purpose(Enum):
    """What an outstanding request is wanted for."""

    PARTIAL = auto()
    EARLY_FINAL = auto()  # a final if the pause holds
    FINAL = auto()


@dataclass(frozen=True, slots=True)
class Asked:
    """An outstanding or answered request of one utterance."""

    request_id: int
    purpose: Purpose
    segment: Segment
    answer: Hypothesis | None = None

    @property
    def end_sample(self) -> int:
        return self.segment.start_sample + self.segment.audio.size


class Scheduler:
    """One utterance's requests. Says when to ask; the session makes the requests and brings the answers."""

    def __init__(self, config: PartialConfig, *, early_final: bool) -> None:
        self._interval = ms_to_samples(config.interval_ms)
        self._enabled = config.enabled
        self._early_final = early_final
        self._early_final_failed = False  # in this pause; asking again would only fail again
        self._last_end: int | None = None  # where the newest asked audio ends
        self.in_flight: Asked | None = None
        self.final: Asked | None = None  # an early final or the final, outstanding or answered

    def wants_partial(self, speech_start: int, now: int) -> bool:
        """Is it time for a partial of the audio up to ``now``?"""
        since = self._last_end if self._last_end is not None else speech_start
        return self._enabled and self.in_flight is None and now - since >= self._interval

    def wants_early_final(self) -> bool:
        """In a pause: has the final not been asked for yet?"""
        return self._early_final and self.final is None and not self._early_final_failed

    def asked(self, asked: Asked) -> list[int]:
        """Note a request; returns the ids of requests that it makes needless."""
        self._last_end = asked.end_sample
        if asked.purpose is Purpose.PARTIAL:
            self.in_flight = asked
            return []
        stale = [] if self.in_flight is None else [self.in_flight.request_id]
        self.in_flight, self.final = None, asked
        return stale

    def renewed(self, request_id: int, segment: Segment) -> bool:
        """The partial in flight, which no engine has begun, is now of this audio. False where it is not in flight."""
        if self.in_flight is None or self.in_flight.request_id != request_id:
            return False
        self.in_flight = replace(self.in_flight, segment=segment)
        self._last_end = self.in_flight.end_sample
        return True

    def resumed(self) -> None:
        """Speech went on: an early final still out becomes the partial in flight."""
        if self.final is not None and self.final.answer is None:
            self.in_flight = replace(self.final, purpose=Purpose.PARTIAL)
        self.final = None
        self._early_final_failed = False

    def settle(self) -> tuple[Asked | None, list[int]]:
        """The utterance ended: an early final, asked or answered, is the final; None when there is none.

        Also the ids of requests that are needless now.
        """
        stale = [] if self.in_flight is None else [self.in_flight.request_id]
        self.in_flight = None
        if self.final is not None:
            self.final = replace(self.final, purpose=Purpose.FINAL)
        return self.final, stale

    def answered(self, hypothesis: Hypothesis) -> Asked | None:
        """The request that this answers, or None when nobody waits for it (stale, late or repeated)."""
        if self.in_flight is not None and self.in_flight.request_id == hypothesis.request_id:
            asked, self.in_flight = replace(self.in_flight, answer=hypothesis), None
            return asked
        if self.final is not None and self.final.answer is None and self.final.request_id == hypothesis.request_id:
            self.final = replace(self.final, answer=hypothesis)
            return self.final
        return None

    def failed(self, request_id: int) -> Asked | None:
        """The request that failed, or None when nobody waits for it; a failed early final is not asked for twice."""
        if self.in_flight is not None and self.in_flight.request_id == request_id:
            asked, self.in_flight = self.in_flight, None
            return asked
        if self.final is not None and self.final.answer is None and self.final.request_id == request_id:
            asked = self.final
            if asked.purpose is Purpose.EARLY_FINAL:
                self.final, self._early_final_failed = None, True
            return asked
        return None
