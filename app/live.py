"""The one task group around a Session: brings it audio, carries out its decodes, hands its outputs to the client.

    source ──▶ _read ──▶ Session ──▶ Outbox ──▶ (the transport's writer)
                            ▲  │ Decode
                            │  ▼
                        _decode task ──▶ Dispatcher

Three places hold anything, and each is bounded: the transport's inbox (reading stops while too many finals are out),
one partial in flight a channel, and the outbox (a newer partial takes an older one's place).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from app.dialect import Audio, Command, Commit, Complaint, Eof, Gap, Lag, Mark, Marked, Say, ToClient
from app.dispatch import Decoder
from streaming.audio import SAMPLE_RATE
from streaming.config import AudioFormat
from streaming.errors import BadAudio, BadMessage, ClientError, SttError
from streaming.events import (
    CancelDecode,
    Decode,
    Output,
    PartialTranscript,
    SessionDone,
)
from streaming.session import Session
from streaming.types import DecodeRequest

__all__ = [  # the words of app/dialect.py, for whoever runs a session without a dialect
    "Audio",
    "ClientGone",
    "Command",
    "Commit",
    "Complaint",
    "Eof",
    "Gap",
    "Lag",
    "LiveConfig",
    "LiveSession",
    "Marked",
    "Outbox",
    "SlowClient",
    "ToClient",
    "reason",
]


class ClientGone(Exception):
    """The client went away before the stream was done."""


class SlowClient(ClientError):
    """The client does not read what it is sent."""

    code = "slow_client"


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """Bounds of one session in the shell."""

    max_outstanding: int = 8  # utterances that may wait for their final before reading pauses
    max_outbox: int = 1_024  # events a client may leave unread
    slice_ms: int = 500  # longer messages are heard in pieces, so that other sessions get their turn
    lag_interval_s: float = 1.0
    max_complaints: int = 20


class Outbox:
    """What waits to be sent to one client. A newer partial or heartbeat replaces an unsent older one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[ToClient | Say] = deque()
        self._filled = asyncio.Event()
        self._is_closed = False

    def put(self, event: ToClient | Say) -> None:
        """Raises SlowClient when the client has left too much unread."""
        if isinstance(event, PartialTranscript | Lag):
            self._replace(event)
        if len(self._events) >= self._limit:
            raise SlowClient("the client does not read its results; the stream is closed")
        self._events.append(event)
        self._filled.set()

    def close(self) -> None:
        """Nothing more will be put."""
        self._is_closed = True
        self._filled.set()

    async def get(self) -> ToClient | Say | None:
        """The oldest event; None when the outbox is closed and everything has been taken."""
        while not self._events:
            if self._is_closed:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._events.popleft()

    def _replace(self, event: PartialTranscript | Lag) -> None:
        for index, waiting in enumerate(self._events):
            if _takes_the_place(event, waiting):
                del self._events[index]
                return


def _takes_the_place(newer: PartialTranscript | Lag, older: ToClient | Say) -> bool:
    match newer, older:
        case PartialTranscript(), PartialTranscript():
            return newer.utterance_id == older.utterance_id
        case _:
            return isinstance(newer, Lag) and isinstance(older, Lag)


