"""Chromium with the page in it, a microphone that plays a recording, and what a visitor sees there."""

import base64
import contextlib
import shutil
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Playwright

from bench.scoring import score
from streaming.types import Pcm16

ROOT = Path(__file__).resolve().parents[2]
CLIP = ROOT / "models" / "data" / "warmup.wav"
CLIP_TEXT = "We are going to the park because the weather is good."
CLIP_TAIL_FROM_S, CLIP_TAIL_TEXT = 1.35, "because the weather is good."
RATE_HZ = 16_000
PATIENCE_MS = 60_000
LEAD_S = 2.5  # of silence first: a visitor looks at the page before he speaks
PAUSE_S = 1.2

# WebRTC on a machine that may have no other interface than loopback.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--allow-loopback-in-peer-connection",
    "--autoplay-policy=no-user-gesture-required",
)
_FAKE_MICROPHONE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
NO_UDP = "--webrtc-ip-handling-policy=disable_non_proxied_udp"


def clip(from_s: float = 0.0) -> Pcm16:
    """int16, shape (n,), 16 kHz: the sentence CLIP_TEXT, or its end."""
    with wave.open(str(CLIP)) as wav:
        assert (wav.getframerate(), wav.getnchannels()) == (RATE_HZ, 1)
        samples = np.frombuffer(wav.readframes(wav.getnframes()), np.int16)
    return samples[round(from_s * RATE_HZ) :]


