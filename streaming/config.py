"""Frozen, validated settings of the core. Every name carries its unit."""

from dataclasses import dataclass, field
from enum import Enum

from streaming.errors import BadMessage
from streaming.types import DecodeOptions, Priority

WINDOW_MS = 32  # Silero's window: 512 samples at 16 kHz

MIN_SAMPLE_RATE_HZ = 4_000
MAX_SAMPLE_RATE_HZ = 192_000
MAX_CHANNELS = 2


class Encoding(Enum):
    """How one sample is written on the wire. All are little-endian."""

    LINEAR16 = "linear16"
    FLOAT32 = "float32"
    MULAW = "mulaw"
    ALAW = "alaw"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadMessage(message, code="bad_parameter")


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The declared form of a stream's bytes; channels are interleaved. Raises BadMessage when out of range."""

    encoding: Encoding = Encoding.LINEAR16
    sample_rate_hz: int = 16_000
    channels: int = 1

    def __post_init__(self) -> None:
        _require(
            MIN_SAMPLE_RATE_HZ <= self.sample_rate_hz <= MAX_SAMPLE_RATE_HZ,
            f"sample_rate must be {MIN_SAMPLE_RATE_HZ} to {MAX_SAMPLE_RATE_HZ} Hz, not {self.sample_rate_hz}",
        )
        _require(1 <= self.channels <= MAX_CHANNELS, f"channels must be 1 to {MAX_CHANNELS}, not {self.channels}")

    @property
    def sample_bytes(self) -> int:
        return {Encoding.LINEAR16: 2, Encoding.FLOAT32: 4, Encoding.MULAW: 1, Encoding.ALAW: 1}[self.encoding]

    @property
    def frame_bytes(self) -> int:
        return self.sample_bytes * self.channels


@dataclass(frozen=True, slots=True)
class EndpointerConfig:
    """When speech begins and ends.

    Speech begins where the probability reaches ``threshold`` and stays above ``release_threshold`` for
    ``min_speech_ms``; it ends where the probability falls below ``release_threshold`` and does not reach
    ``threshold`` again for ``pause_ms``. The two thresholds are Silero's own defaults.
    """

    threshold: float = 0.5
    release_threshold: float = 0.35
    min_speech_ms: int = 96
    pause_ms: int = 500

    def __post_init__(self) -> None:
        _require(
            0.0 < self.release_threshold <= self.threshold < 1.0, "thresholds must be 0 < release <= threshold < 1"
        )
        _require(WINDOW_MS <= self.min_speech_ms <= 2_000, "min_speech_ms must be 32 to 2000")
        _require(WINDOW_MS <= self.pause_ms <= 10_000, "pause_ms must be 32 to 10000")


@dataclass(frozen=True, slots=True)
class SegmenterConfig:
    """How utterances are cut out of the audio.

    ``pre_roll_ms`` of audio before the onset is decoded with the utterance, and ``post_roll_ms`` after its end. The
    early final is asked when ``early_roll_ms`` of the pause are there, with no more than that. ``max_utterance_ms``
    forces a cut, at the quietest place of the last ``cut_zone_ms``; words in that zone are not committed before the cut
    is made.
    """

    pre_roll_ms: int = 512
    early_roll_ms: int = 128
    post_roll_ms: int = 320
    max_utterance_ms: int = 20_000
    cut_zone_ms: int = 6_000

    def __post_init__(self) -> None:
        _require(0 <= self.pre_roll_ms <= 2_000, "pre_roll_ms must be 0 to 2000")
        _require(0 <= self.early_roll_ms <= 2_000, "early_roll_ms must be 0 to 2000")
        _require(0 <= self.post_roll_ms <= 2_000, "post_roll_ms must be 0 to 2000")
        _require(1_000 <= self.max_utterance_ms <= 26_000, "max_utterance_ms must be 1000 to 26000")
        _require(
            500 <= self.cut_zone_ms <= self.max_utterance_ms // 2,
            "cut_zone_ms must be at least 500 and at most half of max_utterance_ms",
        )


def cut_zone_ms(max_utterance_ms: int) -> int:
    """The usual cut zone of utterances that may last so long: 6 s, or half of them where they are short."""
    return max(500, min(6_000, max_utterance_ms // 2))


@dataclass(frozen=True, slots=True)
class PartialConfig:
    """When partial transcripts are asked for and how they settle.

    A partial is asked for each ``interval_ms`` of new speech, while none is in flight. A word is committed when two
    successive hypotheses agree on it and it ends ``hold_back_ms`` before the newest audio (LocalAgreement-2, Macháček
    et al. 2023, with a margin because the last words of a cut utterance are the ones that change).
    """

    enabled: bool = True
    interval_ms: int = 400
    hold_back_ms: int = 800

    def __post_init__(self) -> None:
        _require(WINDOW_MS <= self.interval_ms <= 10_000, "interval_ms must be 32 to 10000")
        _require(0 <= self.hold_back_ms <= 5_000, "hold_back_ms must be 0 to 5000")


@dataclass(frozen=True, slots=True)
class ContextConfig:
    """How much of what was said before an utterance is told to the recognizer with it.

    Short utterances are understood worse alone (docs/log.md has figures). Only texts of at least ``min_confidence``
    are passed on, and none across more than ``max_gap_ms`` of silence, so that an error does not live on. At most
    ``max_chars`` are.
    """

    enabled: bool = True
    max_gap_ms: int = 10_000
    max_chars: int = 200
    min_confidence: float = 0.5

    def __post_init__(self) -> None:
        _require(0 <= self.max_gap_ms <= 600_000, "max_gap_ms must be 0 to 600000")
        _require(0 <= self.max_chars <= 1_000, "max_chars must be 0 to 1000")
        _require(0.0 <= self.min_confidence <= 1.0, "min_confidence must be 0 to 1")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Everything a session needs to know, fixed for its life.

    ``early_final`` asks for the final as soon as a pause begins, instead of when it has lasted ``pause_ms``.
    """

    audio: AudioFormat = field(default_factory=AudioFormat)
    endpointer: EndpointerConfig = field(default_factory=EndpointerConfig)
    segmenter: SegmenterConfig = field(default_factory=SegmenterConfig)
    partials: PartialConfig = field(default_factory=PartialConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    options: DecodeOptions = field(default_factory=DecodeOptions)
    early_final: bool = True
    final_priority: Priority = Priority.LIVE_FINAL
