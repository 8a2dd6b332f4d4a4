"""The composition root: settings in, a running application out. The only file of the shell that knows ``models``."""

import asyncio
import contextlib
import gc
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from app.access import Access, AccessConfig, Grant, is_public
from app.admission import Admission, LoadConfig
from app.dispatch import DispatchConfig, Dispatcher, DispatchObserver
from app.errors import install_error_handlers
from app.files import FileTranscriber, Transcript
from app.keys import BadKeyFile, read_keys
from app.media import MediaLimits
from app.recordings import FileService
from app.redaction import redact
from app.rtc import ice
from app.rtc.config import RtcConfig
from app.service import Service
from app.settings import Engine, Settings, Turn, environment_value, listed
from app.telemetry import Metrics, StreamTelemetry
from app.transports import calls, deepgram, http, ops, realtime, telephony, tokens, webrtc, websocket
from app.transports.audiosocket import AudioSocketServer
from app.ui import mount_page
from models import weights
from models.catalog import Layout
from models.remote import RemoteConfig, RemoteObserver, RemoteRecognizer, Setting
from models.scripted import ScriptedDetector
from models.silero import SileroModel
from streaming.config import SessionConfig
from streaming.errors import RecognizerFailed
from streaming.ports import Recognizer, SpeechDetector
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, RecognizerInfo

if TYPE_CHECKING:
    from app.rtc.connection import Connection

_DEAD_PEER_MS = 30_000
_UNSENT_BYTES = 16_384  # a minute of partials; by default the kernel would take up to 4 MB


@dataclass(frozen=True, slots=True)
class Parts:
    """What the settings name, found and opened, but not yet running."""

    engine: RemoteRecognizer
    new_detectors: Callable[[int], list[SpeechDetector]]


def weights_config(settings: Settings) -> weights.WeightsConfig:
    return weights.WeightsConfig(cache_dir=settings.cache_dir, offline=settings.offline)


def fetch(names: Sequence[str], settings: Settings, progress: weights.ProgressSink) -> dict[str, Path]:
    """The models' directories, and the speech detector too; fetched if need be. Raises WeightsNotFound."""
    found = weights.locate_all(names, weights_config(settings), progress, _layout(settings))
    weights.locate_vad(weights_config(settings), progress)
    return found


def assemble(settings: Settings, observer: RemoteObserver | None = None) -> Parts:
    """Find the weights (fetching them if need be) and prepare the engine. Blocks; raises WeightsNotFound."""
    engine = RemoteConfig(
        engine=_engine_settings(settings),
        interpreter=settings.engine_python,
        start_timeout_s=settings.start_timeout_s,
        request_timeout_s=settings.request_timeout_s,
    )
    if settings.engine is Engine.SCRIPTED:
        return Parts(RemoteRecognizer(engine, observer), lambda n: [ScriptedDetector() for _ in range(n)])
    silero = SileroModel(weights.locate_vad(weights_config(settings)))
    return Parts(RemoteRecognizer(engine, observer), lambda n: [silero.detector() for _ in range(n)])


def _layout(settings: Settings) -> Layout:
    return Layout.TRANSFORMERS if settings.engine is Engine.VLLM else Layout.CTRANSLATE


def _engine_settings(settings: Settings) -> dict[str, Setting]:
    """The engine's kind, and what it is to load and how."""
    if settings.engine is Engine.SCRIPTED:
        return {"kind": "scripted"}
    directory = weights.locate(settings.model, weights_config(settings), layout=_layout(settings))
    common: dict[str, Setting] = {
        "kind": settings.engine.value,
        "model_dir": str(directory.resolve()),
        "model_name": settings.model,
        "margin_s": settings.margin_s,
        "shaped": not settings.full_window,
    }
    if settings.engine is Engine.VLLM:  # how it runs is chosen from the device, in models/vllm_settings.py
        return common
    return common | {
        "device": settings.device,
        "compute_type": settings.compute_type,
        "workers": settings.resolved_workers,
        "threads_per_worker": settings.resolved_threads,
    }


class _Pending:
    """A recognizer whose parts are still being put together: refuses, as an engine that has not started does."""

    def __init__(self) -> None:
        self.is_complete = False
        self.engine: RemoteRecognizer | None = None
        self.new_detectors: Callable[[int], list[SpeechDetector]] | None = None

    @property
    def ready(self) -> bool:
        return self.is_complete and self.engine is not None and self.engine.ready

    @property
    def info(self) -> RecognizerInfo:
        if self.engine is None or not self.is_complete:
            raise RuntimeError("the service has not been started")
        return self.engine.info

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        if self.engine is None:
            raise RecognizerFailed("the engine has not been started")
        return await self.engine.decode(request)

    def detectors(self, count: int) -> list[SpeechDetector]:
        if self.new_detectors is None:
            raise RecognizerFailed("the speech detector has not been loaded")
        return self.new_detectors(count)


