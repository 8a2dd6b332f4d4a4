"""``/v1/calls/{id}/events``: what is said in a telephone call, as server-sent events, for who knows the call's id."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import StreamingResponse

from app.calls import Call
from app.service import Service
from streaming.errors import Overloaded

_QUIET_S = 15.0  # proxies close what is quiet for longer
_MAX_WAIT_S = 60.0


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/calls/{call_id}/events", response_class=StreamingResponse)
    async def events(
        request: Request,
        call_id: str,
        wait_s: Annotated[float, Query(ge=0, le=_MAX_WAIT_S)] = 0.0,
        last_event_id: Annotated[str, Header()] = "",
    ) -> StreamingResponse:
        """All events of the call, from its beginning to its end. It may be open, have ended a while ago, or begin
        within ``wait_s``. Who comes back with ``Last-Event-ID`` gets what came after that event."""
        service.access.check(request)
        after = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else 0
        with service.calls.follower():
            call = await service.calls.find(call_id, wait_s)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # else nginx holds them back
        return StreamingResponse(_stream(service, call, after), media_type="text/event-stream", headers=headers)

    return router


async def _stream(service: Service, call: Call, after: int) -> AsyncIterator[str]:
    try:
        with service.calls.follower():
            async for number, text in call.follow(after, _QUIET_S):
                yield f"id: {number}\ndata: {text}\n\n" if text else ":\n\n"
    except Overloaded:  # somebody was quicker; the answer has begun and can only end
        return
