"""What goes wrong around the page, and what the visitor is told."""

import re
from pathlib import Path

import pytest
import websockets.sync.client

from tests.support.browser import (
    CLIP_TEXT,
    Visitors,
    error_rate,
    finals,
    problem,
    start,
    stop,
    wait_finals,
    wait_path,
    wait_state,
)
from tests.support.server import Server, serving
from tests.support.weights import require_vad, require_weights

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.real
def test_a_killed_service_that_comes_back_hears_what_was_said_meanwhile(visitors: Visitors, sentences: Path) -> None:
    """Killed in mid-sentence. The finals stay, the open text stays until it is heard again, and nothing is lost."""
    require_weights("tiny.en")
    require_vad()
    settings = {"engine": "ctranslate", "model": "tiny.en", "rtc_host": "127.0.0.1"}
    with serving(**settings) as first:
        page = visitors.open(first.url("/"), speech=sentences)
        start(page)
        wait_finals(page, 1)
        page.wait_for_function("() => document.querySelector('#rows .open .text')?.textContent.length > 8")
        shown = page.inner_text("#rows")
        port = first.port
        first.process.kill()
        wait_state(page, "The connection was lost")
        assert shown.splitlines()[-1][:8] in page.inner_text("#rows")
    with serving(port=port, **settings):
        wait_state(page, "Listening")
        wait_path(page, "WebSocket")
        wait_finals(page, 4)
        stop(page)
        assert error_rate(" ".join([CLIP_TEXT] * 4), " ".join(finals(page))) <= 0.1
        assert not page.is_visible("#problem")


def test_while_no_service_is_there_the_page_says_so_and_takes_no_speech(visitors: Visitors, one_sentence: Path) -> None:
    with serving(rtc_host="127.0.0.1") as server:
        page = visitors.open(server.url("/"), speech=one_sentence)
        page.wait_for_selector("#toggle:enabled")
        start(page)
        wait_state(page, "Listening")
        server.process.kill()
        wait_state(page, "The connection was lost")
        page.click("#toggle")  # Stop
        page.click("#toggle >> text=End now")
        wait_state(page, "The service cannot be reached")
        assert page.is_disabled("#toggle")


def test_without_a_microphone_files_can_still_be_transcribed(scripted: Server, visitors: Visitors) -> None:
    page = visitors.open(scripted.url("/"))
    start(page)
    assert re.search("No microphone was found.*Files can be transcribed", problem(page))
    page.wait_for_selector("#toggle:enabled >> text=Start")
    page.click("#hark-files-button")
    assert page.is_enabled("#file")


def test_a_page_that_is_not_secure_says_why_there_is_no_microphone(scripted: Server, visitors: Visitors) -> None:
    address = f"http://hark.test:{scripted.port}/"
    page = visitors.open(address, flags=["--host-resolver-rules=MAP hark.test 127.0.0.1"])
    start(page)
    assert "only to pages opened over https" in problem(page)


def test_a_microphone_that_is_not_allowed_is_explained(
    scripted: Server, visitors: Visitors, one_sentence: Path
) -> None:
    denied = "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', 'NotAllowedError'));"
    page = visitors.open(scripted.url("/"), speech=one_sentence, script=denied)
    start(page)
    assert "not allowed to use the microphone" in problem(page)


def test_when_all_places_are_taken_the_page_says_so(visitors: Visitors, one_sentence: Path) -> None:
    with serving(max_sessions=1, rtc_host="127.0.0.1") as server:
        page = visitors.open(server.url("/"), speech=one_sentence)
        page.wait_for_selector("#toggle:enabled")
        with websockets.sync.client.connect(server.stream_url()) as taken:
            taken.recv()
            start(page)
            assert problem(page) == "All places of this service are taken. Try again in a moment."


@pytest.mark.parametrize("way", ["WebRTC", "WebSocket"])
def test_a_service_with_keys_is_given_one(visitors: Visitors, one_sentence: Path, way: str) -> None:
    script = "" if way == "WebRTC" else "delete window.RTCPeerConnection;"
    with serving(api_keys="other,sesame", rtc_host="127.0.0.1") as server:
        page = visitors.open(server.url("/"), speech=one_sentence, script=script)
        start(page)
        assert "asks for a key" in problem(page)
        for key in ("simsalabim", "sesame"):
            page.wait_for_selector("#key-form:visible")
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-form", state="hidden")
            page.click("#toggle:enabled")
        wait_state(page, "Listening")
        wait_path(page, way)
        assert page.evaluate("[...Object.values(sessionStorage), localStorage.length]") == ["sesame", 0]


def test_leaving_the_page_frees_its_place(scripted: Server, visitors: Visitors, one_sentence: Path) -> None:
    page = visitors.open(scripted.url("/"), speech=one_sentence)
    start(page)
    wait_state(page, "Listening")
    assert scripted.get("/readyz").json()["sessions"] == 1
    page.goto(scripted.url("/healthz"))
    page.wait_for_function("async () => (await (await fetch('/readyz')).json()).sessions === 0", timeout=5_000)
