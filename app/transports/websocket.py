"""``/v1/stream``: Hark's own protocol over a WebSocket."""

import asyncio
import contextlib
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.access import parameters_in
from app.conversation import Conversation, Terms
from app.live import ClientGone
from app.service import Service
from app.wire import native

_CLOSE_TIMEOUT_S = 2.0


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    terms = Terms(idle_timeout_s=service.settings.idle_timeout_s)

    @router.websocket("/v1/stream")
    async def stream(websocket: WebSocket) -> None:
        @contextlib.contextmanager
        def admit() -> Iterator[None]:
            """After the handshake: a browser is not told why one was refused."""
            service.access.check(websocket)
            service.access.count(websocket)
            with service.stream_slot():
                yield

        conversation = Conversation(service, _Peer(websocket), admit, terms)
        await conversation.serve(native.query_parameters(parameters_in(websocket)))

    return router


class _Peer:
    """A WebSocket's client. Starlette has two ways to say that it has just left."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def open(self) -> None:
        try:
            await self._websocket.accept()
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None

    async def receive(self) -> str | bytes:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        data: bytes | None = message.get("bytes")
        if data is not None:
            return data
        text: str = message.get("text") or ""
        return text

    async def send(self, text: str) -> None:
        try:
            await self._websocket.send_text(text)
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None

    async def close(self, code: int, why: str) -> None:
        cut = why.encode()[:120].decode(errors="ignore")  # a close frame holds 123 bytes (RFC 6455, 5.5)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._websocket.close(code, cut)
        except (TimeoutError, RuntimeError, WebSocketDisconnect):
            pass
