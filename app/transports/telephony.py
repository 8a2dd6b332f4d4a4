"""Telephone exchanges that bring a call's audio over a WebSocket: Twilio, Telnyx, Genesys; and Twilio's TwiML."""

import asyncio
import base64
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter, Header, Request, Response
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from app.access import Grant, Unauthorized, visitor
from app.calls import Call
from app.conversation import Conversation, Terms
from app.dialect import Dialect, Wire
from app.errors import close_code
from app.live import ClientGone
from app.redaction import Kind
from app.service import Service
from app.transports.peer import WebSocketPeer
from app.wire import http_signature, media_streams, twiml
from app.wire.audiohook import AudioHook
from app.wire.calls import HANG_UP, Surroundings
from app.wire.media_streams import TELNYX, TWILIO, MediaStreams, Variant
from streaming.errors import BadMessage

_START_TIMEOUT_S = 10.0
_MESSAGES_TO_START = 3  # of which ``start`` is one
_MAX_FORM_BYTES = 65_536


class _CallPeer:
    """A Peer. Who has hung up, or is silent for too long, has not left: what was said is still to be transcribed, for
    those who follow the call."""

    def __init__(
        self,
        websocket: WebSocket,
        idle_s: float,
        *,
        is_first: Callable[[Wire], bool] | None = None,
        number: Callable[[Wire], Wire] = lambda message: message,
    ) -> None:
        """``idle_s``: after so long without a message the call is over. ``is_first``: whether this is the message that
        says who calls, which is waited for in ``open``. ``number``: the last that happens to a message on its way."""
        self._peer = WebSocketPeer(websocket)
        self._idle_s = idle_s
        self._is_first = is_first
        self._number = number
        self._ahead: deque[Wire] = deque()
        self._has_left = False

    @property
    def ahead(self) -> tuple[Wire, ...]:
        """What came before anything was received."""
        return tuple(self._ahead)

    async def open(self) -> None:
        """Raises BadMessage where the first messages are not what they must be, or do not come."""
        await self._peer.open()
        if self._is_first is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                while len(self._ahead) < _MESSAGES_TO_START:
                    self._ahead.append(await self._peer.receive())
                    if self._is_first(self._ahead[-1]):
                        return
        raise BadMessage("a stream begins with 'start'")

    async def receive(self) -> Wire:
        if self._ahead:
            return self._ahead.popleft()
        if self._has_left:
            await asyncio.Event().wait()  # until the conversation, which then has all it needs, is done
        try:
            async with asyncio.timeout(self._idle_s):
                return await self._peer.receive()
        except (ClientGone, TimeoutError):
            self._has_left = True
            return HANG_UP

    async def send(self, message: Wire) -> None:
        with contextlib.suppress(ClientGone):
            await self._peer.send(self._number(message))

    async def close(self, code: int, why: str) -> None:
        await self._peer.close(code, why)


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    telephony = _Telephony(service)

    @router.websocket("/twilio")
    async def twilio(websocket: WebSocket) -> None:
        await telephony.media_stream(websocket, TWILIO)

    @router.websocket("/telnyx")
    async def telnyx(websocket: WebSocket) -> None:
        await telephony.media_stream(websocket, TELNYX)

    @router.websocket("/audiohook")
    async def audiohook(websocket: WebSocket) -> None:
        with telephony.call() as call:
            session_id = uuid.uuid4().hex
            dialect = AudioHook(telephony.around(call, session_id))
            peer = _CallPeer(websocket, telephony.idle_s, number=dialect.number)
            is_signed = telephony.is_signed_by_genesys(websocket) if telephony.secret else None
            await telephony.serve(websocket, peer, dialect, session_id, is_signed=is_signed)

    @router.api_route("/twilio/twiml", methods=["GET", "POST"], response_class=Response)
    async def twiml_answer(request: Request, x_twilio_signature: Annotated[str, Header()] = "") -> Response:
        """What Twilio is to do with a call: send both tracks here, then connect it with ``dial``, ask ``then`` how it
        goes on, or wait until the caller hangs up. Every other parameter of the query goes along with the stream."""
        form = parse_qsl((await _body(request)).decode("utf-8", "replace"), keep_blank_values=True)
        if telephony.token and not telephony.is_signed(request, x_twilio_signature, form):
            raise Unauthorized("this is not signed as Twilio signs its requests")
        return Response(twiml.render(_answer(request, dict(form))), media_type="application/xml")

    return router


