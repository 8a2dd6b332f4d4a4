"""Deepgram's live ``/v1/listen`` as a dialect: its messages in, its results out. Pure.

Read against deepgram-sdk 7.17.0 and the clients of LiveKit 1.8.9 and Pipecat 1.14.0. An utterance is one final result:
``is_final`` and ``speech_final`` come together, but where a cut or the client's wish leaves no end of speech.
"""

import hashlib
import json
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.dialect import Action, Audio, Commit, Complaint, Eof, Lag, Marked, Say, Start, ToClient, Wire
from app.wire.deepgram_query import ListenRequest, parse_keyterms
from app.wire.deepgram_text import JsonObject, Spelling, alternative, mean_probability, seconds
from app.wire.native import StreamParameters
from app.wire.wav import WavHead
from streaming.audio import FrameDecoder, ms_to_samples, to_pcm16
from streaming.config import AudioFormat, Encoding
from streaming.errors import BadMessage, ClientError, Overloaded, SttError
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)

IDLE_TIMEOUT_S = 10.0
# Deepgram's own words, by which clients know it.
IDLE_REASON = (
    "Deepgram did not receive audio data or a text message within the timeout window. See https://dpgr.am/net0001"
)
KEEP_ALIVE = '{"type":"KeepAlive"}'
CLOSE_DONE, CLOSE_POLICY, CLOSE_INTERNAL, CLOSE_RESTART, CLOSE_TRY_AGAIN = 1000, 1008, 1011, 1012, 1013

_MODELS = uuid.UUID("6f1c8d5e-5b0a-4c7e-9f43-0a5a1f3d7c21")  # a namespace of our own: a model has one id everywhere
_ONSET_SAMPLES = ms_to_samples(160)  # speech may have begun so long before the detector is sure of it
_MAX_ECHO_CHARS = 1_000  # of a message that could not be understood


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request is called. ``created``: ISO 8601, UTC; ``model``: the served model's name."""

    request_id: str
    created: str
    model: str

    @property
    def model_uuid(self) -> str:
        return str(uuid.uuid5(_MODELS, self.model))

    @property
    def model_info(self) -> JsonObject:
        return {"name": self.model, "version": "hark", "arch": "whisper"}


class SchemaError(BadMessage):
    """A text message that the protocol does not have; ``original`` goes back to who sent it."""

    def __init__(self, message: str, original: str) -> None:
        super().__init__(message)
        self.original = original[:_MAX_ECHO_CHARS]


@dataclass(slots=True)
class _Channel:
    """What has been told of a channel so far; positions in samples at 16 kHz."""

    index: int
    owed: deque[tuple[int, int]] = field(default_factory=deque)  # utterances without their final: id, where it began
    is_speaking: bool = False
    stopped_at: int = -1  # where speech ended last
    stopped_utterance: int = -1
    cut: set[int] = field(default_factory=set)  # of those owed, utterances after which speech went on at once
    last_word_end: int | None = None  # of words whose UtteranceEnd has not been sent

    @property
    def unsure_from(self) -> int | None:
        """Where speech began of which it is not yet known whether it has words; None where there is none."""
        return self.owed[0][1] if self.owed else None


class _Intake:
    """The client's bytes → what a session is given: each channel by itself, or all of them mixed into one.

    What has no declared encoding is a WAV stream: of other containers the transport makes one.
    """

    def __init__(self, request: ListenRequest) -> None:
        self._mixes = not request.multichannel
        self._head = WavHead()
        self._mixer: FrameDecoder | None = None
        self.audio: AudioFormat | None = None  # of the session; None until it is known
        if request.audio is not None:
            self._declare(request.audio)

    def _declare(self, audio: AudioFormat) -> None:
        self.audio = audio
        if self._mixes and audio.channels > 1:
            self._mixer = FrameDecoder(audio)
            self.audio = AudioFormat(Encoding.LINEAR16, audio.sample_rate_hz, 1)

    def push(self, data: bytes) -> bytes:
        """May be nothing, while it is not known yet what the bytes are. Raises BadAudio or BadMessage."""
        if self.audio is None:
            begun = self._head.push(data)
            if begun is None:
                return b""
            audio, data = begun
            self._declare(audio)
        if self._mixer is None:
            return data
        return to_pcm16(self._mixer.decode(data).mean(axis=1)).tobytes()


