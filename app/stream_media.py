"""A live stream in a container (WebM, Ogg, FLAC, …) → a WAV stream, decoded in a process that can be killed."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.conversation import Peer
from app.dialect import Wire
from app.media import end_worker, start_worker
from app.stream_records import AUDIO, ERROR, HUNGRY, RECORD
from app.wire.wav import wav_head
from streaming.audio import SAMPLE_RATE
from streaming.config import AudioFormat
from streaming.errors import BadAudio

_QUEUED = 16  # messages that wait to be heard; then the decoder waits, and with it the client
_MAX_RECORD_BYTES = 64 * SAMPLE_RATE * 2  # a packet is never longer: a bound on what a broken process may claim


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream's decoder may cost: processor time in all (an hour of Opus takes about 10 s), and address space,
    of which 0.2 GB are its libraries."""

    cpu_s: int = 900
    memory_bytes: int = 512 << 20


class _Decoder:
    """The process. ``deliver`` is given what it decodes."""

    def __init__(self, process: asyncio.subprocess.Process, deliver: Callable[[bytes], Awaitable[None]]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._deliver = deliver
        self._sent_bytes = 0
        self._taken_bytes = 0
        self._moved = asyncio.Event()
        self._is_finished = False  # no more comes
        self._is_over = False  # the process has ended
        self.has_given = False

    async def feed(self, data: bytes) -> None:
        """Returns when there is room for more. After the end nothing is taken: a browser's recorder that is stopped may
        give its last piece after the message that ends the stream, and an ended process has closed its pipe."""
        if self._is_finished or self._is_over:
            return
        self._sent_bytes += len(data)
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # ``run`` says why it ended

    async def catch_up(self) -> None:
        """Returns when all that was fed is delivered."""
        while self._taken_bytes < self._sent_bytes and not self._is_over:
            self._moved.clear()
            await self._moved.wait()

    async def finish(self) -> None:
        """No more comes: what the decoder still holds is delivered."""
        self._is_finished = True
        self._stdin.close()
        while not self._is_over:
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        """Delivers until the process ends. Raises BadAudio where nothing can be heard any more."""
        try:
            while (head := await self._read(RECORD.size)) is not None:
                kind, number = RECORD.unpack(head)
                if kind == HUNGRY:
                    self._taken_bytes = number
                    self._moved.set()
                    continue
                payload = await self._read(min(number, _MAX_RECORD_BYTES)) or b""
                if kind == ERROR:
                    report = json.loads(payload)
                    raise BadAudio(str(report["message"]), code=str(report["code"]))
                if kind == AUDIO:
                    self.has_given = True
                    await self._deliver(payload)
            if not self._is_finished:
                raise BadAudio("the stream's decoder ended early", code="unsupported_media")
        finally:
            self._is_over = True
            self._moved.set()

    async def _read(self, size: int) -> bytes | None:
        try:
            return await self._stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            return None

    async def close(self) -> None:
        await end_worker(self._process)


class DecodingPeer:
    """A Peer whose audio is what another one's stream holds. A WAV stream is passed on as it is.

    Texts keep their place: one is passed on when the audio before it has been decoded.
    """

    def __init__(self, peer: Peer, limits: StreamLimits, is_last: Callable[[str], bool], sign_of_life: str) -> None:
        """``is_last``: whether a text says that no more audio comes. ``sign_of_life``: a text that only says that the
        client is there; it stands for audio that comes before the decoder has given any, or a client would be taken
        for idle while the process starts. "" for none."""
        self._peer = peer
        self._limits = limits
        self._is_last = is_last
        self._sign_of_life = sign_of_life
        self._queue: asyncio.Queue[Wire | Exception] = asyncio.Queue(_QUEUED)
        self._decoder: _Decoder | None = None
        self._is_known = False  # what the stream is in
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self._peer.open()
        self._start(self._listen())

    async def receive(self) -> Wire:
        message = await self._queue.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Wire) -> None:
        await self._peer.send(message)

    async def close(self, code: int, why: str) -> None:
        await self._peer.close(code, why)

    async def release(self) -> None:
        """Ends the process and the tasks. To be called whatever happened."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._decoder is not None:
            await self._decoder.close()

    def _start(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the task's edge: ``receive`` raises it
                await self._queue.put(error)

        self._tasks.append(asyncio.create_task(guarded()))

    async def _listen(self) -> None:
        while True:
            message = await self._peer.receive()
            if isinstance(message, bytes):
                await self._take(message)
            elif isinstance(message, str):
                await self._settle(message)
                await self._queue.put(message)

    async def _take(self, data: bytes) -> None:
        if not self._is_known and data:
            self._is_known = True
            if not b"RIFF".startswith(data[:4]):
                await self._queue.put(wav_head(AudioFormat(), 0))
                self._decoder = await _start_decoder(self._limits, self._queue.put)
                self._start(self._decoder.run())
        if self._decoder is None:
            await self._queue.put(data)
        elif data:
            await self._decoder.feed(data)
            if self._sign_of_life and not self._decoder.has_given:
                await self._queue.put(self._sign_of_life)
        else:  # an empty message is an end too
            await self._decoder.finish()
            await self._queue.put(data)

    async def _settle(self, text: str) -> None:
        if self._decoder is None:
            return
        if self._is_last(text):
            await self._decoder.finish()
        else:
            await self._decoder.catch_up()


async def _start_decoder(limits: StreamLimits, deliver: Callable[[bytes], Awaitable[None]]) -> _Decoder:
    process = await start_worker(
        "app.stream_worker",
        f"--memory-bytes={limits.memory_bytes}",
        f"--cpu-s={limits.cpu_s}",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return _Decoder(process, deliver)


@asynccontextmanager
async def decoding(
    peer: Peer, limits: StreamLimits, is_last: Callable[[str], bool], sign_of_life: str = ""
) -> AsyncGenerator[DecodingPeer, None]:
    """The peer with its stream decoded; leaving the context ends the decoder."""
    decoded = DecodingPeer(peer, limits, is_last, sign_of_life)
    try:
        yield decoded
    finally:
        await decoded.release()