class _Telephony:
    """One conversation for each stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.idle_s = service.settings.idle_timeout_s
        self._terms = Terms(2 * self.idle_s)  # the peer is quicker
        self.secret = base64.b64decode(service.settings.audiohook_secret.get_secret_value())
        self.token = service.settings.twilio_auth_token.get_secret_value()

    @contextlib.contextmanager
    def call(self) -> Iterator[Call]:
        call = self._service.calls.open()
        try:
            yield call
        finally:
            call.end()

    def around(self, call: Call, session_id: str) -> Surroundings:
        service = self._service
        hides_keys = Kind.CARD in service.settings.redacted_kinds
        return Surroundings(
            call, session_id, service.stream_defaults, lambda: service.info, close_code, hides_keys=hides_keys
        )

    async def media_stream(self, websocket: WebSocket, variant: Variant) -> None:
        def credentials() -> tuple[str, ...]:
            token = websocket.headers.get("x-telnyx-streaming-auth-token", "")
            found = [key for message in peer.ahead for key in media_streams.credentials_in(message, variant)]
            return (*found, token) if token else tuple(found)

        with self.call() as call:
            peer = _CallPeer(websocket, self.idle_s, is_first=media_streams.is_start)
            is_signed = None
            if variant is TWILIO and self.token:
                is_signed = self.is_signed(websocket, websocket.headers.get("x-twilio-signature", ""), [])
            session_id = uuid.uuid4().hex
            dialect = MediaStreams(variant, self.around(call, session_id))
            await self.serve(websocket, peer, dialect, session_id, credentials, is_signed=is_signed)

    def is_signed(self, connection: HTTPConnection, signature: str, form: list[tuple[str, str]]) -> bool:
        urls = twiml.known_as(connection.scope["scheme"], _hosts(connection), _target(connection))
        return twiml.is_signed(self.token, signature, urls, form)

    def is_signed_by_genesys(self, connection: HTTPConnection) -> bool:
        headers, hosts = dict(connection.headers), _hosts(connection)
        return http_signature.is_signed(self.secret, headers, _target(connection), hosts, time.time())

    async def serve(
        self,
        websocket: WebSocket,
        peer: _CallPeer,
        dialect: Dialect,
        session_id: str,
        credentials: Callable[[], tuple[str, ...]] = tuple,
        *,
        is_signed: bool | None = None,
    ) -> None:
        """``credentials``: those that came in messages. ``is_signed``: None where no signature is asked for."""

        @contextlib.contextmanager
        def admit() -> Iterator[Grant]:
            access = self._service.access
            access.check_origin(websocket)
            if is_signed is False:
                raise Unauthorized("this is not signed as the exchange signs its requests")
            who = visitor(websocket, *credentials())
            with access.stream_of(who, is_vouched_for=bool(is_signed)) as grant, self._service.stream_slot():
                yield grant

        await Conversation(self._service, peer, admit, self._terms, dialect, session_id).serve()


def _hosts(connection: HTTPConnection) -> list[str]:
    """The names by which the client may know this service; a proxy puts the one that it was asked for into
    X-Forwarded-Host."""
    found = (connection.headers.get(name, "").split(",")[0].strip() for name in ("x-forwarded-host", "host"))
    return [host for host in found if host]


def _target(connection: HTTPConnection) -> str:
    """Path and query. The connection's own URL is put together with a header, which may be nonsense."""
    query = connection.scope["query_string"].decode("latin-1")
    return str(connection.scope["path"]) + (f"?{query}" if query else "")


def _answer(request: Request, form: dict[str, str]) -> twiml.Answer:
    """Twilio connects to WebSockets over TLS only, so the stream's URL is one, whatever a proxy has made of it."""
    given = dict(request.query_params)
    dial, then = given.pop("dial", ""), given.pop("then", "")
    callers = {name.lower(): form[name] for name in ("From", "To") if form.get(name)}
    hosts = _hosts(request)
    if not hosts:
        raise BadMessage("a request must say which host it is for")
    url = f"wss://{hosts[0]}{request.scope['path'].removesuffix('/twiml')}"
    return twiml.Answer(url, callers | given, dial, then)


async def _body(request: Request) -> bytes:
    """Raises BadMessage where it is longer than any of Twilio's."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM_BYTES:
            raise BadMessage(f"a form may have {_MAX_FORM_BYTES} bytes")
    return bytes(body)
