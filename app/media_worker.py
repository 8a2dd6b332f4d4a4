"""The process that opens untrusted media: ``python -m app.media_worker SOURCE ...`` (app/media.py starts it).

A hostile file reaches FFmpeg only in here: resource limits are set, no file can be written and none opened beside the
one it is given, and whatever happens ends this process alone. Raw PCM (16 kHz, mono, int16 little-endian) goes to
stdout as it is decoded; the last line on stderr is one JSON object, ``Report``.
"""

import argparse
import errno
import io
import json
import os
import resource
import sys
import wave
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from app.downmix import Downmixer
from streaming.audio import SAMPLE_RATE, Resampler, to_pcm16
from streaming.types import Float32

# What people record and send. Playlists, scripts and raw headerless formats are left out on purpose: an HLS or
# concat "audio file" would make FFmpeg open other files and addresses.
FORMATS = (
    "wav,w64,aiff,caf,au,voc,nistsphere,mp3,aac,flac,ogg,matroska,webm,mov,mp4,m4a,3gp,amr,amrnb,amrwb,asf,avi,flv,"
    "mpeg,mpegts,mxf,ac3,eac3,dts,truehd,ape,tta,wv,dsf,qcp,loas,rm,sbc"
)
IO_BUFFER_BYTES = 256 * 1024
BATCH_S = 0.5  # decoded frames are joined to this much before they are mixed: numpy calls are cheap per second then
MAX_BAD_PACKETS_IN_A_ROW = 2_000  # then the rest is taken for garbage
MAX_CHANNELS = 64
MIN_SAMPLE_RATE_HZ, MAX_SAMPLE_RATE_HZ = 1_000, 768_000
PLANES_END = 8  # AV_NUM_DATA_POINTERS of FFmpeg
# A jump of the time stamps between these two is a pause in the recording (a muted browser sends nothing) and becomes
# silence; less is jitter of the container, more is a clock that was set anew.
MIN_GAP_S, MAX_GAP_S = 0.25, 600.0
PLAUSIBLE_BYTES_PER_S = (
    500  # a header that promises more audio than this many bytes a second could hold is not believed
)
ESTIMATED_DURATION = frozenset({"mp3", "aac", "mpeg", "mpegts", "ac3", "eac3", "amr", "loas"})  # not in the header


@dataclass(frozen=True, slots=True)
class Report:
    """How it ended: ``code`` is "" where audio came out, then ``warning`` may say what is missing from it."""

    code: str
    message: str = ""
    warning: str = ""
    samples: int = 0
    container: str = ""
    codec: str = ""
    sample_rate_hz: int = 0
    channels: int = 0


class Unusable(Exception):
    """Nothing, or not what was asked, can be had from this file."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """From here on: no core file, no file written, no file or socket opened, and no more memory or time than given."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _refuse_open(url: str, flags: int, options: dict[str, str]) -> object:
    raise PermissionError(errno.EPERM, "a media file may not open others")


def open_container(file: object) -> InputContainer:
    """Raises Unusable where FFmpeg knows no such file."""
    try:
        return av.open(
            file,
            mode="r",
            # Odd tags would raise UnicodeDecodeError.
            metadata_errors="ignore",
            buffer_size=IO_BUFFER_BYTES,
            io_open=_refuse_open,
            container_options={"protocol_whitelist": "none", "format_whitelist": FORMATS},
        )
    except (av.FFmpegError, ValueError, OSError) as error:
        what = f"this is no audio or video file that can be read{_reason(error)}"
        raise Unusable("unsupported_media", what) from error


def _reason(error: Exception) -> str:
    """Why, in brackets; "" where FFmpeg only says that it can make nothing of the bytes."""
    if isinstance(error, av.InvalidDataError | av.ArgumentError) or not isinstance(error, av.FFmpegError | OSError):
        return ""
    return f" ({error.strerror.lower()})" if error.strerror else ""


def pick_stream(container: InputContainer) -> AudioStream:
    """The container's best audio stream that has a decoder."""
    best = container.streams.best("audio")
    # A stream in an unknown format has no codec context at all, whatever the annotations say.
    usable = [s for s in container.streams.audio if s.codec_context is not None]
    if not container.streams.audio:
        raise Unusable("no_audio_stream", "the file has no audio track")
    if not usable:
        raise Unusable("unsupported_media", "the file's audio is in a format that cannot be decoded")
    chosen = best if isinstance(best, AudioStream) and best in usable else usable[0]
    chosen.codec_context.thread_count = 1
    return chosen


