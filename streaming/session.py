"""One stream, from bytes to transcripts. A session is to speech what h11's Connection is to HTTP.

Six verbs in, a list of outputs back; nothing is awaited and there is no clock but the count of samples:

    receive_audio(bytes)        receive_gap(samples)        receive_commit()
    receive_eof()               receive_hypothesis(h)       receive_failure(request_id, error)

The caller carries out each ``Decode`` and brings its answer; everything else is for the client. A partial that had to
wait for its turn is asked with the newest audio: ``renew``.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from streaming.audio import SAMPLE_RATE, FrameDecoder, Resampler, Windower, ms_to_samples
from streaming.config import SessionConfig
from streaming.context import Context
from streaming.errors import BadMessage, SttError
from streaming.events import (
    CancelDecode,
    Decode,
    FinalTranscript,
    Output,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.ports import SpeechDetector
from streaming.scheduler import Asked, Purpose, Scheduler
from streaming.segmenter import Closed, Opened, Segment, Segmenter, SegmenterEvent, Unpaused
from streaming.stabilizer import Stabilizer, join
from streaming.types import DecodeRequest, Float32, Hypothesis, Priority, Word

_SOFT_ONSET_SAMPLES = 1_600  # 100 ms: a soft consonant may come before the detector is sure
# An early final below this mean log-probability is asked again with all of its audio: "Ask not" over Opus was "As not"
# with 128 ms of the pause, at -1.3, and right with 320 ms.
_SURE_LOGPROB = -0.5
_CONFIDENT_LANGUAGE = 0.5  # below this a detected language is no hint for the next utterance


class _Utterance:
    """What the session remembers of an utterance from its onset to its final."""

    def __init__(self, utterance_id: int, channel: int, opened: Opened, config: SessionConfig) -> None:
        self.id = utterance_id
        self.channel = channel
        self.start_sample = opened.start_sample
        self.end_sample = opened.start_sample
        self.continues = opened.continues
        self.is_open = True
        self.scheduler = Scheduler(config.partials, early_final=config.early_final)
        self.stabilizer = Stabilizer(ms_to_samples(config.partials.hold_back_ms))
        self.covered_sample = opened.start_sample  # up to where the newest answer reaches
        self.shown = ("", "")
        self.waiting: Segment | None = None  # closed, but its final cannot be asked yet
        self.whole: Segment | None = None  # closed, and its early final heard less than this
        self.outcome: FinalTranscript | TranscriptFailed | None = None


@dataclass(slots=True)
class _Channel:
    index: int
    detector: SpeechDetector
    windower: Windower
    segmenter: Segmenter
    context: Context
    unsettled: deque[_Utterance]  # oldest first; the open one, if any, is the last

    @property
    def open(self) -> _Utterance | None:
        return self.unsettled[-1] if self.unsettled and self.unsettled[-1].is_open else None


class Session:
    """One client's stream of one or two channels. Not safe for use from several threads at once."""

    def __init__(self, config: SessionConfig, detectors: Sequence[SpeechDetector]) -> None:
        """``detectors``: a fresh one for each channel of ``config.audio``."""
        if len(detectors) != config.audio.channels:
            raise ValueError(f"{config.audio.channels} channels need as many detectors, not {len(detectors)}")
        self._config = config
        self._frames = FrameDecoder(config.audio)
        self._resampler = Resampler(config.audio.sample_rate_hz, config.audio.channels)
        self._channels = [
            _Channel(
                i,
                detector,
                Windower(),
                Segmenter(config.endpointer, config.segmenter),
                Context(config.context),
                deque(),
            )
            for i, detector in enumerate(detectors)
        ]
        self._received_frames = 0  # at the stream's own rate
        self._next_request = 0
        self._next_utterance = 0
        self._language_hint: str | None = None
        self._eof = False
        self._done = False

    # What the caller may ask ---------------------------------------------------------------------------------

    @property
    def received_samples(self) -> int:
        """How much audio has come, in samples at 16 kHz."""
        return self._received_frames * SAMPLE_RATE // self._config.audio.sample_rate_hz

    @property
    def covered_samples(self) -> int:
        """Up to where everything heard has been answered: silence, a final, or the newest partial."""
        return min(self._covered(channel) for channel in self._channels)

    @property
    def retained_samples(self) -> int:
        """Audio held for utterances that are still open, over all channels, in samples."""
        return sum(channel.segmenter.retained_samples for channel in self._channels)

    @property
    def outstanding(self) -> int:
        """How many utterances wait for their final."""
        return sum(len(c.unsettled) - (c.open is not None) for c in self._channels)

    @property
    def is_done(self) -> bool:
        return self._done

    # The verbs -----------------------------------------------------------------------------------------------

    def receive_audio(self, data: bytes) -> list[Output]:
        """Bytes in the declared format, in any chunking.

        Raises BadAudio when they cannot be what was declared, BadMessage after the end of the stream.
        """
        self._require_open()
        return self._receive_frames(self._frames.decode(data))

    def receive_gap(self, samples: int) -> list[Output]:
        """``samples`` (16 kHz) of audio were lost or not sent: silence takes their place, so that time stays true."""
        self._require_open()
        frames = samples * self._config.audio.sample_rate_hz // SAMPLE_RATE
        return self._receive_frames(np.zeros((frames, self._config.audio.channels), np.float32))

    def receive_commit(self) -> list[Output]:
        """End every open utterance now, without waiting for its pause."""
        self._require_open()
        outputs: list[Output] = []
        for channel in self._channels:
            outputs += self._on_segmenter(channel, channel.segmenter.close())
        return outputs

    def receive_eof(self) -> list[Output]:
        """No more audio will come. ``SessionDone`` follows when every utterance has its final or failure."""
        if self._eof:
            return []
        self._eof = True
        tail = self._resampler.resample(np.zeros((0, self._config.audio.channels), np.float32), last=True)
        outputs = self._receive_resampled(tail)
        for channel in self._channels:
            window, _ = channel.windower.flush()
            outputs += self._receive_windows(channel, window)
            outputs += self._on_segmenter(channel, channel.segmenter.close())
        return outputs + self._settle_done()

    def receive_hypothesis(self, hypothesis: Hypothesis) -> list[Output]:
        """A recognizer's answer. One that nobody waits for changes nothing."""
        for channel in self._channels:
            for utterance in channel.unsettled:
                asked = utterance.scheduler.answered(hypothesis)
                if asked is not None:
                    return self._on_answer(channel, utterance, asked, hypothesis)
        return []

    def receive_failure(self, request_id: int, error: SttError) -> list[Output]:
        """A request got no answer. A lost partial costs nothing; a lost final is reported."""
        for channel in self._channels:
            for utterance in channel.unsettled:
                asked = utterance.scheduler.failed(request_id)
                if asked is None:
                    continue
                if asked.purpose is not Purpose.FINAL:
                    return self._schedule(channel)
                utterance.outcome = TranscriptFailed(
                    utterance.id, channel.index, utterance.start_sample, self._heard(utterance.end_sample), error
                )
                return self._settle(channel)
        return []

    def renew(self, request_id: int) -> DecodeRequest | None:
        """The partial of this id with the newest audio, to be decoded instead; None where the old one should be.

        Only for a request that no recognizer has been given yet.
        """
        for channel in self._channels:
            utterance = channel.open
            if utterance is None or channel.segmenter.is_paused:
                continue
            segment = channel.segmenter.segment()
            if utterance.scheduler.renewed(request_id, segment):
                return self._request(channel, utterance, request_id, Purpose.PARTIAL, segment)
        return None

    # From frames to utterances -------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._eof:
            raise BadMessage("audio or a command came after the end of the stream", code="after_eof")

    def _receive_frames(self, frames: Float32) -> list[Output]:
        self._received_frames += frames.shape[0]
        return self._receive_resampled(self._resampler.resample(frames))

    def _receive_resampled(self, frames: Float32) -> list[Output]:
        outputs: list[Output] = []
        for channel in self._channels:
            windows = channel.windower.push(frames[:, channel.index])
            outputs += self._receive_windows(channel, windows)
        return outputs

    def _receive_windows(self, channel: _Channel, windows: Float32) -> list[Output]:
        outputs: list[Output] = []
        if windows.shape[0]:
            for window, probability in zip(windows, channel.detector.probabilities(windows), strict=True):
                outputs += self._on_segmenter(channel, channel.segmenter.push(window, float(probability)))
            outputs += self._schedule(channel)
        return outputs

    def _on_segmenter(self, channel: _Channel, events: Sequence[SegmenterEvent]) -> list[Output]:
        outputs: list[Output] = []
        for event in events:
            match event:
                case Opened():
                    utterance = _Utterance(self._next_utterance, channel.index, event, self._config)
                    self._next_utterance += 1
                    channel.unsettled.append(utterance)
                    outputs.append(SpeechStarted(utterance.id, channel.index, event.start_sample))
                case Unpaused():
                    channel.unsettled[-1].scheduler.resumed()
                case Closed():
                    outputs += self._close(channel, channel.unsettled[-1], event)
        return outputs

    def _close(self, channel: _Channel, utterance: _Utterance, closed: Closed) -> list[Output]:
        utterance.end_sample, utterance.is_open = closed.end_sample, False
        outputs: list[Output] = [SpeechStopped(utterance.id, channel.index, self._heard(closed.end_sample))]
        final, stale = utterance.scheduler.settle()
        outputs += [CancelDecode(request_id) for request_id in stale]
        is_early = self._config.early_final and closed.early.audio.size < closed.segment.audio.size
        utterance.whole = closed.segment if is_early else None
        if (
            final is None
        ):  # it is asked as the early final would have been: how audio was cut into messages is no matter
            utterance.waiting = closed.early if is_early else closed.segment
            return outputs + self._ask_waiting(channel)
        if final.answer is not None:
            return outputs + self._on_answer(channel, utterance, final, final.answer)
        return outputs

    # When to ask ---------------------------------------------------------------------------------------------

    def _schedule(self, channel: _Channel) -> list[Output]:
        """When all of a call's audio has been heard: ask for what the newest is worth, at most one request."""
        utterance, segmenter = channel.open, channel.segmenter
        if utterance is None or self._eof:
            return []
        if segmenter.is_paused:
            if utterance.scheduler.wants_early_final() and self._may_ask_final(channel, utterance):
                return self._ask(channel, utterance, Purpose.EARLY_FINAL, segmenter.segment())
        elif segmenter.is_quiet and self._config.early_final:
            pass  # the early final is a few windows away, and would wait for a partial that was begun now
        elif utterance.scheduler.wants_partial(segmenter.speech_start, segmenter.position):
            return self._ask(channel, utterance, Purpose.PARTIAL, segmenter.segment())
        return []

    def _may_ask_final(self, channel: _Channel, utterance: _Utterance) -> bool:
        """With context, one after the other: what a final is told must not depend on how fast answers come."""
        return not self._config.context.enabled or utterance is channel.unsettled[0]

    def _ask_waiting(self, channel: _Channel) -> list[Output]:
        outputs: list[Output] = []
        for utterance in channel.unsettled:
            if utterance.waiting is not None and self._may_ask_final(channel, utterance):
                segment, utterance.waiting = utterance.waiting, None
                outputs += self._ask(channel, utterance, Purpose.FINAL, segment)
        return outputs

    def _ask(self, channel: _Channel, utterance: _Utterance, purpose: Purpose, segment: Segment) -> list[Output]:
        asked = Asked(self._next_request, purpose, segment)
        self._next_request += 1
        stale = utterance.scheduler.asked(asked)
        request = self._request(channel, utterance, asked.request_id, purpose, segment)
        return [*(CancelDecode(request_id) for request_id in stale), Decode(request)]

    def _request(
        self, channel: _Channel, utterance: _Utterance, request_id: int, purpose: Purpose, segment: Segment
    ) -> DecodeRequest:
        is_partial = purpose is Purpose.PARTIAL
        return DecodeRequest(
            request_id=request_id,
            utterance_id=utterance.id,
            channel=channel.index,
            priority=Priority.LIVE_PARTIAL if is_partial else self._config.final_priority,
            audio=segment.audio,
            start_sample=segment.start_sample,
            speech_samples=segment.speech_samples,
            committed=join(utterance.stabilizer.committed),
            context=channel.context.before(utterance.start_sample),
            context_language=channel.context.language,
            options=replace(self._config.options, language_hint=self._language_hint),
        )

    # What answers are good for -------------------------------------------------------------------------------

    def _on_answer(
        self, channel: _Channel, utterance: _Utterance, asked: Asked, hypothesis: Hypothesis
    ) -> list[Output]:
        words = _absolute_words(hypothesis, asked.segment)
        utterance.covered_sample = max(utterance.covered_sample, asked.end_sample)
        if (
            asked.purpose is Purpose.FINAL
            and utterance.whole is not None
            and hypothesis.average_logprob < _SURE_LOGPROB
        ):
            segment, utterance.whole = utterance.whole, None
            return self._ask(channel, utterance, Purpose.FINAL, segment)
        if asked.purpose is Purpose.FINAL:
            utterance.outcome = self._final(utterance, words, hypothesis)
            return self._settle(channel)
        return self._partial(channel, utterance, words, asked) + self._schedule(channel)

    def _partial(self, channel: _Channel, utterance: _Utterance, words: Sequence[Word], asked: Asked) -> list[Output]:
        if not words or not self._config.partials.enabled:  # a rejected text is no reason to blank the screen
            return []
        text = utterance.stabilizer.update(words, asked.end_sample, channel.segmenter.cut_limit)
        if (text.committed, text.tentative) == utterance.shown:
            return []
        utterance.shown = (text.committed, text.tentative)
        start_sample, end_sample = utterance.start_sample, self._heard(asked.end_sample)
        shown = tuple(_clamp(word, start_sample, end_sample) for word in utterance.stabilizer.words)
        return [PartialTranscript(utterance.id, utterance.channel, *utterance.shown, start_sample, end_sample, shown)]

    def _final(self, utterance: _Utterance, words: Sequence[Word], hypothesis: Hypothesis) -> FinalTranscript:
        settled = utterance.stabilizer.settle(words)
        if settled and hypothesis.language_probability >= _CONFIDENT_LANGUAGE:
            self._language_hint = hypothesis.language or None
        return FinalTranscript(
            utterance_id=utterance.id,
            channel=utterance.channel,
            text=join(settled),
            words=tuple(_clamp(word, utterance.start_sample, self.received_samples) for word in settled),
            language=hypothesis.language,
            language_probability=hypothesis.language_probability,
            confidence=float(np.mean([word.probability for word in settled])) if settled else 0.0,
            start_sample=utterance.start_sample,
            end_sample=self._heard(utterance.end_sample),
            continues=utterance.continues,
            rejected=hypothesis.rejected,
        )

    def _settle(self, channel: _Channel) -> list[Output]:
        """Give out what is settled, in the order in which it was said."""
        outputs: list[Output] = []
        while channel.unsettled and (outcome := channel.unsettled[0].outcome) is not None:
            channel.unsettled.popleft()
            channel.context.add(outcome)
            outputs.append(outcome)
        return outputs + self._ask_waiting(channel) + self._schedule(channel) + self._settle_done()

    def _settle_done(self) -> list[Output]:
        if not self._eof or self._done or any(channel.unsettled for channel in self._channels):
            return []
        self._done = True
        return [SessionDone(self.received_samples)]

    def _heard(self, sample: int) -> int:
        """The last window is padded with silence: no position lies beyond what was received."""
        return min(sample, self.received_samples)

    def _covered(self, channel: _Channel) -> int:
        if channel.unsettled:
            return self._heard(channel.unsettled[0].covered_sample)
        return self.received_samples


