"""The page as a document: whom it asks, where it works, and who can use it."""

import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Page
from starlette.applications import Starlette
from starlette.routing import Mount

from app.main import create_app
from app.settings import Settings
from app.wire.openai_http import LANGUAGE_NAMES
from tests.support.browser import Visitors, start, wait_state
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TABS = ("live", "files", "api")


def show(page: Page, tab: str) -> None:
    page.click(f"#hark-{tab}-button")
    page.wait_for_selector(f"#hark-{tab} .hark:visible")


# Whom it asks --------------------------------------------------------------------------------------------------------


def test_nothing_but_the_page_is_there_of_gradio(scripted: Server) -> None:
    """None of its own endpoints: they take uploads, run queues, and edit code."""
    document = scripted.get("/").text
    assert re.findall(r'(?:src|href)="([^"]*)"', document) == re.findall(
        r'(?:src|href)="((?:static|\./assets)/[^"]*)"', document
    )
    for path in (
        "/config",
        "/gradio_api/info",
        "/gradio_api/queue/data",
        "/gradio_api/vibe-code",
        "/login",
        "/monitoring",
    ):
        assert scripted.get(path).status_code == 404


def test_the_browser_is_told_to_ask_nobody_else(scripted: Server, visitors: Visitors) -> None:
    page = visitors.open(scripted.url("/"))
    page.wait_for_selector("#toggle:enabled")
    refused = "() => fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')"
    with page.expect_event("console", lambda message: "Content Security Policy" in message.text):
        assert page.evaluate(refused) == "refused"


def test_on_a_host_of_the_hubs_gradio_asks_the_hub_nothing(scripted: Server, visitors: Visitors) -> None:
    """There Gradio's front end looks up the state of the Space, which the policy does not let out."""
    address = f"http://someone-hark.hf.space:{scripted.port}/"
    page = visitors.open(address, flags=["--host-resolver-rules=MAP *.hf.space 127.0.0.1"])
    page.wait_for_selector("#toggle:enabled")
    assert page.inner_text("#state") == "Ready when you are"


# Where it works ------------------------------------------------------------------------------------------------------


