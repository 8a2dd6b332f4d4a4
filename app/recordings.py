"""A recording that has come in, whoever's protocol asked for it: what serves it, and how it is understood."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from app.access import Grant
from app.media import MediaDecoder, MediaLimits, open_media
from app.wire.openai_http import Transcription, failure_warning, split_results
from streaming.audio import SAMPLE_RATE
from streaming.config import SessionConfig
from streaming.events import FinalTranscript, TranscriptFailed
from streaming.types import DecodeOptions

_BYTES_A_SECOND = 2 * SAMPLE_RATE

Outcome = FinalTranscript | TranscriptFailed
Adjust = Callable[[SessionConfig], SessionConfig]


class Transcriber(Protocol):
    """What the composition root provides: a whole file through one session, partials off."""

    async def transcribe(
        self,
        pcm_chunks: AsyncIterator[bytes],
        options: DecodeOptions,
        progress: Callable[[Outcome], None],
        adjust: Adjust,
    ) -> list[Outcome]:
        """Chunks of whole samples, 16 kHz, mono, int16 little-endian → every utterance's outcome.

        ``adjust`` changes what is usual for recordings.

        ``progress`` is told each as it is settled, in the order in which they were said.

        Takes the next chunk only when it has room for it: the decoder waits meanwhile. An error that ``pcm_chunks``
        raises is raised to the caller as it is, not in a group. Raises Overloaded or RecognizerFailed where nothing
        can be transcribed now. Cancelling the call gives all of its work up.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileService:
    """What the routes need.

    ``admit(request)`` is entered before a byte of the upload is read and left when the answer is ready; it raises
    Overloaded where there is no room. What it gives is told how much audio was taken. ``model_names()``: what the
    served model is called, its main name first.
    """

    transcriber: Transcriber
    admit: Callable[[Request], AbstractContextManager[Grant]]
    model_names: Callable[[], Sequence[str]]
    media_limits: MediaLimits
    max_upload_bytes: int = 512 << 20

    async def understand(
        self,
        descriptor: int,
        grant: Grant,
        options: DecodeOptions,
        adjust: Adjust,
        progress: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Transcription:
        """What is said in the open file. Raises the first utterance's error where some failed and nothing was
        understood."""
        async with open_media(descriptor, self.media_limits) as media:
            outcomes = await self.transcriber.transcribe(_counted_audio(media, grant), options, progress, adjust)
            finals, failures = split_results(outcomes)
            if failures and not any(final.text.strip() for final in finals):
                raise failures[0].error
            warnings = [failure_warning(failure) for failure in failures]
            if media.report.warning:
                warnings.insert(0, media.report.warning)
            return Transcription(options.task, media.report.duration_s, finals, tuple(warnings))


async def _counted_audio(media: MediaDecoder, grant: Grant) -> AsyncIterator[bytes]:
    """Raises TooManyRequests where the key's audio is used up."""
    async for chunk in media.chunks():
        grant.spend(len(chunk) / _BYTES_A_SECOND)
        yield chunk
