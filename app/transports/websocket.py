"""``/v1/stream``: Hark's own protocol over a WebSocket. The messages are in app/wire/native.py."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.errors import surface
from app.live import Audio, ClientGone, Command, Commit, Complaint, Eof, Lag, LiveSession, Outbox, SlowClient, reason
from app.service import Service
from app.telemetry import StreamTelemetry
from app.wire import native
from streaming.audio import SAMPLE_RATE
from streaming.errors import BadMessage, ClientError, SttError
from streaming.session import Session

CLOSE_DONE = 1000
CLOSE_RESTART = 1012  # "service restart": SDKs connect again
CLOSE_BAD_PARAMETERS = 4400  # 4xxx is the application's own range; 4400 reads as HTTP's 400
_CLOSE_TIMEOUT_S = 2.0


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.websocket("/v1/stream")
    async def stream(websocket: WebSocket) -> None:
        await _Connection(service, websocket).serve()

    return router


class _IdleClient(ClientError):
    code = "idle"


class _Connection:
    """One client from its handshake to its close."""

    def __init__(self, service: Service, websocket: WebSocket) -> None:
        self._service = service
        self._websocket = websocket
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

    async def serve(self) -> None:
        """Never raises, whatever the client, the network or a bug does; ends this connection alone."""
        outcome = "cancelled"
        try:
            outcome = await self._serve()
        finally:
            self._service.metrics.sessions.set(self._service.sessions.open)
            self._service.metrics.sessions_total.labels(outcome).inc()
            self._logger.info("session_ended", outcome=outcome)

    def finish(self) -> None:
        """The service is about to stop: what has come so far is all there is."""
        self._owes_audio = False
        self._going_down.set()
        if self._live is not None:
            self._live.finish()

    async def _serve(self) -> str:
        """From the handshake to the close, which a drain waits for too; returns how it ended."""
        with contextlib.ExitStack() as held:
            try:
                await self._accept()
                held.enter_context(self._service.sessions.slot())
                self._service.metrics.sessions.set(self._service.sessions.open)
                self._service.live.add(self)
                held.callback(self._service.live.discard, self)
                await self._stream()
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

    async def _stream(self) -> None:
        info = self._service.info
        self._configure(native.query_parameters(self._websocket.query_params.multi_items()))
        await self._send(native.render_ready(self._id, self._parameters, info.model))
        first = await self._begin()
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

    def _configure(self, given: dict[str, Any] | dict[str, object]) -> None:
        self._parameters = native.parse_parameters(self._parameters, given, self._service.info.languages)

    async def _begin(self) -> Command:
        """The first command; the end of the stream, if the service goes down before there is one."""
        first, going_down = asyncio.create_task(self._first_command()), asyncio.create_task(self._going_down.wait())
        try:
            await asyncio.wait((first, going_down), return_when=asyncio.FIRST_COMPLETED)
            return first.result() if first.done() else Eof()
        finally:
            first.cancel()
            going_down.cancel()

    async def _first_command(self) -> Command:
        """Takes ``config`` messages until the first message that is none; each is answered with ``ready``."""
        while True:
            message = await self._receive()
            if isinstance(message, bytes):
                return Audio(message)
            match native.parse_message(message):
                case native.Configure(parameters):
                    self._configure(dict(parameters))
                    await self._send(native.render_ready(self._id, self._parameters, self._service.info.model))
                case native.Control.COMMIT:
                    return Commit()
                case native.Control.EOF:
                    return Eof()
                case native.Control.KEEPALIVE:
                    pass

    async def _commands(self, first: Command) -> AsyncIterator[Command]:
        """What the client sends, until it leaves. A message that is wrong is complained of, and the stream goes on."""
        yield first
        complaints = 0
        while True:
            message = await self._receive()
            if isinstance(message, bytes):
                yield Audio(message)
                continue
            try:
                command = _command(message)
            except BadMessage as error:
                complaints += 1
                if complaints > self._service.live_config.max_complaints:
                    raise
                self._outbox.put(Complaint(error))
                continue
            if command is not None:
                self._owes_audio = self._owes_audio and not isinstance(command, Eof)
                yield command

    async def _receive(self) -> str | bytes:
        """The next message. Raises ClientGone when the client left, an ``idle`` error when it should send and does not.

        After its eof a client has nothing to send, however long the last finals take.
        """
        try:
            async with asyncio.timeout(self._service.settings.idle_timeout_s):
                message = await self._websocket.receive()
        except TimeoutError:
            if not self._owes_audio:
                return await self._receive()
            limit_s = self._service.settings.idle_timeout_s
            raise _IdleClient(f'nothing came for {limit_s:g} s; send {{"type":"keepalive"}} while muted') from None
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        data: bytes | None = message.get("bytes")
        if data is not None:
            return data
        text: str = message.get("text") or ""
        return text

    # Outgoing ------------------------------------------------------------------------------------------------

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

    async def _accept(self) -> None:
        """Raises ClientGone."""
        try:
            await self._websocket.accept()
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises ClientGone, or SlowClient when the client leaves it unread too long."""
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        try:
            async with asyncio.timeout(self._service.settings.send_timeout_s):
                await self._websocket.send_text(text)
        except TimeoutError:
            raise SlowClient("the client does not read its results; the stream is closed") from None
        except (WebSocketDisconnect, RuntimeError):  # Starlette's two ways to say that the client has just left
            raise ClientGone from None

    async def _bid_farewell(self) -> str:
        if not self._going_down.is_set():
            await self._close(CLOSE_DONE, "")
            return "done"
        error = SttError("the service is going down; all audio so far is transcribed", code="shutting_down")
        await self._send(native.render_error(error, fatal=True))
        await self._close(CLOSE_RESTART, "service restart")
        return "draining"

    async def _refuse(self, error: SttError) -> None:
        """Say what is wrong, then close with a code that says whether another try is of use."""
        is_parameter = error.code in ("bad_parameter", "unknown_parameter", "unknown_language")
        code = CLOSE_BAD_PARAMETERS if is_parameter else surface(error).close_code
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._send(native.render_error(error, fatal=True))
        except (TimeoutError, ClientGone, SlowClient):
            return
        await self._close(code, error.message)

    async def _close(self, code: int, why: str) -> None:
        cut = why.encode()[:120].decode(errors="ignore")  # a close frame holds 123 bytes (RFC 6455, 5.5)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._websocket.close(code, cut)
        except (TimeoutError, RuntimeError, WebSocketDisconnect):
            pass


def _command(text: str) -> Command | None:
    match native.parse_message(text):
        case native.Configure():
            raise BadMessage("config must come before the first audio", code="late_config")
        case native.Control.COMMIT:
            return Commit()
        case native.Control.EOF:
            return Eof()
        case native.Control.KEEPALIVE:
            return None
