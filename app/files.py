"""A whole recording through the same Session as live audio, with partials off and the engine's lowest priority."""

from collections.abc import AsyncIterator, Callable, Sequence

from app.dispatch import Decoder
from app.live import Audio, Command, Eof, LiveConfig, LiveSession, ToClient
from streaming.config import AudioFormat, ContextConfig, EndpointerConfig, PartialConfig, SegmenterConfig, SessionConfig
from streaming.events import FinalTranscript, Output, TranscriptFailed
from streaming.ports import SpeechDetector
from streaming.session import Session
from streaming.types import DecodeOptions, Priority

Transcript = FinalTranscript | TranscriptFailed

# A recording need not be answered quickly, so a longer pause is waited for: more context, fewer decodes.
_PAUSE_MS = 800
_MAX_UTTERANCE_MS = 25_000


def file_session_config(options: DecodeOptions) -> SessionConfig:
    return SessionConfig(
        audio=AudioFormat(),
        endpointer=EndpointerConfig(pause_ms=_PAUSE_MS),
        segmenter=SegmenterConfig(max_utterance_ms=_MAX_UTTERANCE_MS, cut_zone_ms=8_000),
        partials=PartialConfig(enabled=False),
        context=ContextConfig(enabled=False),  # so that several of its utterances can be decoded at once
        options=options,
        early_final=False,
        final_priority=Priority.FILE,
    )


class FileTranscriber:
    """Transcribes recordings, any number at a time, in constant memory but for their text."""

    def __init__(
        self,
        decoder: Decoder,
        new_detectors: Callable[[int], Sequence[SpeechDetector]],
        observe: Callable[[Output], None] = lambda output: None,
    ) -> None:
        self._decoder = decoder
        self._new_detectors = new_detectors
        self._observe = observe

    async def transcribe(
        self,
        pcm_chunks: AsyncIterator[bytes],
        options: DecodeOptions,
        progress: Callable[[Transcript], None] = lambda transcript: None,
        adjust: Callable[[SessionConfig], SessionConfig] = lambda config: config,
    ) -> list[Transcript]:
        """Mono 16-bit PCM at 16 kHz, in chunks → its utterances in order. Reading follows the engine's pace.

        ``progress`` is told each utterance as it is settled; ``adjust`` changes what is usual for recordings.
        """
        session = Session(adjust(file_session_config(options)), self._new_detectors(1))
        transcripts: list[Transcript] = []

        def put(event: ToClient) -> None:
            if isinstance(event, FinalTranscript | TranscriptFailed):
                transcripts.append(event)
                progress(event)

        limits = LiveConfig(max_outstanding=2 * self._decoder.info.capacity)
        live = LiveSession(session, AudioFormat(), self._decoder, put, limits, self._observe)
        await live.run(_commands(pcm_chunks))
        return transcripts


async def _commands(chunks: AsyncIterator[bytes]) -> AsyncIterator[Command]:
    async for chunk in chunks:
        yield Audio(chunk)
    yield Eof()
