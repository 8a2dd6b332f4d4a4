"""``/v1/realtime``: OpenAI's Realtime transcription sessions over a WebSocket, and client secrets for them."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from starlette.websockets import WebSocket

from app.access import Grant, accepted_subprotocol
from app.conversation import Conversation, Terms
from app.errors import close_code
from app.service import Service
from app.tokens import MAX_NOTE_CHARS, OPENAI_PREFIX
from app.transports.peer import WebSocketPeer
from app.wire.openai_http import BadField
from app.wire.openai_realtime import OpenAIRealtime
from app.wire.realtime_session import secret_lifetime_s


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["live"])
    terms = Terms(service.settings.idle_timeout_s)

    def new_dialect(session_id: str, model: str = "") -> OpenAIRealtime:
        return OpenAIRealtime(session_id, service.stream_defaults, lambda: service.info, close_code, model=model)

    @router.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        session_id = uuid.uuid4().hex
        dialect = new_dialect(session_id, websocket.query_params.get("model", ""))

        @contextlib.contextmanager
        def admit() -> Iterator[Grant]:
            """A client secret brings the settings that it was made with."""
            with service.access.stream(websocket) as grant, service.stream_slot():
                if grant.note:
                    dialect.preset(json.loads(grant.note))
                yield grant

        peer = WebSocketPeer(websocket, accepted_subprotocol(websocket))
        await Conversation(service, peer, admit, terms, dialect, session_id).serve()

    @router.post("/v1/realtime/client_secrets")
    async def make_secret(request: Request, wish: Annotated[dict[str, Any] | None, Body()] = None) -> JSONResponse:
        """A token for a browser, good for any number of sessions with these settings until it expires."""
        grant = service.access.check(request)
        ttl_s = secret_lifetime_s(wish or {})
        session = (wish or {}).get("session") or {}
        if not isinstance(session, dict):
            raise BadField("session must be an object", param="session")
        dialect = new_dialect(uuid.uuid4().hex)
        dialect.preset(session)
        shown = dialect.begin()
        note = json.dumps(session, separators=(",", ":"))
        if len(note) > MAX_NOTE_CHARS:
            raise BadField(f"the session is described in more than {MAX_NOTE_CHARS} characters", param="session")
        value, expires_at = service.access.issue(grant, ttl_s, note=note, prefix=OPENAI_PREFIX)
        answer = {"value": value, "expires_at": expires_at, "session": shown}
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    return router