def in_one_breath(times: int) -> Pcm16:
    """The sentence so many times, with less of a pause between than would end an utterance: for partials."""
    return np.concatenate([clip(0.2)[: 23 * RATE_HZ // 10] for _ in range(times)])


def write_speech(path: Path, sentences: Sequence[Pcm16], *, lead_s: float = LEAD_S, pause_s: float = PAUSE_S) -> Path:
    """A recording of the sentences, with a pause after each."""

    def silence(seconds: float) -> Pcm16:
        return np.zeros(round(seconds * RATE_HZ), np.int16)

    parts = [silence(lead_s)]
    for sentence in sentences:
        parts += [sentence, silence(pause_s)]
    with wave.open(str(path), "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(RATE_HZ)
        wav.writeframes(np.concatenate(parts).tobytes())
    return path


def error_rate(reference: str, heard: str) -> float:
    rate = score(reference, heard, "en").rate
    assert rate is not None
    return rate


class Visitors:
    """Opens pages, each in a Chromium of its own, and keeps account of whom they ask."""

    def __init__(self, playwright: Playwright) -> None:
        self._playwright = playwright
        self._browsers: list[Browser] = []
        self._asked: list[tuple[str, str]] = []  # the page's host, a request's address

    def browser(self, *flags: str) -> Browser:
        executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if executable is None:
            pytest.skip("Chromium is not installed")
        self._browsers.append(self._playwright.chromium.launch(executable_path=executable, args=[*_FLAGS, *flags]))
        return self._browsers[-1]

    def leave(self) -> None:
        for browser in self._browsers:
            browser.close()

    def open(
        self,
        address: str,
        *,
        speech: Path | None = None,
        flags: Sequence[str] = (),
        width: int = 1_000,
        height: int = 900,
        dark: bool = False,
        script: str = "",
    ) -> Page:
        """The page once it has been drawn. ``speech`` is what the microphone plays, once; None: there is no microphone.

        ``script`` runs before anything of the page does.
        """
        microphone = (*_FAKE_MICROPHONE, f"--use-file-for-fake-audio-capture={speech}%noloop") if speech else ()
        browser = self.browser(*microphone, *flags)
        context = browser.new_context(
            permissions=["microphone"] if speech else [],
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        page = self.watch(context.new_page(), address)
        if script:
            page.add_init_script(script)
        page.goto(address)
        page.wait_for_selector("#toggle")
        return page

    def watch(self, page: Page, address: str) -> Page:
        page.set_default_timeout(PATIENCE_MS)
        own = urlsplit(address).netloc
        page.on("request", lambda request: self._asked.append((own, request.url)))
        page.on("websocket", lambda socket: self._asked.append((own, socket.url)))
        return page

    def asked_others(self) -> list[str]:
        return [url for own, url in self._asked if urlsplit(url).netloc not in ("", own)]


# A microphone of this tab's own, where the fake device is the whole browser's. Fill in the recording, in base64.
_TAB_MICROPHONE = """
navigator.mediaDevices.getUserMedia = async () => {
  const bytes = Uint8Array.from(atob("RECORDING"), (c) => c.charCodeAt(0));
  const context = new AudioContext(), to = context.createMediaStreamDestination();
  const source = new AudioBufferSourceNode(context, { buffer: await context.decodeAudioData(bytes.buffer) });
  source.connect(to);
  source.start();
  return to.stream;
};
"""

# The connections that the page makes, for a test to break.
KEEP_PEERS = """
window.peers = [];
window.RTCPeerConnection = class extends RTCPeerConnection {
  constructor(...given) { super(...given); window.peers.push(this); }
};
"""


def tab_microphone(speech: Path) -> str:
    return _TAB_MICROPHONE.replace("RECORDING", base64.b64encode(speech.read_bytes()).decode())


# What a visitor does and sees ----------------------------------------------------------------------------------------


def start(page: Page) -> None:
    """Press Start, and note from now on each text that stands in the last row while it is open."""
    page.evaluate(
        """() => {
          window.partials = window.partials ?? [];
          new MutationObserver(() => {
            const text = document.querySelector("#rows .open:last-child .text")?.textContent ?? "…";
            if (text !== "…" && text !== window.partials.at(-1)) window.partials.push(text);
          }).observe(document.querySelector("#rows"), { subtree: true, childList: true, characterData: true });
        }"""
    )
    page.click("#toggle:enabled")


def stop(page: Page) -> None:
    """Press Stop, and wait until all is transcribed."""
    page.click("#toggle")
    page.wait_for_selector("#toggle:enabled >> text=Start")


def partials(page: Page) -> list[str]:
    return list(page.evaluate("window.partials"))


def finals(page: Page) -> list[str]:
    return [str(text) for text in page.locator("#rows .final .text").all_inner_texts()]


def wait_finals(page: Page, count: int) -> None:
    page.wait_for_function("(n) => document.querySelectorAll('#rows .final').length >= n", arg=count)


def wait_heard(page: Page, seconds: float) -> None:
    """Until so much of the microphone's sound has been heard."""
    reached = (
        "(s) => { const [m, r] = document.querySelector('#time').textContent.split(':'); return m * 60 + +r > s; }"
    )
    page.wait_for_function(reached, arg=seconds)


def wait_state(page: Page, text: str) -> None:
    page.wait_for_function("(text) => document.querySelector('#state').textContent.startsWith(text)", arg=text)


def wait_path(page: Page, text: str) -> None:
    page.wait_for_function("(text) => document.querySelector('#path').textContent === text", arg=text)


def start_seconds(page: Page) -> list[float]:
    """The time stamp of each row."""
    stamps = [stamp.split(":") for stamp in page.locator("#rows time").all_inner_texts()]
    return [int(minutes) * 60 + int(seconds) for minutes, seconds in stamps]


def problem(page: Page, selector: str = "#problem") -> str:
    page.wait_for_selector(f"{selector}:visible")
    return str(page.inner_text(selector))


def download(page: Page, toolbar: str, form: str) -> str:
    with page.expect_download() as caught:
        page.click(f"{toolbar} [data-format={form}]")
    return caught.value.path().read_text("utf-8")


@contextlib.contextmanager
def patience(page: Page, milliseconds: int) -> Iterator[None]:
    page.set_default_timeout(milliseconds)
    try:
        yield
    finally:
        page.set_default_timeout(PATIENCE_MS)
