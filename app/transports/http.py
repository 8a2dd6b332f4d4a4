"""Files over HTTP, as OpenAI's API takes them: upload, decode, transcribe, answer."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.errors import error_object
from app.recordings import FileService, Outcome
from app.uploads import CLIENT_GONE, check_declared_size, counted_body, unless_gone
from app.wire.openai_http import (
    SSE_KEEPALIVE,
    BadField,
    ResponseFormat,
    Transcription,
    TranscriptionForm,
    model_object,
    parse_form,
    render,
    render_delta,
    render_done,
    render_failure,
)
from streaming.errors import BadMessage, SttError
from streaming.events import FinalTranscript
from streaming.types import Task

INCOMPLETE_HEADER = "X-Hark-Incomplete"
ALIAS = "whisper-1"  # what OpenAI's clients ask for when nobody tells them better
PREFIXES = ("/v1", "/api/v1")

FIELD_BYTES = 64 * 1024
FIELDS = 200
FILES = 4
KEEPALIVE_S = 15.0


def routes(service: FileService) -> APIRouter:
    """Transcriptions, translations and models, under both prefixes that clients use.

    Any ``model`` is accepted: one is served, and clients of self-hosted servers send all sorts of names.
    """
    router = APIRouter(tags=["files"])

    async def transcriptions(request: Request) -> Response:
        """Transcribe an audio or video file in the language that is spoken."""
        return await _serve(request, service, Task.TRANSCRIBE)

    async def translations(request: Request) -> Response:
        """Translate the speech of an audio or video file into English text."""
        return await _serve(request, service, Task.TRANSLATE)

    async def models() -> Response:
        """The model that is served, by its names."""
        return JSONResponse({"object": "list", "data": [model_object(name) for name in _names(service)]})

    async def model(model_id: str) -> Response:
        """One model by its name."""
        if model_id not in _names(service):
            raise BadField(f"The model {model_id!r} is not served here.", param="model", code="model_not_found")
        return JSONResponse(model_object(model_id))

    for prefix in PREFIXES:
        in_schema = prefix == PREFIXES[0]
        for path, endpoint in (("transcriptions", transcriptions), ("translations", translations)):
            router.add_api_route(
                f"{prefix}/audio/{path}",
                endpoint,
                methods=["POST"],
                openapi_extra=_FORM_SCHEMA,
                include_in_schema=in_schema,
            )
        router.add_api_route(f"{prefix}/models", models, methods=["GET"], include_in_schema=in_schema)
        router.add_api_route(f"{prefix}/models/{{model_id:path}}", model, methods=["GET"], include_in_schema=in_schema)
    return router


def _names(service: FileService) -> list[str]:
    return list(dict.fromkeys([*service.model_names(), ALIAS]))


async def _serve(request: Request, service: FileService, task: Task) -> Response:
    check_declared_size(request, service.max_upload_bytes)
    try:
        async with contextlib.AsyncExitStack() as held:
            grant = held.enter_context(service.admit(request))
            form = await _read_form(request, service.max_upload_bytes)
            held.push_async_callback(form.close)
            upload, wanted = _parts(form, task)
            # Decoding reads the spooled file itself, which has no name in the file system: nothing is left of it.
            descriptor = await asyncio.to_thread(_on_disk, upload)
            adjust = wanted.chunking.applied_to
            work = functools.partial(service.understand, descriptor, grant, wanted.options, adjust)
            if wanted.is_streamed:
                return _EventStream(request, work, held.pop_all(), logprobs=wanted.logprobs)
            return _response(await unless_gone(request, work()), wanted)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


def _parts(form: FormData, task: Task) -> tuple[UploadFile, TranscriptionForm]:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        message = "The form has no file: send one in the field 'file', with a file name."
        raise BadField(message, param="file", code="missing_file")
    return upload, parse_form([(name, value) for name, value in form.multi_items() if isinstance(value, str)], task)


def _response(transcription: Transcription, wanted: TranscriptionForm) -> Response:
    """What is missing is said in a header too: text, srt and vtt have no other place for it."""
    headers = {INCOMPLETE_HEADER: _header_value(transcription.warnings)} if transcription.warnings else {}
    body, media_type = render(transcription, wanted)
    return Response(body, headers=headers, media_type=media_type)


class _EventStream(Response):
    """The answer as server-sent events, each sent as soon as its utterance is settled.

    The status goes out with the first event, so that what fails before it is answered like any other request. ``held``
    is what the request holds, given back at the end whatever happens.
    """

    def __init__(
        self,
        request: Request,
        work: Callable[[Callable[[Outcome], None]], Coroutine[None, None, Transcription]],
        held: contextlib.AsyncExitStack,
        *,
        logprobs: bool,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._request = request
        self._work = work
        self._held = held
        self._logprobs = logprobs
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                await unless_gone(self._request, self._run(send))
            except ClientDisconnect:
                pass

    async def _run(self, send: Send) -> None:
        """Raises SttError where nothing has been sent yet."""
        # None is the end. It holds no more than the recording has to say, which is kept as a whole anyway.
        finals: asyncio.Queue[FinalTranscript | None] = asyncio.Queue()

        def settle(outcome: Outcome) -> None:
            if isinstance(outcome, FinalTranscript) and outcome.text.strip():
                finals.put_nowait(outcome)

        work = asyncio.create_task(self._work(settle))
        work.add_done_callback(lambda task: finals.put_nowait(None))
        try:
            await self._forward(finals, send)
            await self._send(send, render_done(await work, logprobs=self._logprobs))
        except SttError as error:
            if not self._has_begun:
                raise
            await self._send(send, render_failure(error_object(error)))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _forward(self, finals: asyncio.Queue[FinalTranscript | None], send: Send) -> None:
        is_first = True
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    final = await finals.get()
            except TimeoutError:  # hours of music, perhaps; proxies end what is silent for a minute
                await self._send(send, SSE_KEEPALIVE)
                continue
            if final is None:
                return
            await self._send(send, render_delta(final, is_first=is_first, logprobs=self._logprobs))
            is_first = False

    async def _send(self, send: Send, event: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})


def _header_value(warnings: Sequence[str]) -> str:
    return "; ".join(warnings).encode("ascii", "replace").decode().replace("\n", " ")[:1000]


async def _read_form(request: Request, max_bytes: int) -> FormData:
    """The multipart form; files are spooled to disk beyond a megabyte. Raises ClientError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadMessage("Send the file as multipart/form-data.", code="not_multipart")
    parser = MultiPartParser(
        request.headers,
        counted_body(request, max_bytes),
        max_files=FILES,
        max_fields=FIELDS,
        max_part_size=FIELD_BYTES,
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise BadMessage(error.message, code="bad_form") from error
    except (FormParserError, UnicodeDecodeError, LookupError) as error:
        raise BadMessage("The multipart form is malformed.", code="bad_form") from error


def _on_disk(upload: UploadFile) -> int:
    """The descriptor of the spooled file; a small one moves from memory to disk."""
    descriptor = upload.file.fileno()
    upload.file.flush()
    return descriptor


def _field(description: str, **schema: object) -> dict[str, object]:
    return {"type": "string", "description": description, **schema}


_FORM_SCHEMA: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": _field("Audio or video in any common container.", format="binary"),
                        "model": _field("Any name; one model is served."),
                        "language": _field("ISO 639-1 code; left out, it is detected for each utterance."),
                        "languages[]": {"type": "array", "items": {"type": "string"}},
                        "prompt": _field("Text that might have come before."),
                        "hotwords": _field("Words to expect, separated by commas; also keywords[]."),
                        "response_format": _field("", enum=[item.value for item in ResponseFormat], default="json"),
                        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
                        "timestamp_granularities[]": {
                            "type": "array",
                            "items": {"type": "string", "enum": ["word", "segment"]},
                        },
                        "include[]": {"type": "array", "items": {"type": "string", "enum": ["logprobs"]}},
                        "chunking_strategy": _field("'auto', or JSON with type 'server_vad' and its values."),
                        "stream": {"type": "boolean", "description": "Answer as server-sent events."},
                    },
                }
            }
        },
    }
}
