"""One client, in whatever dialect it speaks and whatever carries it: a WebSocket or a WebRTC connection.

A transport gives a ``Peer``, a codec of app/wire/ the ``Dialect``; nothing here knows what a socket is, or what a
message means. Here are the tasks, the time limits, and the one order in which everything ends.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from app.access import Grant, TooManyRequests
from app.dialect import (
    Audio,
    Close,
    Command,
    Commit,
    Complaint,
    Dialect,
    Eof,
    Gap,
    Lag,
    Mark,
    Marked,
    Say,
    Start,
    ToClient,
    Wire,
)
from app.live import ClientGone, LiveSession, Outbox, SlowClient, reason
from app.offset import Offset
from app.redaction import redact
from app.service import Service
from app.telemetry import StreamTelemetry
from streaming.audio import SAMPLE_RATE
from streaming.errors import ClientError, SttError
from streaming.events import Output, SessionDone, SpeechStarted
from streaming.session import Session

CLOSE_DONE = 1000
_REFUSAL_TIMEOUT_S = 2.0

T = TypeVar("T")


class Peer(Protocol):
    """The client, as its transport shows it. Every method but ``close`` raises ClientGone once it has left."""

    async def open(self) -> None:
        """Returns when messages can be sent. May raise SttError where that does not come about."""
        ...

    async def receive(self) -> Wire | Gap:
        """The next message, or audio that never came. May be cancelled without losing one."""
        ...

    async def send(self, message: Wire) -> None:
        """Returns when there is room for more: a client that reads slowly is waited for."""
        ...

    async def close(self, code: int, why: str) -> None:
        """What was sent goes out first. Takes a few seconds at most and never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the transports see differently.

    ``idle_message``: what a client that is idle is told, where the dialect has words of its own for that.
    ``has_track``: audio comes by itself as long as the client is there. So one without it is idle, whatever else it
    sends, and after its eof audio means nothing.
    """

    idle_timeout_s: float
    has_track: bool = False
    idle_message: str = ""


class IdleClient(ClientError):
    """Nothing came of a client that should send."""

    code = "idle"


class _Closing(SttError):
    """Not an error: the dialect ends the connection. An exception, so that it ends what is running too."""

    def __init__(self, close: Close) -> None:
        super().__init__(close.why)
        self.close = close


class _Bill:
    """The audio of one session, for whoever pays for it."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._charged_samples = 0

    def charge(self, received_samples: int) -> None:
        """So much has come by now. Raises TooManyRequests where no more may."""
        new_samples, self._charged_samples = received_samples - self._charged_samples, received_samples
        self._grant.spend(new_samples / SAMPLE_RATE)