class FrameReader:
    """A stream's frames in order; bad packets are skipped and counted, silence stands for pauses in the time stamps."""

    def __init__(self, container: InputContainer, stream: AudioStream) -> None:
        self._container = container
        self._stream = stream
        self.bad_packets = 0
        self.cut_short = ""

    def frames(self) -> Iterator[AudioFrame]:
        packets = self._container.demux(self._stream)
        bad_in_a_row = 0
        while bad_in_a_row < MAX_BAD_PACKETS_IN_A_ROW:
            try:
                packet = next(packets)
                frames = packet.decode()
            except StopIteration:
                return
            except av.FFmpegError as error:
                if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
                    raise MemoryError from error
                if isinstance(error, EOFError):
                    return
                self.bad_packets += 1
                bad_in_a_row += 1
                continue
            bad_in_a_row = 0
            for frame in frames:
                if isinstance(frame, AudioFrame) and frame.samples:
                    yield frame
        self.cut_short = "the rest of the file is damaged"


class Converter:
    """Frames in any sample format → float32.

    Planar frames of eight and more channels are interleaved by FFmpeg first: ``AudioFrame.planes`` looks for a null
    pointer after the last plane, and there is none from eight channels on, so that numpy would be given a plane at a
    wild address (a crash on 7.1 AAC with PyAV 18.1).
    """

    def __init__(self) -> None:
        self._kind: tuple[str, str, int] | None = None
        self._interleaver = av.AudioResampler()

    def to_float(self, frame: AudioFrame) -> Float32:
        """float32 (n, channels), full scale at 1. Raises Unusable for a sample format that numpy cannot hold."""
        try:
            if frame.format.is_planar and frame.layout.nb_channels >= PLANES_END:
                frame = self._interleave(frame)
            raw = frame.to_ndarray()
        except ValueError as error:
            what = f"audio samples of the kind {frame.format.name} cannot be read"
            raise Unusable("unsupported_media", what) from error
        samples = raw.T if frame.format.is_planar else raw.reshape(-1, frame.layout.nb_channels)
        return _scale(samples[:, :MAX_CHANNELS], frame.format.packed.name)

    def _interleave(self, frame: AudioFrame) -> AudioFrame:
        kind = (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self._kind:
            self._kind = kind
            self._interleaver = av.AudioResampler(frame.format.packed, frame.layout, frame.sample_rate)
        packed = self._interleaver.resample(frame)
        if len(packed) != 1 or packed[0] is None or packed[0].samples != frame.samples:
            raise ValueError("the interleaver kept samples back")
        return packed[0]


def _scale(samples: NDArray[Any], sample_format: str) -> Float32:
    match sample_format:
        case "u8":
            return (samples.astype(np.float32) - np.float32(128.0)) / np.float32(128.0)
        case "s16":
            return samples.astype(np.float32) / np.float32(2**15)
        case "s32":
            return (samples / 2.0**31).astype(np.float32)
        case _:
            with np.errstate(over="ignore", invalid="ignore"):
                return np.ascontiguousarray(samples, np.float32)


class Chain:
    """Frames of one rate and channel count → mono PCM at 16 kHz."""

    def __init__(self, sample_rate_hz: int, channels: int) -> None:
        self.sample_rate_hz = sample_rate_hz
        self.channels = channels
        self._mixer = Downmixer(channels, sample_rate_hz)
        self._resampler = Resampler(sample_rate_hz, 1)

    def push(self, samples: Float32) -> bytes:
        return self._resample(self._mixer.mix(samples), last=False)

    def flush(self) -> bytes:
        return self._resample(self._mixer.flush(), last=True)

    def _resample(self, mono: Float32, *, last: bool) -> bytes:
        return to_pcm16(self._resampler.resample(mono[:, None], last=last)).tobytes()


class Pipeline:
    """Frames → chunks of PCM. A change of rate or channels in mid-file starts a new chain; nothing else is kept."""

    def __init__(self, container: InputContainer, stream: AudioStream) -> None:
        self._converter = Converter()
        self._chain: Chain | None = None
        self._batch: list[Float32] = []
        self._batched_s = 0.0
        # The sound of a video may start after the picture; a lone sound starts where it starts.
        alone = len(container.streams) == 1
        self._position_s: float | None = None if alone else (container.start_time or 0) / 1e6

    def push(self, frame: AudioFrame) -> Iterator[bytes]:
        samples = self._converter.to_float(frame)
        kind = (frame.sample_rate, samples.shape[1])
        if self._chain is None or (self._chain.sample_rate_hz, self._chain.channels) != kind:
            yield from self.flush()
            if not MIN_SAMPLE_RATE_HZ <= frame.sample_rate <= MAX_SAMPLE_RATE_HZ:
                raise Unusable("unsupported_media", f"a sample rate of {frame.sample_rate} Hz is not supported")
            self._chain = Chain(*kind)
        gap_s = self._gap_s(frame)
        while gap_s > 0:
            step_s = min(gap_s, BATCH_S)
            yield from self._add(np.zeros((round(step_s * frame.sample_rate), samples.shape[1]), np.float32))
            gap_s -= step_s
        yield from self._add(samples)

    def flush(self) -> Iterator[bytes]:
        if self._chain is not None:
            yield from self._run_batch()
            yield self._chain.flush()
            self._chain = None

    def _gap_s(self, frame: AudioFrame) -> float:
        """How much is missing before this frame by the time stamps, and counts the frame in."""
        length_s = frame.samples / frame.sample_rate
        stamp_s: float | None = frame.time
        if self._position_s is None:
            self._position_s = stamp_s or 0.0
        gap_s = 0.0 if stamp_s is None else stamp_s - self._position_s
        if not MIN_GAP_S <= gap_s <= MAX_GAP_S:
            if abs(gap_s) > MAX_GAP_S and stamp_s is not None:
                self._position_s = stamp_s
            gap_s = 0.0
        self._position_s += gap_s + length_s
        return gap_s

    def _add(self, samples: Float32) -> Iterator[bytes]:
        assert self._chain is not None
        self._batch.append(samples)
        self._batched_s += len(samples) / self._chain.sample_rate_hz
        if self._batched_s >= BATCH_S:
            yield from self._run_batch()

    def _run_batch(self) -> Iterator[bytes]:
        if self._chain is not None and self._batch:
            samples = self._batch[0] if len(self._batch) == 1 else np.concatenate(self._batch)
            self._batch, self._batched_s = [], 0.0
            yield self._chain.push(samples)


def _too_long(max_duration_s: float) -> Unusable:
    return Unusable("audio_too_long", f"the audio is longer than the {max_duration_s:g} s that are accepted")


def _check_declared(container: InputContainer, size_bytes: int, max_duration_s: float) -> None:
    """Refuse at once what says itself that it is too long, unless the file is too small to be telling the truth."""
    if not container.duration:
        return
    declared_s = container.duration / 1e6
    slack = 2.0 if container.format.name in ESTIMATED_DURATION else 1.0
    if declared_s > max_duration_s * slack and size_bytes >= declared_s * PLAUSIBLE_BYTES_PER_S:
        raise _too_long(max_duration_s)


class Decoding:
    """One file's way through the process. ``report`` is how it ended, whatever it ended with."""

    def __init__(self, source_fd: int, out_fd: int, max_duration_s: float) -> None:
        self._source_fd = source_fd
        self._out_fd = out_fd
        self._max_duration_s = max_duration_s
        self._samples = 0
        self._facts: dict[str, str | int] = {}
        self._reader: FrameReader | None = None

    def run(self) -> Report:
        """Decode, write, report. Raises OSError when nobody reads stdout any more."""
        try:
            self._decode()
        except Unusable as error:
            if not self._samples or error.code == "audio_too_long":
                return self._failed(error.code, error.message)
            return self._partial(error.message)
        except MemoryError:
            if not self._samples:
                return self._failed("media_too_complex", "decoding the file needs more memory than is allowed")
            return self._partial("the rest needs more memory than is allowed")
        except av.FFmpegError as error:
            if not self._samples:
                return self._failed("unsupported_media", f"the file cannot be decoded{_reason(error)}")
            return self._partial(f"decoding stopped early{_reason(error)}")
        return self._finished()

    def _decode(self) -> None:
        size_bytes = os.lseek(self._source_fd, 0, os.SEEK_END)
        os.lseek(self._source_fd, 0, os.SEEK_SET)
        if not size_bytes:
            raise Unusable("empty_file", "the file is empty")
        with os.fdopen(self._source_fd, "rb", buffering=0, closefd=False) as file, open_container(file) as container:
            stream = pick_stream(container)
            self._facts = {"container": container.format.name, "codec": stream.codec_context.name}
            _check_declared(container, size_bytes, self._max_duration_s)
            self._reader = FrameReader(container, stream)
            pipeline = Pipeline(container, stream)
            for frame in self._reader.frames():
                self._facts |= {"sample_rate_hz": frame.sample_rate, "channels": frame.layout.nb_channels}
                self._write(pipeline.push(frame))
            self._write(pipeline.flush())

    def _write(self, chunks: Iterator[bytes]) -> None:
        for chunk in chunks:
            room = int(self._max_duration_s * SAMPLE_RATE) - self._samples
            pcm = memoryview(chunk)[: room * 2]
            self._samples += len(pcm) // 2
            while pcm:
                pcm = pcm[os.write(self._out_fd, pcm) :]
            if len(chunk) // 2 > room:
                raise _too_long(self._max_duration_s)

    def crashed(self, error: Exception) -> Report:
        what = f"the decoder failed on this file ({type(error).__name__})"
        return self._partial(what) if self._samples else self._failed("unsupported_media", what)

    def _finished(self) -> Report:
        reader = self._reader
        if not self._samples:
            damaged = reader is not None and reader.bad_packets > 0
            code, what = ("unsupported_media", "decoded") if damaged else ("empty_audio", "found")
            return self._failed(code, f"no audio could be {what} in the file")
        if reader is not None and reader.cut_short:
            return self._partial(reader.cut_short)
        if reader is not None and reader.bad_packets:
            return self._partial(f"{reader.bad_packets} damaged packets were skipped")
        return Report("", samples=self._samples, **self._facts)  # type: ignore[arg-type]

    def _failed(self, code: str, message: str) -> Report:
        return Report(code, message, samples=self._samples, **self._facts)  # type: ignore[arg-type]

    def _partial(self, warning: str) -> Report:
        return Report("", warning=warning, samples=self._samples, **self._facts)  # type: ignore[arg-type]


def rehearse() -> None:
    """Decode a moment of silence, so that what is imported late is there before files cannot be opened."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, 2, 8_000, 0, "NONE", ""))
        writer.writeframes(bytes(3_200))
    file.seek(0)
    with open_container(file) as container:
        stream = pick_stream(container)
        pipeline = Pipeline(container, stream)
        for frame in FrameReader(container, stream).frames():
            list(pipeline.push(frame))
        list(pipeline.flush())
    chain = Chain(8_000, 2)
    chain.push(np.full((8_000, 2), 1e5, np.float32))
    chain.flush()


def finish(report: Report) -> NoReturn:
    """Say how it ended and leave, without the interpreter's shutdown: a library's exit handler could still crash."""
    os.write(sys.stderr.fileno(), json.dumps(asdict(report)).encode() + b"\n")
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="app.media_worker")
    parser.add_argument("source", help="a path, or fd:N for an inherited descriptor")
    parser.add_argument("--max-duration-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, required=True)
    arguments = parser.parse_args()
    av.logging.set_level(None)
    source: str = arguments.source
    rehearse()
    try:
        source_fd = int(source[3:]) if source.startswith("fd:") else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        finish(Report("unreadable_file", f"the file cannot be opened{_reason(error)}"))
    limit_resources(arguments.memory_bytes, arguments.cpu_s)
    decoding = Decoding(source_fd, sys.stdout.fileno(), arguments.max_duration_s)
    try:
        report = decoding.run()
    except BrokenPipeError:
        os._exit(1)  # the reader went away; there is nobody to tell
    except Exception as error:  # noqa: BLE001 - the process's edge: a traceback helps nobody behind the pipe
        report = decoding.crashed(error)
    finish(report)


if __name__ == "__main__":
    main()
