"""What the core needs from the outside, as protocols. Each has one contract suite in tests/contracts."""

from typing import Protocol

from streaming.types import DecodeRequest, Float32, Hypothesis, RecognizerInfo


class SpeechDetector(Protocol):
    """Says how likely each window holds speech. Stateful: one detector serves one channel of one stream."""

    def probabilities(self, windows: Float32) -> Float32:
        """Windows, float32 in [-1, 1], shape (n, 512) at 16 kHz, in stream order → probabilities, shape (n,).

        The result does not depend on how the stream's windows are split over calls.
        """
        ...


class Recognizer(Protocol):
    """Turns audio into text. One recognizer serves many sessions at once."""

    @property
    def info(self) -> RecognizerInfo:
        """Valid once the recognizer is ready."""
        ...

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request. Cancelling the call gives the work up.

        Raises RecognizerFailed when no answer can be had, Overloaded when the engine takes no more work.
        """
        ...
