"""The page in a real browser: a microphone that plays a recording, files, and what goes wrong.

Needs the package playwright and Chromium (from the system; found by its name). Nothing is fetched.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import websockets.sync.client

from app.wire.openai_http import LANGUAGE_NAMES
from tests.support.weights import require_vad, require_weights

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CLIP = ROOT / "models" / "data" / "warmup.wav"
CLIP_TEXT = "We are going to the park because the weather is good."
PATIENCE_MS = 60_000
MICROPHONE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")

OpenPage = Callable[..., Page]


@contextmanager
def service(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The real command, ready; its address and its process."""
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0", *options]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "engine_ready" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            found = re.search(r"http://\w+(:\d+)", said)
            assert found, said
            yield f"http://127.0.0.1{found[1]}", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    require_weights("tiny.en")
    require_vad()
    with service("--model", "tiny.en") as (address, _):
        yield address


@pytest.fixture
def open_page() -> Iterator[OpenPage]:
    """Opens an address in a fresh Chromium, with a microphone that plays the clip once, or with none."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("Chromium is not installed")
    asked: set[tuple[str, str]] = set()  # (the page's host, the host of a request)
    with sync_playwright() as playwright:

        def open_(address: str, *, microphone: bool = True) -> Page:
            clip = f"--use-file-for-fake-audio-capture={CLIP}%noloop"
            flags = ["--no-sandbox", "--disable-gpu", *((*MICROPHONE, clip) if microphone else ())]
            browser = playwright.chromium.launch(executable_path=executable, args=flags)
            context = browser.new_context(permissions=["microphone"] if microphone else [])
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("request", lambda request: asked.add((urlsplit(address).netloc, urlsplit(request.url).netloc)))
            page.goto(address)
            return page

        yield open_
    assert all(other in ("", own) for own, other in asked), "the page asks another host"


def start(page: Page) -> None:
    page.click("#toggle:enabled")


def problem(page: Page) -> str:
    page.wait_for_selector("#problem:visible")
    return str(page.inner_text("#problem"))


@pytest.mark.real
def test_speech_becomes_text_and_the_text_can_be_downloaded(real: str, open_page: OpenPage) -> None:
    page = open_page(real)
    start(page)
    page.wait_for_selector("#open p")
    page.wait_for_function("document.querySelector('#finals').innerText.includes('weather')")
    page.click("#toggle:enabled")
    page.wait_for_function("document.querySelector('#toggle').textContent === 'Start'")
    assert CLIP_TEXT in page.inner_text("#finals")
    assert page.inner_text("#open") == ""
    assert not page.is_visible("#problem")
    with page.expect_download() as download:
        page.click("#download")
    assert re.fullmatch(rf"\[00:0\d\] {CLIP_TEXT}\n", download.value.path().read_text())


@pytest.mark.real
def test_stopping_in_mid_speech_keeps_what_was_said(real: str, open_page: OpenPage) -> None:
    page = open_page(real)
    start(page)
    page.wait_for_selector("#open p")
    page.click("#toggle:enabled")
    page.wait_for_function("document.querySelector('#toggle').textContent === 'Start'")
    assert page.inner_text("#finals").strip()
    assert not page.is_visible("#problem")


@pytest.mark.real
def test_files_are_transcribed_and_wrong_ones_explained(real: str, open_page: OpenPage) -> None:
    page = open_page(real, microphone=False)
    page.set_input_files("#file", CLIP)
    page.wait_for_selector("#finals h2")
    assert CLIP.name in page.inner_text("#finals")
    assert CLIP_TEXT in page.inner_text("#finals")
    page.set_input_files("#file", ROOT / "pyproject.toml")
    assert "pyproject.toml: this is no audio or video file" in problem(page)


@pytest.mark.real
def test_the_readme_example_for_browsers_works(real: str, open_page: OpenPage) -> None:
    [example] = re.findall(r"^```js\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    page = open_page(real)
    with page.expect_console_message(lambda message: message.text == CLIP_TEXT, timeout=PATIENCE_MS):
        page.add_script_tag(content=example.replace("ws://localhost:7860", real.replace("http", "ws")), type="module")


def scripted(**settings: str) -> AbstractContextManager[tuple[str, subprocess.Popen[str]]]:
    return service("--engine", "scripted", **settings)


@pytest.mark.slow
def test_the_page_says_that_there_is_no_microphone(open_page: OpenPage) -> None:
    with scripted() as (address, _):
        page = open_page(address, microphone=False)
        start(page)
        assert re.search("microphone", problem(page))
        page.wait_for_selector("#toggle:enabled")


@pytest.mark.slow
def test_the_page_says_that_all_streams_are_in_use(open_page: OpenPage) -> None:
    with scripted(HARK_MAX_SESSIONS="1") as (address, _):
        page = open_page(address)
        with websockets.sync.client.connect(address.replace("http", "ws") + "/v1/stream") as stream:
            stream.recv()
            start(page)
            assert problem(page) == "All streams of this service are in use. Try again later."


@pytest.mark.slow
def test_the_page_says_that_the_service_has_gone_and_when_it_cannot_be_reached(open_page: OpenPage) -> None:
    with scripted() as (address, process):
        page = open_page(address)
        start(page)
        page.wait_for_function("document.querySelector('#state').textContent.startsWith('Listening')")
        process.kill()
        assert problem(page) == "The connection to the service was lost. Press Start to go on."
        page.wait_for_function("document.querySelector('#state').textContent === 'The service cannot be reached'")
        assert page.is_disabled("#toggle")


def test_the_page_offers_the_languages_that_whisper_has() -> None:
    codes = re.search(r"const LANGUAGES = \((.*?)\)", (ROOT / "app" / "static" / "app.js").read_text(), flags=re.S)
    assert codes
    assert set(re.findall(r"\b[a-z]{2,3}\b", codes[1])) == set(LANGUAGE_NAMES)