class LiveSession:
    """Runs one Session until it is done, the client leaves, or it breaks the rules."""

    def __init__(
        self,
        session: Session,
        audio: AudioFormat,
        decoder: Decoder,
        put: Callable[[ToClient], None],
        config: LiveConfig,
        observe: Callable[[Output], None],
    ) -> None:
        """``put`` takes what is for the client, ``observe`` sees every output before it is carried out."""
        self._session = session
        self._decoder = decoder
        self._put = put
        self._observe = observe
        self._config = config
        self._slice_bytes = max(1, audio.sample_rate_hz * config.slice_ms // 1000) * audio.frame_bytes
        self._slice_samples = SAMPLE_RATE * config.slice_ms // 1000
        self._decodes: dict[int, asyncio.Task[None]] = {}
        self._progress = asyncio.Event()
        self._done = asyncio.Event()
        self._complaints = 0
        self._ended = False  # the client said eof
        self._finishing = asyncio.Event()  # the service did
        self._unusable: BadAudio | None = None  # why what came last was not heard

    async def run(self, source: AsyncIterator[Command]) -> None:
        """Returns when every sample is answered. Raises ClientGone or SttError; its tasks are gone by then.

        Audio that cannot be what it is declared to be is the end of it: what came before is answered, then BadAudio is
        raised instead of SessionDone given out.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                helpers = [group.create_task(job) for job in (self._read(source), self._beat(), self._finish())]
                await self._done.wait()
                for helper in helpers:
                    helper.cancel()
        except* (ClientGone, SttError) as errors:
            raise reason(errors) from None
        if self._unusable is not None:
            raise self._unusable

    def finish(self) -> None:
        """Take the audio so far as all there is (the service is about to stop). May be called at any time."""
        self._finishing.set()

    async def _finish(self) -> None:
        await self._finishing.wait()
        self._carry_out(self._session.receive_eof())

    async def _read(self, source: AsyncIterator[Command]) -> None:
        async for command in source:
            if self._finishing.is_set():
                continue  # keep reading, so that a client that leaves is noticed
            try:
                await self._receive(command)
            except (BadAudio, BadMessage) as error:
                self._complain(error)
        if not self._ended:
            raise ClientGone

    async def _receive(self, command: Command) -> None:
        match command:
            case Audio(data):
                starts = range(0, len(data), self._slice_bytes)
                slices = (data[start : start + self._slice_bytes] for start in starts)
                await self._hear(self._session.receive_audio(part) for part in slices)
            case Gap(samples):
                parts = (min(self._slice_samples, samples - start) for start in range(0, samples, self._slice_samples))
                await self._hear(self._session.receive_gap(part) for part in parts)
            case Commit(mark):
                self._carry_out(self._session.receive_commit())
                if mark:
                    self._put(Marked(mark))
            case Mark(mark):
                self._put(Marked(mark))
            case Eof():
                self._ended = True
                self._carry_out(self._session.receive_eof())
            case Complaint(error):
                self._complain(error)

    async def _hear(self, slices: Iterator[Sequence[Output]]) -> None:
        """Each slice is fed to the session when the one before it has been dealt with."""
        for outputs in slices:
            self._carry_out(outputs)
            await self._room()
            if self._finishing.is_set():
                return

    async def _room(self) -> None:
        """Let others run; wait while this session has too many finals out."""
        await asyncio.sleep(0)
        while self._session.outstanding > self._config.max_outstanding:
            self._progress.clear()
            await self._progress.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.lag_interval_s)
            self._put(Lag(self._session.received_samples, self._session.covered_samples))

    def _complain(self, error: SttError) -> None:
        """Wrong audio ends the stream (the rest would be noise too); a wrong message does not, unless they go on."""
        if isinstance(error, BadAudio):
            self._unusable = error
            self.finish()
            return
        self._complaints += 1
        if self._complaints > self._config.max_complaints:
            raise error
        self._put(Complaint(error))

    def _carry_out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._observe(output)
            match output:
                case Decode(request):
                    self._decodes[request.request_id] = self._group.create_task(self._decode(request))
                case CancelDecode(request_id):
                    task = self._decodes.pop(request_id, None)
                    if task is not None:
                        task.cancel()
                case SessionDone():
                    if self._unusable is None:
                        self._put(output)
                    self._done.set()
                case _:
                    self._put(output)
        self._progress.set()

    async def _decode(self, request: DecodeRequest) -> None:
        try:
            hypothesis = await self._decoder.decode(request, lambda: self._session.renew(request.request_id))
        except SttError as error:
            self._decodes.pop(request.request_id, None)
            self._carry_out(self._session.receive_failure(request.request_id, error))
        else:
            self._decodes.pop(request.request_id, None)
            self._carry_out(self._session.receive_hypothesis(hypothesis))


def reason(errors: BaseExceptionGroup[ClientGone | SttError]) -> BaseException:
    """The group's one reason: a client's leaving explains whatever else went wrong at the same time."""
    gone = errors.subgroup(ClientGone)
    error: BaseException = gone or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
