"""Request bodies that are files: read as they come, counted, and given up where the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from streaming.errors import ClientError

STALL_S = 60.0  # an upload of which nothing comes for so long holds its place for nothing
CLIENT_GONE = 499  # nginx's status; nobody is left to read it

T = TypeVar("T")


def check_declared_size(request: Request, max_bytes: int) -> None:
    """Raises ClientError where the request says itself that it is too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)


async def counted_body(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises ClientError as soon as it is too long, or where nothing comes any more."""
    received = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise ClientError("The upload stalled.", code="upload_stalled") from error
        if chunk is None:
            return
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


async def unless_gone(request: Request, work: Coroutine[None, None, T]) -> T:
    """The work's result. Raises ClientDisconnect, with the work cancelled, where the client leaves first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> ClientError:
    return ClientError(f"The upload is larger than the {max_bytes} bytes that are accepted.", code="upload_too_large")
