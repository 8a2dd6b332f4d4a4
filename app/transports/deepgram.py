"""Deepgram's ``/v1/listen``: live over a WebSocket, recordings by POST."""

import asyncio
import contextlib
import hashlib
import tempfile
import uuid
from datetime import UTC, datetime
from typing import IO

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.access import accepted_subprotocol, parameters_in
from app.conversation import Conversation, Peer, Terms
from app.errors import surface
from app.live import ClientGone
from app.recordings import FileService
from app.service import Service
from app.stream_media import StreamLimits, decoding
from app.transports.peer import WebSocketPeer
from app.uploads import CLIENT_GONE, check_declared_size, counted_body, unless_gone
from app.wire.deepgram import IDLE_REASON, IDLE_TIMEOUT_S, KEEP_ALIVE, DeepgramDialect, Identity, is_close_stream
from app.wire.deepgram_query import ListenRequest, parse_live, parse_recorded
from app.wire.deepgram_recorded import error_object, recording_object
from app.wire.wav import HEAD_BYTES, wav_head
from streaming.errors import BadAudio, BadMessage, SttError

PATH = "/v1/listen"
_TERMS = Terms(IDLE_TIMEOUT_S, idle_message=IDLE_REASON)
_MAX_HEADER_CHARS = 500


def routes(service: Service, recordings: FileService) -> APIRouter:
    router = APIRouter(tags=["deepgram"])

    @router.websocket(PATH)
    async def live(websocket: WebSocket) -> None:
        request_id = str(uuid.uuid4())
        try:
            await _talk(service, websocket, request_id)
        except SttError as error:  # before the handshake: nothing that is raised later comes out of a conversation
            service.metrics.sessions_total.labels(error.code).inc()
            await _deny(websocket, error, request_id)

    @router.post(PATH)
    async def recorded(request: Request) -> Response:
        """Transcribe a recording as Deepgram does: the body is the audio, or video, in any common container."""
        request_id = str(uuid.uuid4())
        try:
            return await _transcribe(service, recordings, request, request_id)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except SttError as error:
            return _refusal(error, request_id)

    return router


def _identity(service: Service, request_id: str) -> Identity:
    created = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Identity(request_id, created, service.info.model)


def _refusal(error: SttError, request_id: str) -> JSONResponse:
    """Deepgram's clients read the reason in a header: most WebSocket libraries show no body."""
    shown = surface(error)
    reason = error.message.encode("ascii", "replace").decode().replace("\n", " ")[:_MAX_HEADER_CHARS]
    headers = {**shown.headers, "dg-request-id": request_id, "dg-error": reason}
    return JSONResponse(error_object(error, shown.http_status, request_id), shown.http_status, headers=headers)


# Live ----------------------------------------------------------------------------------------------------------------


async def _talk(service: Service, websocket: WebSocket, request_id: str) -> None:
    """One live stream. Raises SttError where it is refused, which Deepgram's clients expect before the handshake."""
    async with contextlib.AsyncExitStack() as held:
        grant = held.enter_context(service.access.stream(websocket))
        request = parse_live(parameters_in(websocket), service.info.languages)
        held.enter_context(service.stream_slot())
        dialect = DeepgramDialect(request, service.stream_defaults, _identity(service, request_id))
        peer: Peer = _Peer(websocket, request_id)
        if request.encoding is None:
            peer = await held.enter_async_context(decoding(peer, StreamLimits(), is_close_stream, KEEP_ALIVE))
        await Conversation(service, peer, lambda: contextlib.nullcontext(grant), _TERMS, dialect, request_id).serve()


class _Peer(WebSocketPeer):
    """Tells the client in the handshake what its request is called."""

    def __init__(self, websocket: WebSocket, request_id: str) -> None:
        super().__init__(websocket)
        self._handshake = websocket
        self._headers = [(b"dg-request-id", request_id.encode())]

    async def open(self) -> None:
        try:
            await self._handshake.accept(accepted_subprotocol(self._handshake), self._headers)
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None


async def _deny(websocket: WebSocket, error: SttError, request_id: str) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has left meanwhile
        await websocket.send_denial_response(_refusal(error, request_id))


# Recorded ------------------------------------------------------------------------------------------------------------


async def _transcribe(service: Service, recordings: FileService, request: Request, request_id: str) -> Response:
    check_declared_size(request, recordings.max_upload_bytes)
    with recordings.admit(request) as grant, tempfile.TemporaryFile() as file:
        wanted = parse_recorded(parameters_in(request), service.info.languages)
        _refuse_addresses(request)
        sha256 = await _save(request, recordings.max_upload_bytes, wanted, file)
        work = recordings.understand(file.fileno(), grant, wanted.options, wanted.adjusted)
        transcription = await unless_gone(request, work)
        body = recording_object(transcription, wanted, _identity(service, request_id), sha256)
        return JSONResponse(body, headers={"dg-request-id": request_id})


def _refuse_addresses(request: Request) -> None:
    """A service that fetches what it is told to can be made to fetch from inside its own network."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        raise BadMessage("recordings are not fetched from a URL: send the audio itself as the body")


async def _save(request: Request, max_bytes: int, wanted: ListenRequest, file: IO[bytes]) -> str:
    """The body on disk, where the decoder can seek in it; returns its SHA-256 in hex.

    Bytes of a declared encoding become a WAV file: so there is one way into the decoder.
    """
    digest, size = hashlib.sha256(), 0
    if wanted.audio is not None:
        file.seek(HEAD_BYTES)
    async for chunk in counted_body(request, max_bytes):
        digest.update(chunk)
        size += len(chunk)
        await asyncio.to_thread(file.write, chunk)
    if not size:
        raise BadAudio("the request has no body: send the audio as the body", code="empty_file")
    if wanted.audio is not None:
        file.seek(0)
        file.write(wav_head(wanted.audio, size))
    await asyncio.to_thread(file.flush)
    return digest.hexdigest()