class DeepgramDialect:
    """One live connection."""

    def __init__(self, request: ListenRequest, defaults: StreamParameters, identity: Identity) -> None:
        """``defaults``: the service's own, for what the protocol leaves open."""
        self._request = request
        self._defaults = defaults
        self._identity = identity
        self._intake = _Intake(request)
        self._is_begun = False  # a session is there
        self._is_changed = False  # and is to have the newest request
        self._given_bytes = 0  # to the sessions
        self._digest = hashlib.sha256()
        self._channels: list[_Channel] = [_Channel(0)]
        self._heard_samples = 0  # up to where the connection's clock is known to be
        self._finalizes = 0
        self._waiting: deque[set[int]] = deque()  # for each Finalize, the utterances whose finals it waits for

    # What the client says ------------------------------------------------------------------------------------

    def open(self) -> Sequence[Action]:
        return self._begin()

    def receive(self, message: Wire) -> Sequence[Action]:
        """Raises BadAudio where a stream without a declared encoding is no WAV."""
        return self._hear(message) if isinstance(message, bytes) else self._read(message)

    def _begin(self) -> list[Action]:
        """A session, as soon as it is known what it is to hear, and once more after a change."""
        audio = self._intake.audio
        if audio is None or (self._is_begun and not self._is_changed):
            return []
        if not self._is_begun:
            self._channels = [_Channel(index) for index in range(audio.channels)]
        self._is_begun, self._is_changed = True, False
        return [Start(self._request.session_config(audio, self._defaults))]

    def _hear(self, data: bytes) -> list[Action]:
        if not data:  # how streams were ended before there was a CloseStream
            return [Eof()]
        self._digest.update(data)
        pcm = self._intake.push(data)
        actions = self._begin() if self._may_begin() else []
        self._given_bytes += len(pcm)
        return [*actions, Audio(pcm)] if pcm else actions

    def _may_begin(self) -> bool:
        """A new session ends what is being said, and knows nothing of a sample that has come in half."""
        audio = self._intake.audio
        is_quiet = not any(channel.is_speaking for channel in self._channels)
        return audio is not None and is_quiet and self._given_bytes % audio.frame_bytes == 0

    def _read(self, text: str) -> list[Action]:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):  # an integer of thousands of digits is a plain ValueError
            return [Complaint(SchemaError('a text message must be JSON, such as {"type":"KeepAlive"}', text))]
        kind = message.get("type") if isinstance(message, dict) else None
        match kind:
            case "KeepAlive":
                return []
            case "Finalize":
                self._finalizes += 1
                return [Commit(mark=f"finalize-{self._finalizes}")]
            case "CloseStream":
                return [Eof()]
            case "Configure":
                return self._configure(message, text)
            case _:
                known = "KeepAlive, Finalize, CloseStream and Configure"
                return [Complaint(SchemaError(f"the type of a message must be one of {known}", text))]

    def _configure(self, message: Mapping[str, Any], text: str) -> list[Action]:
        """Holds from the next utterance on. Features that are not known are ignored, as in the query."""
        terms, features = message.get("keyterms"), message.get("features")
        if not (_is_texts(terms) and _is_flags(features)):
            return [Complaint(SchemaError("keyterms must be a list of texts, features an object of booleans", text))]
        answer: JsonObject = {"type": "ConfigureSuccess", "request_id": self._identity.request_id}
        if features:
            wished = features.get("punctuate", self._request.is_punctuated) or features.get("smart_format", False)
            self._request = replace(self._request, is_punctuated=wished)
        if terms is not None:
            try:
                self._request = replace(self._request, keyterms=parse_keyterms(terms))
            except BadMessage as error:
                return [self._configure_failure("CONFIGURE_KEYTERM_LIMIT_EXCEEDED", error.message)]
            self._is_changed = True
            answer["keyterms"] = list(self._request.keyterms)
        return [Say(_dump(answer))]

    def _configure_failure(self, code: str, description: str) -> Say:
        request_id = self._identity.request_id
        return Say(
            _dump({"type": "ConfigureFailure", "request_id": request_id, "code": code, "description": description})
        )

    # What it is told -----------------------------------------------------------------------------------------

    def render(self, event: ToClient) -> Sequence[Wire]:
        return [_dump(message) for message in self._messages(event)]

    def _messages(self, event: ToClient) -> Iterator[JsonObject]:
        match event:
            case SpeechStarted():
                yield from self._speech_started(event)
            case SpeechStopped(utterance, index, at):
                channel = self._channels[index]
                channel.is_speaking, channel.stopped_at, channel.stopped_utterance = False, at, utterance
                self._reach(at)
            case PartialTranscript() if self._request.interim_results:
                yield self._interim(event)
            case FinalTranscript():
                yield from self._final(event)
            case TranscriptFailed(error=error):
                yield _error(error)
                yield from self._settle(event, alternative("", (), 0.0, "", self._spelling), last_word_end=None)
            case Marked():
                yield from self._finalized()
            case Lag(received, _):
                self._reach(received)
                yield from self._quiet(received - _ONSET_SAMPLES)
            case Complaint(error):
                yield _error(error)
            case PartialTranscript():  # an early final's answer makes one too, where no partials are asked for
                pass
            case SessionDone(received):
                self._reach(received)
                yield from self._quiet(received)
                yield self._metadata(received)

    def _reach(self, sample: int) -> None:
        self._heard_samples = max(self._heard_samples, sample)

    @property
    def _spelling(self) -> Spelling:
        request = self._request
        return Spelling(request.is_punctuated, names_languages=request.language is None)

    def _speech_started(self, event: SpeechStarted) -> Iterator[JsonObject]:
        """Where one utterance ends in the middle of speech, by a cut or a Finalize, nobody has begun to speak."""
        channel = self._channels[event.channel]
        self._reach(event.at_sample)
        goes_on = event.at_sample == channel.stopped_at
        if goes_on and any(utterance == channel.stopped_utterance for utterance, _ in channel.owed):
            channel.cut.add(channel.stopped_utterance)
        if not channel.owed:
            yield from self._utterance_end(channel, event.at_sample)
        channel.owed.append((event.utterance_id, event.at_sample))
        channel.is_speaking = True
        if self._request.vad_events and not goes_on:
            yield {"type": "SpeechStarted", "channel": self._place(channel), "timestamp": seconds(event.at_sample)}

    def _place(self, channel: _Channel) -> list[int]:
        return [channel.index, len(self._channels)]

    # Results -------------------------------------------------------------------------------------------------

    def _interim(self, event: PartialTranscript) -> JsonObject:
        text, confidence = event.committed + event.tentative, mean_probability(event.words)
        reading = alternative(text, event.words, confidence, "", self._spelling)
        return self._results(self._channels[event.channel], (event.start_sample, event.end_sample), reading)

    def _final(self, event: FinalTranscript) -> Iterator[JsonObject]:
        reading = alternative(event.text, event.words, event.confidence, event.language, self._spelling)
        last_word_end = event.words[-1].end_sample if event.words and event.text.strip() else None
        yield from self._settle(event, reading, last_word_end)

    def _settle(
        self, event: FinalTranscript | TranscriptFailed, reading: JsonObject, last_word_end: int | None
    ) -> Iterator[JsonObject]:
        """The utterance's result, and what was waiting for it."""
        channel, utterance = self._channels[event.channel], event.utterance_id
        channel.owed = deque(owed for owed in channel.owed if owed[0] != utterance)
        self._reach(event.end_sample)
        is_end = self._request.has_endpoints and utterance not in channel.cut
        channel.cut.discard(utterance)
        answered = self._release(utterance)
        span = event.start_sample, event.end_sample
        yield self._results(channel, span, reading, is_final=True, speech_final=is_end, from_finalize=answered > 0)
        for _ in range(answered - 1):
            yield self._nothing_left()
        channel.last_word_end = channel.last_word_end if last_word_end is None else last_word_end
        unsure_from = channel.unsure_from
        sure_until = self._heard_samples - _ONSET_SAMPLES if unsure_from is None else unsure_from
        yield from self._utterance_end(channel, sure_until)

    def _results(
        self,
        channel: _Channel,
        span: tuple[int, int],
        reading: JsonObject,
        *,
        is_final: bool = False,
        speech_final: bool = False,
        from_finalize: bool = False,
    ) -> JsonObject:
        start_sample, end_sample = span
        return {
            "type": "Results",
            "channel_index": self._place(channel),
            "duration": seconds(end_sample - start_sample),
            "start": seconds(start_sample),
            "is_final": is_final,
            "speech_final": speech_final,
            "channel": {"alternatives": [reading]},
            "metadata": {
                "request_id": self._identity.request_id,
                "model_info": self._identity.model_info,
                "model_uuid": self._identity.model_uuid,
            },
            "from_finalize": from_finalize,
        }

    # Finalize ------------------------------------------------------------------------------------------------

    def _finalized(self) -> Iterator[JsonObject]:
        """A Finalize has been carried out. It is answered once, by the last of the results that it waits for."""
        owed = {utterance for channel in self._channels for utterance, _ in channel.owed}
        if owed:
            self._waiting.append(owed)
        else:
            yield self._nothing_left()

    def _release(self, utterance: int) -> int:
        """How many of them waited for this result alone."""
        for owed in self._waiting:
            owed.discard(utterance)
        before = len(self._waiting)
        self._waiting = deque(owed for owed in self._waiting if owed)
        return before - len(self._waiting)

    def _nothing_left(self) -> JsonObject:
        here = self._heard_samples
        empty = alternative("", (), 0.0, "", self._spelling)
        return self._results(self._channels[0], (here, here), empty, is_final=True, from_finalize=True)

    # UtteranceEnd --------------------------------------------------------------------------------------------

    def _quiet(self, until_sample: int) -> Iterator[JsonObject]:
        for channel in self._channels:
            if channel.unsure_from is None:
                yield from self._utterance_end(channel, until_sample)

    def _utterance_end(self, channel: _Channel, quiet_until: int) -> Iterator[JsonObject]:
        """Once after each word that is followed by so much silence, by the clock of the audio."""
        gap_ms, last = self._request.utterance_end_ms, channel.last_word_end
        if gap_ms is None or last is None or quiet_until - last < ms_to_samples(gap_ms):
            return
        channel.last_word_end = None
        yield {"type": "UtteranceEnd", "channel": self._place(channel), "last_word_end": seconds(last)}

    # How it ends ---------------------------------------------------------------------------------------------

    def _metadata(self, received_samples: int) -> JsonObject:
        return {
            "type": "Metadata",
            "transaction_key": "deprecated",
            "request_id": self._identity.request_id,
            "sha256": self._digest.hexdigest(),
            "created": self._identity.created,
            "duration": seconds(received_samples),
            "channels": len(self._channels),
        }

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        """Of an idle client nothing but the close frame is known, at Deepgram too."""
        if error.code == "idle":
            return [], CLOSE_INTERNAL
        match error:
            case Overloaded():
                code = CLOSE_TRY_AGAIN
            case ClientError():
                code = CLOSE_POLICY
            case _:
                code = CLOSE_INTERNAL
        return [_dump(_error(error))], code

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        return ([], CLOSE_RESTART, "service restart") if going_down else ([], CLOSE_DONE, "")


def _error(error: SttError) -> JsonObject:
    """``variant`` is Deepgram's for a message that it cannot read, and our own code for everything else."""
    if isinstance(error, SchemaError):
        found = {"type": "Error", "variant": "SchemaError", "description": error.message}
        return {**found, "message": error.original}
    return {"type": "Error", "variant": error.code, "description": error.message}


def is_close_stream(text: str) -> bool:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("type") == "CloseStream"


def _is_texts(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(isinstance(item, str) and _is_unicode(item) for item in value)


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can escape and no UTF-8 can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_flags(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(item, bool) for item in value.values()))


def _dump(message: JsonObject) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