def _clamp(word: Word, onset: int, end: int) -> Word:
    """Whisper's alignment lets a first word begin with the audio; the detector knows better where speech begins."""
    start_sample = max(word.start_sample, onset - _SOFT_ONSET_SAMPLES, 0)
    end_sample = min(max(word.end_sample, start_sample), end)
    return replace(word, start_sample=min(start_sample, end_sample), end_sample=end_sample)


def _absolute_words(hypothesis: Hypothesis, segment: Segment) -> tuple[Word, ...]:
    """The hypothesis' words, counted from the start of the stream; made up evenly where the recognizer gave none."""
    words = hypothesis.words or _even_words(hypothesis, segment.audio.size)
    offset = segment.start_sample
    return tuple(
        replace(word, start_sample=word.start_sample + offset, end_sample=word.end_sample + offset) for word in words
    )


def _even_words(hypothesis: Hypothesis, samples: int) -> tuple[Word, ...]:
    texts = hypothesis.text.split()
    probability = float(np.exp(min(0.0, hypothesis.average_logprob)))
    bounds = [samples * i // len(texts) for i in range(len(texts) + 1)] if texts else []
    return tuple(
        Word(f" {text}", start, end, probability) for text, start, end in zip(texts, bounds, bounds[1:], strict=False)
    )
