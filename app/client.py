"""A client of ``/v1/stream``, as anyone could write one: sources of PCM, the conversation, two ways to print."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlencode

import websockets

from app.media import MediaLimits, open_media

CHUNK_MS = 40
Event = dict[str, Any]


class StreamRefused(Exception):
    """The service ended the stream with an error, or cannot be reached."""


class NoMicrophone(Exception):
    """There is no sound device, or the package that reads it is not installed."""


async def read_file(path: Path) -> AsyncGenerator[bytes, None]:
    """Any media file as 16 kHz mono 16-bit PCM. Raises BadAudio."""
    async with open_media(path, MediaLimits()) as media:
        async for chunk in media.chunks():
            yield chunk


async def read_stdin() -> AsyncGenerator[bytes, None]:
    """Raw bytes from stdin until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while data := await reader.read(8_192):
        yield data


def read_microphone() -> AsyncIterator[bytes]:
    """The default input device as 16 kHz mono 16-bit PCM. Raises NoMicrophone."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:
        raise NoMicrophone(f"the microphone needs the package sounddevice and PortAudio: {error}") from None
    try:
        sounddevice.check_input_settings(channels=1, dtype="int16", samplerate=16_000)
    except (sounddevice.PortAudioError, ValueError) as error:
        raise NoMicrophone(f"no usable microphone: {error}") from None
    return _microphone(sounddevice)


async def _microphone(sounddevice: Any) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=250)

    def put(data: bytes) -> None:
        if queue.full():
            queue.get_nowait()  # the newest audio matters most
        queue.put_nowait(data)

    def callback(data: Any, frames: int, when: Any, status: Any) -> None:
        loop.call_soon_threadsafe(put, bytes(data))

    with sounddevice.RawInputStream(16_000, 640, channels=1, dtype="int16", callback=callback):
        while True:
            yield await queue.get()


async def paced(pcm: AsyncIterator[bytes], sample_rate_hz: int) -> AsyncGenerator[bytes, None]:
    """16-bit mono PCM cut into 40 ms pieces, each given out when its last sample would have been spoken."""
    size = sample_rate_hz * CHUNK_MS // 1000 * 2
    start_s, sent, rest = time.monotonic(), 0, b""
    async for data in pcm:
        rest += data
        while len(rest) >= size:
            piece, rest = rest[:size], rest[size:]
            sent += size
            await asyncio.sleep(start_s + sent / 2 / sample_rate_hz - time.monotonic())
            yield piece
    if rest:
        yield rest


async def stream(
    url: str,
    parameters: Mapping[str, str],
    pcm: AsyncIterator[bytes],
    show: Callable[[Event], None],
    *,
    realtime_hz: int | None = None,
) -> int:
    """Send the audio, show every event, return the exit code: 0 when the service said ``done``.

    Raises StreamRefused when it ended the stream with an error or cannot be reached, and whatever ``pcm`` raises.
    """
    source = pcm if realtime_hz is None else paced(pcm, realtime_hz)
    address = f"{url}{'&' if '?' in url else '?'}{urlencode(parameters)}" if parameters else url
    connection = await _connect(address, url)
    async with connection:
        sender = asyncio.create_task(_send(connection, source))
        reader = asyncio.create_task(_show_all(connection, show))
        try:
            await asyncio.wait((sender, reader), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()  # a source that fails ends it at once
            return await reader
        finally:
            sender.cancel()
            reader.cancel()
            await asyncio.gather(sender, reader, return_exceptions=True)


async def _connect(address: str, url: str) -> websockets.ClientConnection:
    try:
        return await websockets.connect(
            address,
            max_size=2**22,
            compression=None,
            # Audio that is sent faster than it is heard makes the service stop reading, and its pongs wait behind it.
            ping_timeout=None,
        )
    except (ConnectionError, TimeoutError):
        why = ""
    except (OSError, websockets.WebSocketException) as error:
        why = f" ({error})"
    raise StreamRefused(f"no service answers at {url}{why}; `hark serve` starts one, --url names another")


async def _send(connection: websockets.ClientConnection, source: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(websockets.ConnectionClosed):  # the reader is told why
        async for data in source:
            await connection.send(data)
        await connection.send('{"type":"eof"}')


async def _show_all(connection: websockets.ClientConnection, show: Callable[[Event], None]) -> int:
    with contextlib.suppress(websockets.ConnectionClosed):
        async for message in connection:
            event = json.loads(message)
            show(event)
            if event["type"] == "done":
                return 0
            if event["type"] == "error" and event["fatal"]:
                raise StreamRefused(event["message"])
    raise StreamRefused("the service closed the connection before it was done")


class LinePrinter:
    """One line an event: JSON with the time of arrival, or the text of finals."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self._as_json = as_json
        self._start_s = time.monotonic()

    def show(self, event: Event) -> None:
        if self._as_json:
            received_ms = round((time.monotonic() - self._start_s) * 1000)
            self._print(json.dumps({"received_ms": received_ms, **event}, ensure_ascii=False))
        elif event["type"] == "final" and event["text"]:
            self._print(event["text"])

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


class TerminalPrinter:
    """Finals as lines; below them the open utterance, rewritten in place, its tentative words dimmed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows = 0

    def show(self, event: Event) -> None:
        match event["type"]:
            case "partial":
                self._erase()
                self._draw(event["committed"], event["tentative"])
            case "final":
                self._erase()
                if event["text"]:
                    self._out.write(event["text"] + "\n")
            case "failed":
                self._erase()
                self._out.write(f"[not understood: {event['message']}]\n")
        self._out.flush()

    def _draw(self, committed: str, tentative: str) -> None:
        import shutil

        width = max(20, shutil.get_terminal_size().columns)
        self._rows = (len(committed) + len(tentative) - 1) // width
        self._out.write(f"{committed}\x1b[2m{tentative}\x1b[0m")

    def _erase(self) -> None:
        self._out.write("\r" + "\x1b[1A" * self._rows + "\x1b[J")
        self._rows = 0
