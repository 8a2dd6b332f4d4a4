"""``/v1/stream``: Hark's own protocol over a WebSocket."""

import contextlib
import uuid
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.websockets import WebSocket

from app.access import Grant, accepted_subprotocol, parameters_in
from app.conversation import Conversation, Terms
from app.errors import close_code
from app.service import Service
from app.transports.peer import WebSocketPeer
from app.wire import native


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    idle_s = service.settings.idle_timeout_s
    terms = Terms(idle_s, idle_message=f'nothing came for {idle_s:g} s; send {{"type":"keepalive"}} while muted')

    @router.websocket("/v1/stream")
    async def stream(websocket: WebSocket) -> None:
        @contextlib.contextmanager
        def admit() -> Iterator[Grant]:
            """After the handshake: a browser is not told why one was refused."""
            with service.access.stream(websocket) as grant, service.stream_slot():
                yield grant

        session_id = uuid.uuid4().hex
        dialect = native.NativeDialect(
            session_id,
            service.stream_defaults,
            lambda: service.info,
            close_code,
            given=native.query_parameters(parameters_in(websocket)),
        )
        peer = WebSocketPeer(websocket, accepted_subprotocol(websocket))
        await Conversation(service, peer, admit, terms, dialect, session_id).serve()

    return router