@pytest.fixture
def below_a_path() -> Iterator[str]:
    """The service below /some/path, as behind a proxy."""
    app = create_app(Settings(engine="scripted", rtc_host="127.0.0.1"))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    outer = Starlette(routes=[Mount("/some/path", app)], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(outer, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.05)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/some/path/"
    finally:
        server.should_exit = True
        thread.join()


def test_it_works_below_a_path_and_in_a_frame(below_a_path: str, visitors: Visitors, one_sentence: Path) -> None:
    page = visitors.open(below_a_path, speech=one_sentence)
    page.wait_for_selector("#toggle:enabled")
    page.route(
        "**/framing",
        lambda route: route.fulfill(
            content_type="text/html",
            body=f'<iframe src="{below_a_path}" allow="microphone" width=900 height=800></iframe>',
        ),
    )
    page.goto(below_a_path + "framing")
    frame = page.frame_locator("iframe")
    frame.locator("#toggle:enabled").click()
    frame.locator("#state >> text=Listening").wait_for()
    frame.locator("#hark-api-button").click()
    assert f"curl {below_a_path}v1/audio/transcriptions" in frame.locator(".api").inner_text()
    assert below_a_path.replace("http", "ws") + "v1/stream" in frame.locator(".api").inner_text()


@pytest.mark.parametrize("tab", TABS)
def test_a_narrow_telephone_shows_it_without_scrolling_sideways(scripted: Server, visitors: Visitors, tab: str) -> None:
    page = visitors.open(scripted.url("/"), width=360, height=740)
    page.wait_for_selector("#toggle:enabled")
    show(page, tab)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    for control in page.locator(f"#hark-{tab} :is(button, select, input[type=text]):visible").all():
        box = control.bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360


# Who uses it ---------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(scripted: Server, visitors: Visitors, one_sentence: Path) -> None:
    page = visitors.open(scripted.url("/"), speech=one_sentence)
    page.wait_for_selector("#toggle:enabled")
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if order[-1] == "BODY":
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", order[-1]
    controls = [
        "hark-live-button",
        "hark-files-button",
        "hark-api-button",
        "toggle",
        "language",
        "microphone",
        "SUMMARY",
        "lines",
    ]
    assert [name for name in order if name in controls] == controls
    page.focus("#toggle")
    page.keyboard.press("Space")
    wait_state(page, "Listening")
    page.keyboard.press("Enter")
    page.wait_for_selector("#toggle:enabled >> text=Start")
    page.focus("#hark-files-button")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"


@pytest.mark.parametrize("tab", TABS)
def test_a_screen_reader_has_a_name_for_everything(scripted: Server, visitors: Visitors, tab: str) -> None:
    page = visitors.open(scripted.url("/"))
    page.wait_for_selector("#toggle:enabled")
    show(page, tab)
    if tab == "live":
        page.click("summary")
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    used = [
        node for node in nodes if not node["ignored"] and _is_focusable(node) and node["role"]["value"] != "RootWebArea"
    ]
    assert len(used) > 5
    nameless = [node["role"]["value"] for node in used if not node.get("name", {}).get("value", "").strip()]
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1


def _is_focusable(node: dict[str, object]) -> bool:
    properties = node.get("properties", [])
    assert isinstance(properties, list)
    return any(found["name"] == "focusable" and found["value"]["value"] for found in properties)


def test_only_finals_and_the_state_are_read_out(scripted: Server, visitors: Visitors) -> None:
    page = visitors.open(scripted.url("/"))
    page.wait_for_selector("#toggle:enabled")
    live = page.evaluate(
        "[...document.querySelectorAll('[aria-live=polite], [role=status], [role=alert], [role=log]')].map((e) => e.id)"
    )
    assert {"announcer", "state", "problem"} <= set(live)
    assert page.evaluate("document.querySelector('#rows').closest('[aria-live], [role=log], [role=status]')") is None


# Every text that is shown, with what it stands on, as WCAG 2.2 (1.4.3) compares them.
_CONTRASTS = """() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    const isShown = element.checkVisibility({ visibilityProperty: true });
    if (!text || !isShown || element.closest(":disabled, .visually-hidden")) continue;
    const [a, b] = [luminance(numbers(getComputedStyle(element).color)), luminance(ground(element))];
    found.push([text.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""

_SAMPLE = """async () => {
  const { Transcript } = await import("./static/transcript.js"), { TranscriptView } = await import("./static/view.js");
  const $ = (id) => document.getElementById(id), names = ["lines", "rows", "earlier", "newest", "hint", "announcer"];
  const transcript = new Transcript();
  new TranscriptView(transcript, Object.fromEntries(names.map((id) => [id, $(id)])));
  const at = { utterance: 0, start_ms: 0, end_ms: 900 };
  transcript.receive({ type: "final", ...at, text: "Settled words." }, 0, 0);
  transcript.receive({ type: "failed", ...at, utterance: 1, message: "no answer" }, 0, 0);
  transcript.receive({ type: "partial", ...at, utterance: 2, committed: "Half", tentative: " a guess" }, 0, 0);
  $("problem").hidden = $("key-form").hidden = $("newest").hidden = false;
  $("problem").textContent = "Something is wrong.";
  await new Promise(requestAnimationFrame);
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_contrast_enough(scripted: Server, visitors: Visitors, dark: bool) -> None:
    page = visitors.open(scripted.url("/"), dark=dark)
    page.wait_for_selector("#toggle:enabled")
    assert page.evaluate("document.body.classList.contains('dark')") is dark
    page.evaluate(_SAMPLE)
    page.click("summary")
    for tab in TABS:
        show(page, tab)
        contrasts = page.evaluate(_CONTRASTS)
        assert len(contrasts) > 5
        assert [(text, round(ratio, 2)) for text, ratio in contrasts if ratio < 4.5] == []


def test_the_languages_that_whisper_has_are_offered(scripted: Server, visitors: Visitors) -> None:
    page = visitors.open(scripted.url("/"))
    for select in ("#language", "#among", "#file-language"):
        codes = page.evaluate(
            "(select) => [...document.querySelector(select).options].map(({ value }) => value)", select
        )
        assert set(codes) == {"", *LANGUAGE_NAMES}


def test_what_is_chosen_reaches_the_service(scripted: Server, visitors: Visitors, one_sentence: Path) -> None:
    page = visitors.open(scripted.url("/"), speech=one_sentence, script="delete window.RTCPeerConnection;")
    page.wait_for_selector("#toggle:enabled")
    page.click("summary")
    page.select_option("#among", "de")
    page.select_option("#among", "fr")
    page.select_option("#among", "en")
    page.click("#among-list [data-code=fr] button")
    page.fill("#hotwords", "Ada Lovelace, Hark,")
    page.check("#translate")
    with page.expect_websocket() as opened:
        start(page)
    with opened.value.expect_event("framesent", lambda sent: isinstance(sent, str)) as sent:
        pass
    expected = '"languages":["de","en"],"task":"translate","hotwords":["Ada Lovelace","Hark"],"sample_rate":16000}'
    assert str(sent.value).endswith(expected)
    wait_state(page, "Listening")
    assert page.is_disabled("#language")
