"""Asterisk's AudioSocket: a TCP port of its own. The protocol knows no keys; whoever reaches the port is let in."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from urllib.parse import parse_qsl

from app.access import Grant, Visitor
from app.conversation import Conversation, Terms
from app.dialect import Wire
from app.errors import close_code
from app.redaction import Kind
from app.service import Service
from app.wire.audiosocket import AudioSocket
from app.wire.calls import HANG_UP, Surroundings

_READ_BYTES = 65_536
_CLOSE_TIMEOUT_S = 2.0


class AudioSocketServer:
    """Listens where the settings say so; each connection is one call."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parameters = dict(parse_qsl(service.settings.audiosocket_parameters))
        self._idle_s = service.settings.idle_timeout_s
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Does nothing where no port is set. An address that cannot be had ends the service, which says so."""
        host, port = self._service.settings.audiosocket_host, self._service.settings.audiosocket_port
        if port is None:
            return
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            self._service.failure = f"AudioSocket cannot listen on {host}:{port}: {error.strerror or error}"
            return
        port = self._server.sockets[0].getsockname()[1]
        self._service.logger.info("audiosocket_listens", host=host, port=port)

    async def close(self) -> None:
        """Calls that are still open are cut off."""
        if self._server is None:
            return
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service = self._service
        address = str((writer.get_extra_info("peername") or [""])[0])

        @contextlib.contextmanager
        def admit() -> Iterator[Grant]:
            visitor = Visitor(address)
            with service.access.stream_of(visitor, is_vouched_for=True) as grant, service.stream_slot():
                yield grant

        call = service.calls.open()
        try:
            session_id = uuid.uuid4().hex
            hides_keys = Kind.CARD in service.settings.redacted_kinds
            around = Surroundings(
                call, session_id, service.stream_defaults, lambda: service.info, close_code, hides_keys=hides_keys
            )
            dialect = AudioSocket(around, self._parameters)
            peer, terms = _Peer(reader, writer, self._idle_s), Terms(2 * self._idle_s)  # the peer is quicker
            await Conversation(service, peer, admit, terms, dialect, session_id).serve()
        finally:
            call.end()
            writer.close()


class _Peer:
    """A Peer. Who has hung up, or is silent for too long, has not left: what was said is still to be transcribed, for
    those who follow the call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._idle_s = idle_s
        self._has_left = False

    async def open(self) -> None:
        """It is."""

    async def receive(self) -> Wire:
        if self._has_left:
            await asyncio.Event().wait()  # until the conversation, which then has all it needs, is done
        data = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._idle_s):
                data = await self._reader.read(_READ_BYTES)
        self._has_left = not data
        return data or HANG_UP

    async def send(self, message: Wire) -> None:
        with contextlib.suppress(OSError):
            self._writer.write(message if isinstance(message, bytes) else message.encode())
            await self._writer.drain()

    async def close(self, code: int, why: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.close()
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
