"""The tab for files: from the drop to the word that is clicked on."""

import re
from pathlib import Path

import httpx
import pytest

from tests.support.browser import CLIP, CLIP_TEXT, ROOT, Visitors, clip, download, problem, write_speech
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.real, pytest.mark.slow]

DROP = """([bytes, name]) => {
  const given = new DataTransfer();
  given.items.add(new File([new Uint8Array(bytes)], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
}"""


def test_a_file_becomes_text_whose_words_lead_into_the_recording(
    hearing: Server, visitors: Visitors, tmp_path: Path
) -> None:
    speech = write_speech(tmp_path / "two sentences.wav", [clip()] * 2, lead_s=0.5)
    page = visitors.open(hearing.url("/"))
    page.click("#hark-files-button")
    page.set_input_files("#file", speech)
    page.wait_for_selector("#file-state >> text=Done")
    assert page.locator("#file-lines .text").all_inner_texts() == [CLIP_TEXT, CLIP_TEXT]
    page.click("#file-lines .row:nth-child(2) .word >> text=weather")
    page.wait_for_function("() => !document.querySelector('#player').paused")
    page.wait_for_selector("#file-lines .row:nth-child(2) .word.now")
    second_begins_s = 0.5 + clip().size / 16_000 + 1.2
    assert page.evaluate("document.querySelector('#player').currentTime") == pytest.approx(
        second_begins_s + 1.7, abs=0.7
    )
    page.wait_for_function("() => document.querySelector('#player').ended")  # the mark has gone along
    page.click("#file-lines .row:nth-child(1) .time")
    page.wait_for_selector("#file-lines .row:nth-child(1) .word.now")
    with speech.open("rb") as file:
        form = {"response_format": "srt"}
        answer = httpx.post(hearing.url("/v1/audio/transcriptions"), data=form, files={"file": file}, timeout=60)
    assert download(page, "#file-toolbar", "srt") == answer.text
    assert download(page, "#file-toolbar", "txt") == f"{CLIP_TEXT}\n" * 2


def test_a_file_can_be_dropped_anywhere(hearing: Server, visitors: Visitors) -> None:
    page = visitors.open(hearing.url("/"))
    page.wait_for_selector("#toggle:enabled")
    page.evaluate(DROP, [list(CLIP.read_bytes()), "clip.wav"])
    page.wait_for_selector("#file-state:visible >> text=Done")
    assert page.inner_text("#file-name") == "clip.wav"
    assert page.inner_text("#file-lines .text") == CLIP_TEXT


def test_a_wrong_file_is_explained_and_the_next_one_is_taken(hearing: Server, visitors: Visitors) -> None:
    page = visitors.open(hearing.url("/"))
    page.click("#hark-files-button")
    page.set_input_files("#file", ROOT / "pyproject.toml")
    assert "no audio or video file" in problem(page, "#file-problem")
    assert not page.is_visible("#player")
    page.set_input_files("#file", CLIP)
    page.wait_for_selector("#file-state >> text=Done")
    assert not page.is_visible("#file-problem")


def test_a_file_can_be_given_up(hearing: Server, visitors: Visitors) -> None:
    page = visitors.open(hearing.url("/"))
    page.click("#hark-files-button")
    page.route("**/v1/audio/transcriptions", lambda route: None)  # no answer comes
    page.set_input_files("#file", CLIP)
    page.click("#file-cancel >> text=Cancel")
    assert page.inner_text("#file-state") == "Cancelled"
    page.unroute_all()
    page.click("#file-cancel >> text=Again")
    page.wait_for_selector("#file-state >> text=Done")
    assert re.search("weather", page.inner_text("#file-lines"))
