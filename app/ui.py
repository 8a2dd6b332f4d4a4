"""The page at ``/``: Gradio Blocks whose parts are our own HTML and plain JavaScript (``app/static``).

The page is a client of the public endpoints and has no back door: Gradio describes and draws it, but none of Gradio's
own endpoints (uploads, queue, code editing, …) exists here. What is served is its compiled front end, our files, and
one document, which holds Gradio's description of the page. That document is ours, because the one in Gradio's package
asks other hosts for fonts, scripts and pictures; a Content-Security-Policy has the browser refuse all such requests.
Every address is relative, so that the page works below any path.
"""

import asyncio
import base64
import hashlib
import html
import importlib.util
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from string import Template

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from app.wire.openai_http import LANGUAGE_NAMES

STATIC = Path(__file__).parent / "static"
TABS = {"live": "Live", "files": "Files", "api": "API"}  # each is a fragment of HTML in app/static
_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace"]
_CHANGES = "no-cache"  # asked for again each time, and answered with 304 where nothing has changed
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """The document, the policy that it is sent with, and Gradio's style sheet for it."""

    document: str
    policy: str
    theme_css: str


def mount_page(app: FastAPI) -> None:
    """Serve the page at ``/``, its files at ``/static`` and Gradio's at ``/assets`` and ``/theme.css``.

    The page is rendered at the first request, in a thread: to import Gradio takes seconds, which whoever never looks
    at the page need not pay.
    """
    rendering: asyncio.Task[RenderedPage] | None = None

    async def rendered() -> RenderedPage:
        nonlocal rendering
        if rendering is None:
            rendering = asyncio.create_task(asyncio.to_thread(render_page))
        return await asyncio.shield(rendering)  # one visitor who leaves does not take it from the others

    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def document() -> HTMLResponse:
        page = await rendered()
        headers = {"Content-Security-Policy": page.policy, "Cache-Control": _CHANGES, "Referrer-Policy": "same-origin"}
        return HTMLResponse(page.document, headers=headers)

    @router.get("/theme.css")
    async def theme() -> Response:
        return Response((await rendered()).theme_css, media_type="text/css", headers={"Cache-Control": _CHANGES})

    app.include_router(router)
    app.mount("/static", _files(STATIC, _CHANGES), name="static")
    app.mount("/assets", _files(_gradio_frontend() / "assets", _FOR_EVER), name="assets")  # their names hold a hash


class _Files(StaticFiles):
    def __init__(self, directory: Path, cache_control: str) -> None:
        super().__init__(directory=directory)
        self._cache_control = cache_control

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = self._cache_control
        return response


def _files(directory: Path, cache_control: str) -> ASGIApp:
    return GZipMiddleware(_Files(directory, cache_control))


def _gradio_frontend() -> Path:
    """Found without importing Gradio."""
    spec = importlib.util.find_spec("gradio")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the package gradio is not installed")
    return Path(spec.submodule_search_locations[0]) / "templates" / "frontend"


def render_page() -> RenderedPage:
    """Build the Blocks and the document around them. Blocks for seconds: it imports Gradio."""
    import gradio as gr

    with warnings.catch_warnings():  # Gradio 6 takes the theme elsewhere; FastRTC holds us at 5
        warnings.simplefilter("ignore", DeprecationWarning)
        blocks = gr.Blocks(theme=gr.themes.Base(font=_FONT, font_mono=_MONO), analytics_enabled=False, title="Hark")
    with blocks:
        gr.HTML(_fragment("header"), padding=False)
        with gr.Tabs(elem_id="hark-tabs"):
            for name, label in TABS.items():
                with gr.Tab(label, id=name, elem_id=f"hark-{name}", render_children=True):
                    gr.HTML(_fragment(name), padding=False)
        gr.HTML(_fragment("footer"), padding=False)
    # A space_id, which Gradio takes from the environment, would have the front end ask the hub about the Space.
    config = {**blocks.get_config_file(), "space_id": None, "show_api": False}
    script = (
        f"window.gradio_config = {_script_json(config)};"
        'window.gradio_api_info = {"named_endpoints": {}, "unnamed_endpoints": {}};'
    )
    document = Template((STATIC / "shell.html").read_text("utf-8")).substitute(
        config=script, gradio=_entry_points((_gradio_frontend() / "index.html").read_text("utf-8"))
    )
    return RenderedPage(document, _policy(script), blocks.theme_css)


def _fragment(name: str) -> str:
    """A part of the page, with the languages that Whisper knows filled in."""
    named = sorted((language.title(), code) for code, language in LANGUAGE_NAMES.items())
    options = "".join(f'<option value="{code}">{html.escape(language)}</option>' for language, code in named)
    return (STATIC / f"{name}.html").read_text("utf-8").replace("<!-- languages -->", options)


def _entry_points(index: str) -> str:
    """The tags that load Gradio's compiled front end, out of the document in its package."""
    tags = re.findall(r'<script type="module"[^>]*src="\./assets/[^>]*></script>', index)
    tags += re.findall(r'<link rel="stylesheet"[^>]*href="\./assets/[^>]*>', index)
    if len(tags) != 2:
        raise RuntimeError("Gradio's front end is not as expected: see _entry_points in app/ui.py")
    return "\n".join(tags)


def _script_json(value: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(script: str) -> str:
    """The browser loads nothing from, and sends nothing to, any other host, and runs this one inline script.

    Who may frame the page is left open: a Space is shown in a frame of the hub's.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src 'self' 'sha256-{digest}'",
            "style-src 'self' 'unsafe-inline'",  # Gradio sets styles from its script
            "img-src 'self' data:",
            "font-src 'self' data:",
            "media-src 'self' blob:",  # the player of a chosen file
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
        )
    )
