"""The one table from errors to what each wire says: HTTP status, WebSocket close code, OpenAI's error object."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from app.access import TooManyRequests
from app.wire.openai_http import BadField
from streaming.errors import BadAudio, ClientError, Overloaded, SttError

# Where clients expect OpenAI's error object whatever went wrong.
OPENAI_PREFIXES = ("/v1/", "/api/v1/")

# The close codes that SDKs take as "try again" are 1011, 1012 and 1013; 1007 and 1008 end it (RFC 6455, IANA registry).
CLOSE_BAD_AUDIO = 1007
CLOSE_POLICY = 1008
CLOSE_INTERNAL = 1011
CLOSE_TRY_AGAIN = 1013
CLOSE_BAD_PARAMETERS = 4400  # 4xxx is the application's own range; 4400 reads as HTTP's 400
CLOSE_TOO_MANY = 4429

# Codes whose HTTP status is more precise than their type's.
_STATUS_BY_CODE = {
    "upload_too_large": 413,
    "upload_stalled": 408,
    "not_multipart": 415,
    "model_not_found": 404,
    "unknown_connection": 404,
    "unknown_call": 404,
    "connection_exists": 409,
    "unauthorized": 401,
    "forbidden_origin": 403,
    "key_required": 403,
}

# Likewise for the close code.
_CLOSE_BY_CODE = {
    **dict.fromkeys(("bad_parameter", "unknown_parameter", "unknown_language"), CLOSE_BAD_PARAMETERS),
    "unauthorized": 4401,
    "forbidden_origin": 4403,
    "key_required": 4403,
}


@dataclass(frozen=True, slots=True)
class Surface:
    """How an error looks from outside. ``retry_after_s``: whole seconds, None where trying again is no use."""

    http_status: int
    close_code: int
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        challenge = {"WWW-Authenticate": "Bearer"} if self.http_status == 401 else {}
        return challenge | ({} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)})


def surface(error: SttError) -> Surface:
    """Whose fault it is decides: the client's 400 and 1007/1008, ours 500 and 1011, no capacity 503 and 1013."""
    match error:
        case Overloaded():
            return Surface(503, CLOSE_TRY_AGAIN, max(1, math.ceil(error.retry_after_s)))
        case TooManyRequests():
            return Surface(429, CLOSE_TOO_MANY, max(1, math.ceil(error.retry_after_s)))
        case BadAudio():
            return Surface(_STATUS_BY_CODE.get(error.code, 400), CLOSE_BAD_AUDIO)
        case ClientError():
            return Surface(_STATUS_BY_CODE.get(error.code, 400), _CLOSE_BY_CODE.get(error.code, CLOSE_POLICY))
        case _:
            return Surface(500, CLOSE_INTERNAL)


def close_code(error: SttError) -> int:
    """What a WebSocket is closed with for it, where its protocol has no codes of its own."""
    return surface(error).close_code


def error_object(error: SttError) -> dict[str, object]:
    """``{"error": {...}}`` as OpenAI's SDKs read it."""
    param = error.param if isinstance(error, BadField) else None
    return _object(surface(error).http_status, error.message, error.code, param)


def error_response(error: SttError) -> JSONResponse:
    shown = surface(error)
    return JSONResponse(error_object(error), shown.http_status, headers=shown.headers)


def _object(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, object]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """SttErrors everywhere, and under the OpenAI paths every other error too, become OpenAI's error object."""
    app.add_exception_handler(SttError, _on_stt_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_bug)


def _is_openai(request: Request) -> bool:
    return request.url.path.startswith(OPENAI_PREFIXES)


def _json(status: int, body: dict[str, object], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, status, headers=headers)


async def _on_stt_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SttError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not _is_openai(request):
        return await http_exception_handler(request, error)
    path = f"{request.method} {request.url.path}"
    message = f"Invalid URL ({path})" if error.status_code == 404 else str(error.detail)
    code = "not_found" if error.status_code == 404 else None
    return _json(error.status_code, _object(error.status_code, message, code), error.headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if not _is_openai(request):
        return await request_validation_exception_handler(request, error)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return _json(400, _object(400, str(first["msg"]), "invalid_value", param))


async def _on_bug(request: Request, error: Exception) -> Response:
    """What nobody foresaw. The server logs the traceback; the client learns only whose fault it is."""
    if not _is_openai(request):
        return PlainTextResponse("Internal Server Error", 500)
    return _json(500, _object(500, "The server had an error while processing your request.", "internal_error"))
