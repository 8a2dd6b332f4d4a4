"""A WebSocket's client, as app/conversation.py sees it; whatever is spoken over it."""

import asyncio

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.dialect import Wire
from app.live import ClientGone

_CLOSE_TIMEOUT_S = 2.0


class WebSocketPeer:
    """A Peer. Starlette has two ways to say that the client has just left."""

    def __init__(self, websocket: WebSocket, subprotocol: str | None = None) -> None:
        """``subprotocol``: the one of those that the client offered which it is told."""
        self._websocket = websocket
        self._subprotocol = subprotocol

    async def open(self) -> None:
        try:
            await self._websocket.accept(self._subprotocol)
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None

    async def receive(self) -> Wire:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        data: bytes | None = message.get("bytes")
        if data is not None:
            return data
        text: str = message.get("text") or ""
        return text

    async def send(self, message: Wire) -> None:
        try:
            if isinstance(message, str):
                await self._websocket.send_text(message)
            else:
                await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError):
            raise ClientGone from None

    async def close(self, code: int, why: str) -> None:
        cut = why.encode()[:120].decode(errors="ignore")  # a close frame holds 123 bytes (RFC 6455, 5.5)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._websocket.close(code, cut)
        except (TimeoutError, RuntimeError, WebSocketDisconnect):
            pass