class Conversation:
    """One client from its opening to its close."""

    def __init__(
        self,
        service: Service,
        peer: Peer,
        admit: Callable[[], AbstractContextManager[Grant]],
        terms: Terms,
        dialect: Dialect,
        session_id: str = "",
    ) -> None:
        """``admit`` is entered once the client can be told why it may not come in; it raises SttError then. What it
        gives pays for the audio.

        ``session_id``: what the log calls this conversation, where the client is told it too; else one is made up.
        """
        self._service = service
        self._peer = peer
        self._admit = admit
        self._terms = terms
        self._dialect = dialect
        self._outbox = Outbox(service.live_config.max_outbox)
        self._logger = service.logger.bind(session=session_id or uuid.uuid4().hex)
        self._live: LiveSession | None = None
        self._offset = Offset()  # of the session that runs, or of the next
        self._utterances = 0
        self._going_down = asyncio.Event()
        self._owes_audio = True  # until it says eof, or the service goes down
        self._idle_since_s: float | None = None  # on the loop's clock; None while it does what it should

    async def serve(self) -> None:
        """Never raises, whatever the client, the network or a bug does; ends this conversation alone."""
        outcome = "cancelled"
        try:
            outcome = await self._serve()
        finally:
            self._service.metrics.sessions_total.labels(outcome).inc()
            self._logger.info("session_ended", outcome=outcome)

    def finish(self) -> None:
        """The service is about to stop: what has come so far is all there is."""
        self._owes_audio = False
        self._going_down.set()
        if self._live is not None:
            self._live.finish()

    async def _serve(self) -> str:
        """From the opening to the close, which a drain waits for too; returns how it ended."""
        with contextlib.ExitStack() as held:
            try:
                self._service.live.add(self)
                held.callback(self._service.live.discard, self)
                await self._before_going_down(self._peer.open())
                grant = held.enter_context(self._admit())
                self._service.info  # noqa: B018 - refuses while the engine starts
                await self._talk(grant)
                return await self._bid_farewell()
            except ClientGone:
                return "gone"
            except _Closing as closing:
                await self._peer.close(closing.close.code, closing.close.why)
                return "done" if closing.close.code == CLOSE_DONE else "closed"
            except SttError as error:
                self._logger.warning("session_refused", code=error.code, message=error.message)
                await self._refuse(error)
                return error.code
            except Exception:  # the task's edge: a bug ends this stream, with a trace and a close code, and no other
                self._logger.exception("session_broke")
                await self._refuse(SttError("the service made a mistake; the stream is closed"))
                return SttError.code

    async def _talk(self, grant: Grant) -> None:
        """What comes and what goes at the same time; what was to be said goes out before an error does."""
        failure: SttError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                try:
                    await self._listen(grant)
                except SlowClient:
                    raise
                except SttError as error:
                    failure = error
                self._outbox.close()
        except* (ClientGone, SlowClient) as errors:
            raise reason(errors) from None
        if failure is not None:
            raise failure

    # Sessions ------------------------------------------------------------------------------------------------

    async def _listen(self, grant: Grant) -> None:
        """One session after the other, until all that came is answered and nothing more will come."""
        actions = self._actions()
        start = await self._before_going_down(self._first_start(actions))
        while start is not None and not self._going_down.is_set():
            start = await self._hear(start, actions, grant)
        self._outbox.put(SessionDone(self._offset.samples))

    async def _first_start(self, actions: AsyncIterator[Command | Start]) -> Start | None:
        """Until there is a session there is nothing to commit, and nobody who hears. None: the client ended it."""
        async for action in actions:
            match action:
                case Start():
                    return action
                case Eof():
                    return None
                case Commit(mark) | Mark(mark) if mark:
                    self._outbox.put(Marked(mark))
                case Complaint():
                    self._outbox.put(action)
        return None

    async def _hear(self, start: Start, actions: AsyncIterator[Command | Start], grant: Grant) -> Start | None:
        """One session, until its last final; returns what begins the next one, if anything does."""
        config = start.config
        session = Session(config, self._service.new_detectors(config.audio.channels))
        telemetry = StreamTelemetry(self._service.metrics, self._logger, log_text=self._service.settings.log_text)
        bill, kinds = _Bill(grant), self._service.settings.redacted_kinds

        def put(event: ToClient) -> None:
            if isinstance(event, Lag):
                bill.charge(event.received_samples)
            self._put(redact(event, kinds))

        def observe(output: Output) -> None:
            telemetry.observe(redact(output, kinds))

        self._live = live = LiveSession(
            session, config.audio, self._service.dispatcher, put, self._service.live_config, observe
        )
        following: list[Start] = []

        async def commands() -> AsyncIterator[Command]:
            async for action in actions:
                if isinstance(action, Start):
                    following.append(action)
                    yield Eof()
                    return
                yield action

        try:
            await live.run(commands())
        finally:
            self._service.metrics.audio_s.labels("live").inc(session.received_samples / SAMPLE_RATE)
            with contextlib.suppress(TooManyRequests):  # it was the last of what may be used, and is answered
                bill.charge(session.received_samples)
        self._offset = Offset(self._offset.samples + session.received_samples, self._utterances)
        return following[0] if following else None

    def _put(self, event: ToClient) -> None:
        """What the session that runs says, on the connection's clock. That it is done is not yet the end of all."""
        event = self._offset.apply(event)
        match event:
            case SessionDone():
                return
            case SpeechStarted(utterance):
                self._utterances = utterance + 1
        self._outbox.put(event)

    # Incoming ------------------------------------------------------------------------------------------------

    async def _before_going_down(self, work: Coroutine[None, None, T]) -> T | None:
        """What the work gives; None, with the work cancelled, where the service goes down first."""
        task, going_down = asyncio.create_task(work), asyncio.create_task(self._going_down.wait())
        try:
            await asyncio.wait((task, going_down), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            going_down.cancel()
            del task  # its exception's traceback holds this frame

    async def _actions(self) -> AsyncIterator[Command | Start]:
        """What the client asks for, until it leaves. What is only to be said to it is put on the way."""
        actions = self._dialect.open()
        while True:
            for action in actions:
                match action:
                    case Say():
                        self._outbox.put(action)
                    case Close():
                        raise _Closing(action)
                    case _ if self._is_heard(action):
                        self._owes_audio = self._owes_audio and not isinstance(action, Eof)
                        yield action
            message = await self._receive()
            if isinstance(message, Gap):  # is audio to the dialect, though of no bytes: it may have to begin with it
                actions = [*self._dialect.receive(b""), message]
            else:
                actions = self._dialect.receive(message)

    def _is_heard(self, action: Command | Start) -> bool:
        """After its eof a client begins nothing more, and a track that goes on means nothing."""
        match action:
            case Start():
                return self._owes_audio
            case Audio() | Gap():
                return self._owes_audio or not self._terms.has_track
            case _:
                return True

    async def _receive(self) -> Wire | Gap:
        """The next message. Raises ClientGone when the client left, IdleClient when it should send and does not.

        After its eof a client has nothing to send, however long the last finals take.
        """
        clock = asyncio.get_running_loop()
        while True:
            if self._idle_since_s is None:
                self._idle_since_s = clock.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._idle_since_s + self._terms.idle_timeout_s):
                    message = await self._peer.receive()
                    if not (self._terms.has_track and isinstance(message, str)):
                        self._idle_since_s = None
                    return message
            self._idle_since_s = None
            if self._owes_audio:
                kind = "no audio" if self._terms.has_track else "nothing"
                raise IdleClient(self._terms.idle_message or f"{kind} came for {self._terms.idle_timeout_s:g} s")

    # Outgoing ------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while (event := await self._outbox.get()) is not None:
            if isinstance(event, Lag):
                self._service.metrics.lag_s.observe((event.received_samples - event.covered_samples) / SAMPLE_RATE)
            for message in (event.message,) if isinstance(event, Say) else self._dialect.render(event):
                await self._send(message)

    async def _send(self, message: Wire) -> None:
        """Raises ClientGone, or SlowClient when the client leaves it unread too long."""
        try:
            async with asyncio.timeout(self._service.settings.send_timeout_s):
                await self._peer.send(message)
        except TimeoutError:
            raise SlowClient("the client does not read its results; the stream is closed") from None

    async def _bid_farewell(self) -> str:
        going_down = self._going_down.is_set()
        messages, code, why = self._dialect.farewell(going_down=going_down)
        for message in messages:
            await self._send(message)
        await self._peer.close(code, why)
        return "draining" if going_down else "done"

    async def _refuse(self, error: SttError) -> None:
        """Say what is wrong, then close with a code that says whether another try is of use."""
        messages, code = self._dialect.refuse(error)
        try:
            async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
                for message in messages:
                    await self._send(message)
        except (TimeoutError, ClientGone, SlowClient):
            return
        await self._peer.close(code, error.message)