def create_app(settings: Settings) -> FastAPI:
    """The whole application. Its lifespan starts the engine, in the background, and stops it."""
    logger = structlog.stdlib.get_logger("hark")
    metrics = Metrics()
    pending = _Pending()
    dispatcher = make_dispatcher(pending, metrics, DispatchConfig(load=LoadConfig(settings.max_load)))
    metrics.engine_load.set_function(lambda: dispatcher.load.load)
    service = Service(
        settings=settings,
        metrics=metrics,
        logger=logger,
        engine=pending,
        dispatcher=dispatcher,
        new_detectors=pending.detectors,
        sessions=Admission(settings.max_sessions, "streams"),
        files=Admission(settings.max_files, "places for recordings"),
        access=_access(settings, logger),
    )

    rtc = _web_rtc(service)
    audiosocket = AudioSocketServer(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(_start(pending, service, rtc))
        try:
            await audiosocket.start()
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await audiosocket.close()
            await rtc.close()
            if pending.engine is not None:
                await pending.engine.close()

    app = FastAPI(title="Hark", version="0.1.0", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.state.service = service
    install_error_handlers(app)
    _let_pages_in(app, settings)
    app.include_router(websocket.routes(service))
    app.include_router(realtime.routes(service))
    app.include_router(rtc.routes)
    app.include_router(http.routes(_file_service(service)), dependencies=[Depends(_asks_for_key(service.access))])
    app.include_router(tokens.routes(service.access))
    app.include_router(deepgram.routes(service, _file_service(service)))
    app.include_router(telephony.routes(service))
    app.include_router(calls.routes(service))
    app.include_router(ops.routes(service))
    mount_page(app)
    return app


def make_dispatcher(
    recognizer: Recognizer, observer: DispatchObserver, config: DispatchConfig | None = None
) -> Dispatcher:
    return Dispatcher(recognizer, config or DispatchConfig(), observer)


async def _start(pending: _Pending, service: Service, rtc: webrtc.WebRtc) -> None:
    """Weights, engine, warm-up. A failure is logged and ends the service, which would be of no use."""
    clock = asyncio.get_running_loop()
    begun_s = clock.time()

    def announce(info: RecognizerInfo, start_s: float) -> None:
        service.logger.info("engine_ready", model=info.model, capacity=info.capacity, start_s=round(start_s, 2))

    def started(info: RecognizerInfo, start_s: float) -> None:
        service.metrics.engine_starts.inc()
        if pending.is_complete:  # else more is still to come
            announce(info, start_s)

    observer = RemoteObserver(
        started=started,
        stopped=lambda reason: service.logger.warning("engine_stopped", reason=reason),
        log_line=lambda line: service.logger.info("engine_log", line=line),
    )
    try:
        loading = asyncio.create_task(rtc.load())
        parts = await asyncio.to_thread(assemble, service.settings, observer)
        pending.engine, pending.new_detectors = parts.engine, parts.new_detectors
        await asyncio.gather(parts.engine.start(), loading)
    except Exception as error:  # a task's edge: nobody else would see it
        service.failure = str(error) or repr(error)
        service.logger.error("engine_failed_to_start", reason=service.failure)
        raise
    pending.is_complete = True
    announce(pending.info, clock.time() - begun_s)
    # Everything loaded so far lives as long as the process: the collector need not walk it again, which is what makes
    # its pauses long.
    gc.collect()
    gc.freeze()


class _Telemetered:
    """The file transcriber with one telemetry a recording."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def transcribe(
        self,
        pcm_chunks: AsyncIterator[bytes],
        options: DecodeOptions,
        progress: Callable[[Transcript], None],
        adjust: Callable[[SessionConfig], SessionConfig] = lambda config: config,
    ) -> list[Transcript]:
        telemetry = StreamTelemetry(
            self._service.metrics, self._service.logger, log_text=self._service.settings.log_text
        )
        kinds = self._service.settings.redacted_kinds
        transcriber = FileTranscriber(
            self._service.dispatcher,
            self._service.new_detectors,
            lambda output: telemetry.observe(redact(output, kinds)),
        )
        try:
            transcripts = await transcriber.transcribe(
                pcm_chunks, options, lambda transcript: progress(redact(transcript, kinds)), adjust
            )
        except Exception:
            self._service.metrics.files.labels("failed").inc()
            raise
        self._service.metrics.files.labels("done").inc()
        return [redact(transcript, kinds) for transcript in transcripts]


def _access(settings: Settings, logger: structlog.stdlib.BoundLogger) -> Access:
    """Raises BadKeyFile."""
    config = AccessConfig(
        origins=frozenset(listed(settings.allowed_origins)),
        keys=tuple(listed(settings.api_keys.get_secret_value())),
        streams_per_minute=settings.streams_per_minute,
        keys_file=settings.keys_file,
        token_secret=settings.token_secret.get_secret_value(),
    )
    return Access(config, complain=lambda reason: logger.error("keys_not_read", reason=reason))


def refusal(settings: Settings) -> str:
    """Why this must not be served; "" where it may be."""
    if settings.keys_file is not None:
        try:
            read_keys(settings.keys_file)
        except BadKeyFile as error:
            return f"HARK_KEYS_FILE: {error}"
        return ""
    if settings.open or listed(settings.api_keys.get_secret_value()) or not is_public(settings.host):
        return ""
    return (
        f"{settings.host} may be reached from other machines, and no key is asked for: set HARK_API_KEYS or "
        "HARK_KEYS_FILE, or HARK_OPEN=true to let everybody in"
    )


def _asks_for_key(access: Access) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        access.check_key(request)

    return check


def _let_pages_in(app: FastAPI, settings: Settings) -> None:
    """Tells browsers that pages of the allowed origins may read what they are answered."""
    origins = listed(settings.allowed_origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "api-key", "X-API-Key"],
            expose_headers=["Retry-After", http.INCOMPLETE_HEADER],
        )


def _web_rtc(service: Service) -> webrtc.WebRtc:
    settings, logger = service.settings, service.logger
    config = RtcConfig(connect_timeout_s=settings.rtc_connect_timeout_s)

    def load() -> Callable[[ice.IceServers, uuid.UUID], "Connection"]:
        """FastRTC brings Gradio with it, which takes seconds to import."""
        from app.rtc import interfaces, jitter
        from app.rtc.connection import Connection

        jitter.install()
        if settings.rtc_host:
            interfaces.offer_only(settings.rtc_host)
        return lambda servers, webrtc_id: Connection(config, servers, logger, str(webrtc_id))

    return webrtc.WebRtc(service, _ice_source(settings, logger), config, load)


def _ice_source(settings: Settings, logger: structlog.stdlib.BoundLogger) -> ice.IceSource:
    name, credential = settings.turn_username, settings.turn_credential.get_secret_value()
    match settings.turn:
        case Turn.NONE:
            return ice.FixedIce()
        case Turn.STATIC:
            server = ice.IceServer(tuple(listed(settings.turn_urls)), name or None, credential or None)
            return ice.FixedIce(ice.IceServers((server,)))
        case Turn.CLOUDFLARE:
            request = ice.cloudflare(name, credential)
        case Turn.TWILIO:
            request = ice.twilio(name, credential)
        case Turn.HUGGING_FACE:
            request = ice.hugging_face(credential or environment_value("HF_TOKEN") or "")
    return ice.KeptIce(ice.Provider(request), logger)


def _file_service(service: Service) -> FileService:
    @contextlib.contextmanager
    def admit(request: Request) -> Iterator[Grant]:
        service.info  # noqa: B018 - refuses while the engine starts
        with service.access.recording(request) as grant, service.files.slot():
            yield grant

    return FileService(
        transcriber=_Telemetered(service),
        admit=admit,
        model_names=lambda: [service.settings.model],
        media_limits=MediaLimits(max_duration_s=service.settings.max_file_s),
        max_upload_bytes=service.settings.max_upload_bytes,
    )


class _WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, with two changes.

    Little is written ahead of a slow client, so that what it has not read yet waits where newer text can replace it.

    A client that breaks the protocol, as with too long a message (1009), gets to read so. It may still be sending, and
    to close a socket with data unread resets it: the close frame would be lost. So our side is ended alone, and what
    comes is thrown away until the client ends its own, or for ``close_timeout``.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(_UNSENT_BYTES)

    def handle_parser_exception(self) -> None:
        if self.close_sent:
            return
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = True
        for data in self.conn.data_to_send():
            if data:
                self.transport.write(data)
            else:  # how websockets says that nothing more will be sent
                self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)


class _Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT lets the streams end first; a second one does not wait."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: object) -> None:
        if self._draining is not None:
            super().handle_exit(sig, None)
            return
        self._service.logger.info("draining", signal=signal.Signals(sig).name, sessions=self._service.sessions.open)
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._service.drain()
        finally:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. An engine that could not be started ends the service: it would be of no use."""
        return await super().on_tick(counter) or bool(self._service.failure)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that has stopped reading holds its connection for ever otherwise, whatever we close.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind((host, port))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def serve(settings: Settings, sock: socket.socket) -> None:
    """Serve until a signal ends it. Raises SystemExit with the reason where the engine cannot be started."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws=_WebSocketProtocol,
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=20.0,
        # Pings keep proxies from closing a quiet stream. A missing pong proves nothing: a client that sends faster than
        # it is heard is not read from meanwhile, and its pong waits behind its audio. The dead are found by
        # TCP_USER_TIMEOUT (each second has a heartbeat to be acknowledged) and by the idle limit.
        ws_ping_timeout=None,
        ws_per_message_deflate=False,  # audio does not deflate, and the text is small
        log_config=None,
        log_level="warning",  # at "info" it logs each stream's query, which may hold a prompt
        access_log=False,
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_graceful_shutdown=5,
        lifespan="on",
    )
    server = _Server(config, app.state.service)
    server.run(sockets=[sock])
    service: Service = app.state.service
    if service.failure:
        raise SystemExit(f"hark: {service.failure}")
