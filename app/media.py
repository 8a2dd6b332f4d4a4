"""Uploaded files → 16 kHz mono PCM, decoded in a process of its own that can be killed at any time."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from streaming.audio import SAMPLE_RATE
from streaming.errors import BadAudio, ServerError

CHUNK_BYTES = 32_000  # a second
PIPE_LIMIT_BYTES = 64 * 1024  # what asyncio holds of a pipe, twice at most, before it stops reading
STDERR_TAIL_BYTES = 8 * 1024

# The worker sees none of the service's environment. One BLAS thread: a second costs address space and gains nothing.
_WORKER_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one file may cost.

    ``max_duration_s``: longer audio is refused, at once where its header says so. ``stall_timeout_s``: wall time
    without a byte from the decoder while somebody waits for one. ``cpu_s``: processor time of the whole file (an hour
    of stereo takes about 10 s). ``memory_bytes``: the decoder's address space, of which 0.2 GB are its libraries.
    """

    max_duration_s: float = 4 * 3600.0
    stall_timeout_s: float = 30.0
    cpu_s: int = 900
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_duration_s <= 0 or self.stall_timeout_s <= 0 or self.cpu_s < 1:
            raise ValueError("media limits must be positive")
        if self.memory_bytes < 256 << 20:
            raise ValueError("memory_bytes must be at least 256 MiB, or the decoder cannot start")


@dataclass(frozen=True, slots=True)
class MediaReport:
    """What a file held. ``warning`` is "" where everything was decoded, else it says what is missing."""

    duration_s: float
    warning: str = ""
    container: str = ""
    codec: str = ""
    sample_rate_hz: int = 0
    channels: int = 0


class MediaDecoder:
    """One file being decoded. Iterate ``chunks()`` to its end, then read ``report``."""

    def __init__(self, process: asyncio.subprocess.Process, limits: MediaLimits) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdout = process.stdout
        self._limits = limits
        self._stderr_tail = asyncio.create_task(_tail(process.stderr))
        self._samples = 0
        self._report: MediaReport | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def duration_s(self) -> float:
        """What has come so far."""
        return self._samples / SAMPLE_RATE

    @property
    def report(self) -> MediaReport:
        """Valid once ``chunks()`` has ended without an error."""
        if self._report is None:
            raise RuntimeError("the file is not decoded to its end")
        return self._report

    async def chunks(self) -> AsyncIterator[bytes]:
        """PCM of whole samples, int16 little-endian, as fast as it is taken.

        Raises BadAudio where nothing can be decoded or the audio is too long (then possibly after some chunks), and
        ServerError where the decoder stalls or is killed from outside.
        """
        odd = b""
        while data := await self._read():
            data = odd + data
            whole = len(data) & ~1
            odd = data[whole:]
            self._samples += whole // 2
            if whole:
                yield data[:whole]
        self._report = await self._conclude()

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s):
                return await self._stdout.read(CHUNK_BYTES)
        except TimeoutError as error:
            raise ServerError("the file decoder stalled", code="decoder_stalled") from error

    async def _conclude(self) -> MediaReport:
        """The worker's last line, or what its death says."""
        status = await self._process.wait()
        report = _parse_report(await self._stderr_tail)
        if report is None:
            return self._after_crash(status)
        if report.get("code"):
            raise BadAudio(str(report["message"]), code=str(report["code"]))
        return MediaReport(
            duration_s=self.duration_s,
            warning=str(report.get("warning", "")),
            container=str(report.get("container", "")),
            codec=str(report.get("codec", "")),
            sample_rate_hz=_integer(report.get("sample_rate_hz")),
            channels=_integer(report.get("channels")),
        )

    def _after_crash(self, status: int) -> MediaReport:
        if status == -signal.SIGKILL:
            # Not by us: the machine is short of memory, or someone cleared up. The file may be fine.
            raise ServerError("the file decoder was killed", code="decoder_killed")
        if status == -signal.SIGXCPU:
            code, what = "media_too_complex", f"decoding the file takes more than {self._limits.cpu_s} s"
        else:
            code, what = "unsupported_media", "the decoder crashed on this file"
        if not self._samples:
            raise BadAudio(what, code=code)
        return MediaReport(self.duration_s, warning=what)

    async def close(self) -> None:
        """Kill the process if it still runs, and reap it."""
        await end_worker(self._process)
        await self._stderr_tail


async def start_worker(
    module: str, *arguments: str, stdin: int, stderr: int, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """A process of our own that decodes untrusted bytes; its sound comes over stdout."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # nothing is imported from the directory that happens to be the current one
        "-m",
        module,
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        limit=PIPE_LIMIT_BYTES,
        env=_WORKER_ENVIRONMENT,
        pass_fds=pass_fds,
    )


async def end_worker(process: asyncio.subprocess.Process) -> None:
    """Kill the process if it still runs, and reap it."""
    assert process.stdout is not None
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass  # it ended just now
    while await process.stdout.read(PIPE_LIMIT_BYTES):
        pass  # asyncio reports the end only once the pipe is read to its own
    await process.wait()


@asynccontextmanager
async def open_media(source: Path | int, limits: MediaLimits) -> AsyncGenerator[MediaDecoder, None]:
    """Start decoding a file, given by its path or by an open descriptor; leaving the context kills the decoder.

    Memory does not grow with the file: the decoder waits while nobody takes chunks.
    """
    argument = f"fd:{source}" if isinstance(source, int) else str(source)
    process = await start_worker(
        "app.media_worker",
        f"--max-duration-s={limits.max_duration_s}",
        f"--memory-bytes={limits.memory_bytes}",
        f"--cpu-s={limits.cpu_s}",
        "--",
        argument,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(source,) if isinstance(source, int) else (),
    )
    decoder = MediaDecoder(process, limits)
    try:
        yield decoder
    finally:
        await decoder.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The last of what the stream gives, read to its end so that the writer never waits."""
    tail = b""
    while data := await stream.read(STDERR_TAIL_BYTES):
        tail = (tail + data)[-STDERR_TAIL_BYTES:]
    return tail


def _parse_report(stderr: bytes) -> dict[str, object] | None:
    lines = stderr.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        report = json.loads(lines[-1])
    except ValueError:
        return None
    return report if isinstance(report, dict) and "code" in report else None


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
