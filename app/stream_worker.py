"""The process that decodes one live stream in a container: ``python -m app.stream_worker``.

app/stream_media.py starts it. As in app/media_worker.py, a hostile stream reaches FFmpeg only in here. Its bytes come
on stdin as the client sends them; the records of app/stream_records.py go to stdout.
"""

import argparse
import errno
import json
import os
import select
import sys
from collections.abc import Iterator

import av
from av.audio.frame import AudioFrame

from app.media_worker import FORMATS, FrameReader, Pipeline, Unusable, limit_resources, pick_stream, rehearse
from app.stream_records import AUDIO, ERROR, HUNGRY, RECORD

IO_BUFFER_BYTES = 64 * 1024
_PROBE_BYTES = 32_768  # what FFmpeg may look at before the first sound comes out; it takes less where that is enough


def record(kind: bytes, number: int, payload: bytes = b"") -> None:
    """Raises BrokenPipeError when nobody reads any more."""
    data = memoryview(RECORD.pack(kind, number) + payload)
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


class Source:
    """stdin, as FFmpeg reads it. Says so whenever it has to wait."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._taken = 0

    def read(self, size: int) -> bytes:
        if not select.select([self._fd], [], [], 0)[0]:
            record(HUNGRY, self._taken)
        data = os.read(self._fd, size)
        self._taken += len(data)
        return data


class LivePipeline(Pipeline):
    """Gives out each frame's sound at once, where a file's is gathered first."""

    def push(self, frame: AudioFrame) -> Iterator[bytes]:
        yield from super().push(frame)
        yield from self._run_batch()


def _refuse_open(url: str, flags: int, options: dict[str, str]) -> object:
    raise PermissionError(errno.EPERM, "a stream may not open files")


def decode(fd: int) -> None:
    """Raises Unusable or av.FFmpegError."""
    options = {
        "protocol_whitelist": "none",
        "format_whitelist": FORMATS,
        "probesize": str(_PROBE_BYTES),
        "formatprobesize": str(_PROBE_BYTES),
        "analyzeduration": "0",
    }
    container = av.open(
        Source(fd),
        "r",
        metadata_errors="ignore",
        buffer_size=IO_BUFFER_BYTES,
        io_open=_refuse_open,
        container_options=options,
    )
    with container:
        stream = pick_stream(container)
        pipeline = LivePipeline(container, stream)
        reader = FrameReader(container, stream)
        for frame in reader.frames():
            _send(pipeline.push(frame))
        _send(pipeline.flush())
        if reader.cut_short:
            raise Unusable("unsupported_media", "the rest of the stream is damaged")


def _send(chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        if chunk:
            record(AUDIO, len(chunk), chunk)


def main() -> None:
    parser = argparse.ArgumentParser(prog="app.stream_worker")
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, required=True)
    arguments = parser.parse_args()
    av.logging.set_level(None)
    rehearse()
    limit_resources(arguments.memory_bytes, arguments.cpu_s)
    try:
        try:
            decode(sys.stdin.fileno())
        except Unusable as error:
            _fail(error.code, error.message)
        except MemoryError:
            _fail("media_too_complex", "decoding the stream needs more memory than is allowed")
        except BrokenPipeError:
            raise
        except Exception:  # noqa: BLE001 - the process's edge: whatever it was, the stream cannot be heard
            _fail("unsupported_media", "this is no audio stream that can be read")
    except BrokenPipeError:
        os._exit(1)  # nobody is left to be told
    os._exit(0)  # without the interpreter's shutdown: a library's exit handler could still crash


def _fail(code: str, message: str) -> None:
    payload = json.dumps({"code": code, "message": message}).encode()
    record(ERROR, len(payload), payload)


if __name__ == "__main__":
    main()
