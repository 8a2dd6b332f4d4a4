"""``/v1/rtc/offer``: Hark's own protocol over WebRTC. Audio is the connection's track, messages go by data channel."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from app.access import parameters_in
from app.conversation import Conversation, Terms
from app.errors import close_code
from app.rtc.config import RtcConfig
from app.rtc.ice import IceServers, IceSource
from app.rtc.offer import BadOffer, check_offer
from app.service import Service
from app.wire import native
from app.wire.openai_http import BadField
from streaming.config import AudioFormat
from streaming.errors import Overloaded

if TYPE_CHECKING:
    from app.rtc.connection import Connection

_MAX_BODY_BYTES = 65_536  # a browser's offer has about 2,000
_BODY_S = 10.0


class WebRtc:
    """All connections, and the routes to them."""

    def __init__(
        self,
        service: Service,
        ice: IceSource,
        config: RtcConfig,
        load: "Callable[[], Callable[[IceServers, uuid.UUID], Connection]]",
    ) -> None:
        """``load`` gives what makes connections; it may take seconds."""
        self._service = service
        self._ice = ice
        self._config = config
        self._load = load
        self._new_connection: Callable[[IceServers, uuid.UUID], Connection] | None = None
        self._terms = Terms(idle_timeout_s=service.settings.rtc_audio_timeout_s, has_track=True)
        self._connections: dict[uuid.UUID, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes = APIRouter()
        self.routes.add_api_route("/v1/rtc/offer", self._on_post, methods=["POST"], tags=["live"])
        self.routes.add_api_route("/v1/rtc-config", self._on_config, methods=["GET"], tags=["live"])

    async def load(self) -> None:
        """To be done once, before the service is ready; nothing else waits meanwhile."""
        self._new_connection = await asyncio.to_thread(self._load)

    async def close(self) -> None:
        """End every connection at once."""
        for connection in tuple(self._connections.values()):
            connection.hang_up()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.close_timeout_s)

    async def _on_config(self, request: Request) -> JSONResponse:
        """The servers that a client's RTCPeerConnection should use, and for how many seconds it may."""
        self._service.access.check(request)
        return JSONResponse((await self._ice.get()).as_json(), headers={"Cache-Control": "no-store"})

    async def _on_post(self, request: Request) -> JSONResponse:
        """An offer, answered with the session description; or a candidate that came after its offer."""
        self._service.access.check(request)
        body = await _read_json(request)
        webrtc_id = _webrtc_id(body)
        if body.get("type") == "ice-candidate":
            await self._known(webrtc_id).add_candidate(body.get("candidate"))
            return JSONResponse({"status": "success"})
        sdp = body.get("sdp")
        if body.get("type") != "offer" or not isinstance(sdp, str):
            raise BadOffer("the body must have type 'offer' and an sdp, or type 'ice-candidate' and a candidate")
        return JSONResponse({"sdp": await self._connect(webrtc_id, sdp, request), "type": "answer"})

    async def _connect(self, webrtc_id: uuid.UUID, sdp: str, request: Request) -> str:
        """The answer. The connection goes on by itself; its places are taken before anything is built for it."""
        if self._new_connection is None:
            raise Overloaded("the service is still starting; try again in a few seconds", code="starting")
        with contextlib.ExitStack() as held:
            grant = held.enter_context(self._service.access.stream(request))  # a bad offer counts too
            check_offer(sdp)
            ice = await self._ice.get()
            if webrtc_id in self._connections:
                raise BadField("there is a connection of this id", param="webrtc_id", code="connection_exists")
            connection = self._new_connection(ice, webrtc_id)
            dialect = self._dialect(webrtc_id)
            dialect.configure(native.query_parameters(parameters_in(request)))
            conversation = Conversation(
                self._service, connection, lambda: contextlib.nullcontext(grant), self._terms, dialect, webrtc_id.hex
            )
            held.enter_context(self._service.stream_slot())
            self._connections[webrtc_id] = connection
            held.callback(self._connections.pop, webrtc_id)
            try:
                answer = await connection.negotiate(sdp)
            except BaseException:
                await connection.dispose()
                raise
            task = asyncio.create_task(self._serve(connection, conversation, held.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    def _dialect(self, webrtc_id: uuid.UUID) -> native.NativeDialect:
        service = self._service
        return native.NativeDialect(
            webrtc_id.hex, service.stream_defaults, lambda: service.info, close_code, audio=AudioFormat()
        )

    async def _serve(self, connection: "Connection", conversation: Conversation, held: contextlib.ExitStack) -> None:
        """The slot is free when the conversation is over: to take leave of a TURN server that is gone takes 30 s."""
        try:
            with held:
                await conversation.serve()
        finally:
            await connection.dispose()

    def _known(self, webrtc_id: uuid.UUID) -> "Connection":
        try:
            return self._connections[webrtc_id]
        except KeyError:
            raise BadField("no connection has this id", param="webrtc_id", code="unknown_connection") from None


async def _read_json(request: Request) -> dict[str, Any]:
    """Raises BadOffer where the body is no JSON object, or is too long or too slow for an offer."""
    raw = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > _MAX_BODY_BYTES:
                    raise BadOffer(f"the body has more than {_MAX_BODY_BYTES} bytes")
    except (ClientDisconnect, TimeoutError):
        raise BadOffer("the body is incomplete") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadOffer("the body must be JSON") from None
    if not isinstance(body, dict):
        raise BadOffer("the body must be a JSON object")
    return body


def _webrtc_id(body: dict[str, Any]) -> uuid.UUID:
    given = body.get("webrtc_id")
    try:
        return uuid.UUID(given if isinstance(given, str) else "")
    except ValueError:
        raise BadField(
            "webrtc_id must be a UUID that the client made up", param="webrtc_id", code="bad_offer"
        ) from None
