"""Hark's own protocol with one client, whatever carries it: a WebSocket or a WebRTC connection.

The messages are in app/wire/native.py. A transport gives a ``Peer``; nothing here knows what a socket is.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from app.errors import surface
from app.live import (
    Audio,
    ClientGone,
    Command,
    Commit,
    Complaint,
    Eof,
    Gap,
    Lag,
    LiveSession,
    Outbox,
    SlowClient,
    reason,
)
from app.service import Service
from app.telemetry import StreamTelemetry
from app.wire import native
from streaming.audio import SAMPLE_RATE
from streaming.config import AudioFormat
from streaming.errors import BadMessage, ClientError, SttError
from streaming.session import Session

CLOSE_DONE = 1000
CLOSE_RESTART = 1012  # "service restart": SDKs connect again
_REFUSAL_TIMEOUT_S = 2.0

T = TypeVar("T")


class Peer(Protocol):
    """The client, as its transport shows it. Every method but ``close`` raises ClientGone once it has left."""

    async def open(self) -> None:
        """Returns when messages can be sent. May raise SttError where that does not come about."""
        ...

    async def receive(self) -> str | bytes | Gap:
        """The next message, or audio that never came. May be cancelled without losing one."""
        ...

    async def send(self, text: str) -> None:
        """Returns when there is room for more: a client that reads slowly is waited for."""
        ...

    async def close(self, code: int, why: str) -> None:
        """What was sent goes out first. Takes a few seconds at most and never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the transports see differently.

    ``audio``: the only format there is; None where the client chooses. ``has_track``: audio comes by itself as long as
    the client is there. So one without it is idle, whatever else it sends, and after its eof audio means nothing.
    """

    idle_timeout_s: float
    has_track: bool = False
    audio: AudioFormat | None = None


class _IdleClient(ClientError):
    code = "idle"


class Conversation:
    """One client from its opening to its close."""

    def __init__(
        self, service: Service, peer: Peer, admit: Callable[[], AbstractContextManager[None]], terms: Terms
    ) -> None:
        """``admit`` is entered once the client can be told why it may not come in; it raises SttError then."""
        self._service = service
        self._peer = peer
        self._admit = admit
        self._terms = terms
        self._id = uuid.uuid4().hex
        self._outbox = Outbox(service.live_config.max_outbox)
        self._parameters = native.StreamParameters(
            pause_ms=service.settings.pause_ms,
            partial_interval_ms=service.settings.partial_interval_ms,
            max_utterance_ms=service.settings.max_utterance_ms,
        )
        self._logger = service.logger.bind(session=self._id)
        self._live: LiveSession | None = None
        self._going_down = asyncio.Event()
        self._owes_audio = True  # until it says eof, or the service goes down
        self._idle_since_s: float | None = None  # on the loop's clock; None while it does what it should

    def configure(self, given: Mapping[str, object]) -> None:
        """Take parameters, before the first audio. Raises BadMessage, or Overloaded while the engine starts."""
        parameters = native.parse_parameters(self._parameters, given, self._service.info.languages)
        fixed = self._terms.audio
        if fixed is not None and parameters.session_config().audio != fixed:
            only = f"{fixed.encoding.value}, {fixed.sample_rate_hz} Hz, {fixed.channels} channel"
            raise BadMessage(f"the audio of this connection is always {only}", code="bad_parameter")
        self._parameters = parameters

    async def serve(self, given: Mapping[str, object]) -> None:
        """``given``: parameters that are to be taken once the client can be told what is wrong with them.

        Never raises, whatever the client, the network or a bug does; ends this conversation alone.
        """
        outcome = "cancelled"
        try:
            outcome = await self._serve(given)
        finally:
            self._service.metrics.sessions_total.labels(outcome).inc()
            self._logger.info("session_ended", outcome=outcome)

    def finish(self) -> None:
        """The service is about to stop: what has come so far is all there is."""
        self._owes_audio = False
        self._going_down.set()
        if self._live is not None:
            self._live.finish()

    async def _serve(self, given: Mapping[str, object]) -> str:
        """From the opening to the close, which a drain waits for too; returns how it ended."""
        with contextlib.ExitStack() as held:
            try:
                self._service.live.add(self)
                held.callback(self._service.live.discard, self)
                await self._before_going_down(self._peer.open())
                held.enter_context(self._admit())
                await self._stream(given)
                return await self._bid_farewell()
            except ClientGone:
                return "gone"
            except SttError as error:
                self._logger.warning("session_refused", code=error.code, message=error.message)
                await self._refuse(error)
                return error.code
            except Exception:  # the task's edge: a bug ends this stream, with a trace and a close code, and no other
                self._logger.exception("session_broke")
                await self._refuse(SttError("the service made a mistake; the stream is closed"))
                return SttError.code

    async def _stream(self, given: Mapping[str, object]) -> None:
        self.configure(given)
        await self._send_ready()
        first = await self._before_going_down(self._first_command()) or Eof()
        config = self._parameters.session_config()
        session = Session(config, self._service.new_detectors(config.audio.channels))
        telemetry = StreamTelemetry(self._service.metrics, self._logger, log_text=self._service.settings.log_text)
        self._live = live = LiveSession(
            session,
            config.audio,
            self._service.dispatcher,
            self._outbox.put,
            self._service.live_config,
            telemetry.observe,
        )
        try:
            await self._run(live, first)
        finally:
            self._service.metrics.audio_s.labels("live").inc(session.received_samples / SAMPLE_RATE)

    async def _run(self, live: LiveSession, first: Command) -> None:
        """The session and its writer together; what was said goes out before an error does."""
        failure: SttError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                try:
                    await live.run(self._commands(first))
                except SlowClient:
                    raise
                except SttError as error:
                    failure = error
                self._outbox.close()
        except* (ClientGone, SlowClient) as errors:
            raise reason(errors) from None
        if failure is not None:
            raise failure

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

    async def _first_command(self) -> Command:
        """Takes ``config`` messages until the first message that is none; each is answered with ``ready``."""
        while True:
            message = await self._receive()
            if not isinstance(message, str):
                return _heard(message)
            match native.parse_message(message):
                case native.Configure(parameters):
                    self.configure(parameters)
                    await self._send_ready()
                case native.Control.COMMIT:
                    return Commit()
                case native.Control.EOF:
                    return Eof()
                case native.Control.KEEPALIVE:
                    pass

    async def _commands(self, first: Command) -> AsyncIterator[Command]:
        """What the client sends, until it leaves. A message that is wrong is complained of, and the stream goes on."""
        command: Command | None = first
        while True:
            if command is not None:
                self._owes_audio = self._owes_audio and not isinstance(command, Eof)
                yield command
            message = await self._receive()
            if isinstance(message, str):
                command = _command(message)
            else:
                command = _heard(message) if self._owes_audio or not self._terms.has_track else None

    async def _receive(self) -> str | bytes | Gap:
        """The next message. Raises ClientGone when the client left, an ``idle`` error when it should send and does not.

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
                raise self._idle()

    def _idle(self) -> _IdleClient:
        limit_s = self._terms.idle_timeout_s
        if self._terms.has_track:
            return _IdleClient(f"no audio came for {limit_s:g} s")
        return _IdleClient(f'nothing came for {limit_s:g} s; send {{"type":"keepalive"}} while muted')

    # Outgoing ------------------------------------------------------------------------------------------------

    async def _send_ready(self) -> None:
        await self._send(native.render_ready(self._id, self._parameters, self._service.info.model))

    async def _write(self) -> None:
        while (event := await self._outbox.get()) is not None:
            match event:
                case Lag(received, covered):
                    self._service.metrics.lag_s.observe((received - covered) / SAMPLE_RATE)
                    await self._send(native.render_lag(received, covered))
                case Complaint(error):
                    await self._send(native.render_error(error, fatal=False))
                case _:
                    await self._send(native.render(event, words=self._parameters.words))

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises ClientGone, or SlowClient when the client leaves it unread too long."""
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        try:
            async with asyncio.timeout(self._service.settings.send_timeout_s):
                await self._peer.send(text)
        except TimeoutError:
            raise SlowClient("the client does not read its results; the stream is closed") from None

    async def _bid_farewell(self) -> str:
        if not self._going_down.is_set():
            await self._peer.close(CLOSE_DONE, "")
            return "done"
        error = SttError("the service is going down; all audio so far is transcribed", code="shutting_down")
        await self._send(native.render_error(error, fatal=True))
        await self._peer.close(CLOSE_RESTART, "service restart")
        return "draining"

    async def _refuse(self, error: SttError) -> None:
        """Say what is wrong, then close with a code that says whether another try is of use."""
        try:
            async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
                await self._send(native.render_error(error, fatal=True))
        except (TimeoutError, ClientGone, SlowClient):
            return
        await self._peer.close(surface(error).close_code, error.message)


def _heard(message: bytes | Gap) -> Command:
    return message if isinstance(message, Gap) else Audio(message)


def _command(text: str) -> Command | None:
    """None for a message that asks for nothing."""
    try:
        message = native.parse_message(text)
    except BadMessage as error:
        return Complaint(error)
    match message:
        case native.Configure():
            return Complaint(BadMessage("config must come before the first audio", code="late_config"))
        case native.Control.COMMIT:
            return Commit()
        case native.Control.EOF:
            return Eof()
        case native.Control.KEEPALIVE:
            return None
