"""The pictures of the page in docs/images, taken while it hears recordings.

``python -m tests.support.screenshots [--model base] RECORDING…`` (any media files of speech; without any, the bundled
sentence, again and again)
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from playwright.sync_api import Page, sync_playwright

from streaming.types import Pcm16
from tests.support.browser import RATE_HZ, ROOT, Visitors, clip, start, wait_finals, write_speech
from tests.support.server import serving

IMAGES = ROOT / "docs" / "images"


def decode(path: Path) -> Pcm16:
    """int16, shape (n,), 16 kHz."""
    resampler = av.AudioResampler("s16", "mono", RATE_HZ)
    with av.open(str(path)) as media:
        frames = [frame for decoded in media.decode(audio=0) for frame in resampler.resample(decoded)]
    return np.concatenate([frame.to_ndarray().ravel() for frame in [*frames, *resampler.resample(None)]])


def live(page: Page, path: Path) -> None:
    """With something settled, and a sentence that is being spoken."""
    start(page)
    wait_finals(page, 3)
    page.wait_for_function(
        """() => document.querySelector("#rows .open:last-child .text")?.textContent.length > 25 &&
          document.querySelectorAll("#rows .open").length === 1 && !document.querySelector("#lag.much")"""
    )
    page.screenshot(path=path)


def files(page: Page, speech: Path, path: Path) -> None:
    page.click("#hark-files-button")
    page.set_input_files("#file", speech)
    page.wait_for_selector("#file-state >> text=Done")
    page.click("#file-lines .row:nth-child(3) .word:nth-child(3)")
    page.wait_for_selector("#file-lines .word.now")
    page.screenshot(path=path)


def main(recordings: Sequence[Path], model: str) -> None:
    sentences = [decode(recording) for recording in recordings] or [clip()] * 5
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(engine="ctranslate", model=model, rtc_host="127.0.0.1") as server,
        sync_playwright() as playwright,
    ):
        speech = write_speech(Path(folder) / "talk.wav", sentences)
        for name, size in (("desktop", {}), ("dark", {"dark": True}), ("phone", {"width": 390, "height": 800})):
            visitors = Visitors(playwright)
            live(visitors.open(server.url("/"), speech=speech, **size), IMAGES / f"page-{name}.png")
            visitors.leave()
        visitors = Visitors(playwright)
        files(visitors.open(server.url("/")), speech, IMAGES / "files.png")
        visitors.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="base")
    parser.add_argument("recordings", nargs="*", type=Path)
    given = parser.parse_args()
    main(given.recordings, given.model)
