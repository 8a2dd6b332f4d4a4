"""``hark transcribe``: recordings without a server, one after the other, on an engine of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import av
from rich.progress import Progress, TaskID

from app import main as root
from app.files import FileTranscriber, Transcript
from app.media import MediaLimits, open_media
from app.settings import Settings
from app.telemetry import Metrics
from app.wire import openai_http, subtitles
from streaming.audio import SAMPLE_RATE
from streaming.errors import SttError
from streaming.events import FinalTranscript
from streaming.types import DecodeOptions


class Batch:
    """Transcribes files and writes each one's text in the wanted format as soon as it is ready."""

    def __init__(self, settings: Settings, options: DecodeOptions, output_format: str, progress: Progress) -> None:
        self._settings = settings
        self._options = options
        self._format = output_format
        self._progress = progress

    async def run(self, files: Sequence[Path], out: TextIO, complain: Callable[[str], None]) -> int:
        """Returns how many files could not be transcribed, wholly or in part; ``complain`` is told why."""
        parts = root.assemble(self._settings)
        failed = 0
        try:
            await parts.engine.start()
            transcriber = FileTranscriber(root.make_dispatcher(parts.engine, Metrics()), parts.new_detectors)
            for file in files:
                try:
                    complete = await self._one(file, transcriber, out, complain)
                except (SttError, OSError) as error:
                    complain(f"{file}: {error}")
                    complete = False
                failed += not complete
        except SttError as error:
            complain(error.message)
            return len(files)
        finally:
            await parts.engine.close()
        return failed

    async def _one(
        self, file: Path, transcriber: FileTranscriber, out: TextIO, complain: Callable[[str], None]
    ) -> bool:
        total_s = _declared_duration_s(file)
        bar = self._progress.add_task(file.name, total=total_s, speed="")
        limits = MediaLimits(max_duration_s=self._settings.max_file_s)
        async with open_media(file, limits) as media:
            transcripts = await transcriber.transcribe(
                media.chunks(), self._options, lambda event: self._advance(bar, event, out)
            )
            report = media.report
        finals, failures = openai_http.split_results(transcripts)
        warnings = [report.warning] if report.warning else []
        warnings += [openai_http.failure_warning(failure) for failure in failures]
        self._progress.update(bar, completed=report.duration_s, total=report.duration_s)
        if self._format != "text":
            out.write(self._render(finals, report.duration_s))
        out.flush()
        for warning in warnings:
            complain(f"{file}: {warning}")
        return not failures

    def _advance(self, bar: TaskID, event: Transcript, out: TextIO) -> None:
        """Text is written as it comes; the bar moves with the end of the newest utterance."""
        if self._format == "text" and isinstance(event, FinalTranscript) and event.text:
            out.write(event.text + "\n")
            out.flush()
        done_s = event.end_sample / SAMPLE_RATE
        elapsed_s = self._progress.tasks[bar].elapsed or 0.0
        speed = f"{done_s / elapsed_s:.1f}x" if elapsed_s > 0.5 else ""
        self._progress.update(bar, completed=done_s, speed=speed)

    def _render(self, finals: Sequence[FinalTranscript], duration_s: float) -> str:
        match self._format:
            case "srt":
                return subtitles.to_srt(subtitles.cues(finals))
            case "vtt":
                return subtitles.to_vtt(subtitles.cues(finals))
            case _:
                fields = [("response_format", "verbose_json")]
                fields += [("timestamp_granularities[]", kind) for kind in ("word", "segment")]
                form = openai_http.parse_form(fields, self._options.task)
                transcription = openai_http.Transcription(self._options.task, duration_s, tuple(finals), ())
                return openai_http.render(transcription, form)[0] + "\n"


def _declared_duration_s(file: Path) -> float | None:
    """What the container says, for the progress bar; None where it does not. Raises FileNotFoundError."""
    if not file.is_file():
        raise FileNotFoundError("no such file")
    try:
        with av.open(str(file), metadata_errors="ignore") as container:
            return container.duration / av.time_base if container.duration else None
    except (av.FFmpegError, OSError, ValueError):
        return None
