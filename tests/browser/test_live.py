"""Somebody presses the button, speaks and reads along; over WebRTC, over the WebSocket, and over both in one breath."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.browser import (
    CLIP_TAIL_FROM_S,
    CLIP_TAIL_TEXT,
    CLIP_TEXT,
    KEEP_PEERS,
    LEAD_S,
    NO_UDP,
    PATIENCE_MS,
    PAUSE_S,
    ROOT,
    Visitors,
    clip,
    download,
    error_rate,
    finals,
    partials,
    start,
    start_seconds,
    stop,
    tab_microphone,
    wait_finals,
    wait_heard,
    wait_path,
    wait_state,
    write_speech,
)
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.real, pytest.mark.slow]

CLIP_S = clip().size / 16_000


def grow(texts: list[str]) -> bool:
    """The first words of a partial may change, but there is more and more of it."""
    return any(len(later) > len(earlier) for earlier, later in pairwise(texts))


def test_partials_grow_into_the_right_final_over_webrtc(
    hearing: Server, visitors: Visitors, long_sentence: Path
) -> None:
    page = visitors.open(hearing.url("/"), speech=long_sentence)
    start(page)
    wait_state(page, "Listening")
    wait_path(page, "WebRTC")
    wait_finals(page, 1)
    wait_heard(page, LEAD_S + 2 * CLIP_S + PAUSE_S)
    stop(page)
    assert grow(partials(page))
    assert error_rate(" ".join([CLIP_TEXT] * 2), " ".join(finals(page))) <= 0.1
    assert page.inner_text("#announcer").split() == " ".join(finals(page)).split()
    assert download(page, "#hark-live .toolbar", "txt") == "".join(f"{text}\n" for text in finals(page))
    segment, *_ = json.loads(download(page, "#hark-live .toolbar", "json"))["segments"]
    assert segment["start"] == pytest.approx(LEAD_S, abs=1.5)
    assert segment["start"] <= segment["words"][0]["start"] + 0.2 < segment["words"][-1]["end"] <= segment["end"] + 0.4
    assert download(page, "#hark-live .toolbar", "srt").startswith("1\n00:00:0")
    assert download(page, "#hark-live .toolbar", "vtt").startswith("WEBVTT\n\n00:00:0")


def test_without_udp_the_page_goes_on_over_the_websocket(
    hearing: Server, visitors: Visitors, long_sentence: Path
) -> None:
    page = visitors.open(hearing.url("/"), speech=long_sentence, flags=[NO_UDP])
    start(page)
    wait_path(page, "WebSocket")
    wait_finals(page, 1)
    wait_heard(page, LEAD_S + 2 * CLIP_S + PAUSE_S)
    stop(page)
    assert grow(partials(page))
    assert error_rate(" ".join([CLIP_TEXT] * 2), " ".join(finals(page))) <= 0.1
    assert start_seconds(page)[0] == pytest.approx(LEAD_S, abs=1.5)


def test_webrtc_that_dies_in_mid_speech_goes_on_over_the_websocket(
    hearing: Server, visitors: Visitors, sentences: Path
) -> None:
    """Its peer is closed under it, which nobody tells the page. Nothing that was said is lost, or said twice."""
    page = visitors.open(hearing.url("/"), speech=sentences, script=KEEP_PEERS)
    start(page)
    wait_path(page, "WebRTC")
    wait_finals(page, 1)
    page.wait_for_selector("#rows .open")
    page.evaluate("window.peers.at(-1).close()")
    wait_path(page, "WebSocket")
    wait_finals(page, 4)
    stop(page)
    assert error_rate(" ".join([CLIP_TEXT] * 4), " ".join(finals(page))) <= 0.1
    seconds = start_seconds(page)
    expected = [LEAD_S + n * (CLIP_S + PAUSE_S) for n in range(4)]
    offset = seconds[0] - expected[0]  # when the microphone was opened
    assert seconds == pytest.approx([second + offset for second in expected], abs=1.5)


def test_stopping_in_mid_speech_keeps_what_was_said_and_starting_again_goes_on(
    hearing: Server, visitors: Visitors, one_sentence: Path
) -> None:
    page = visitors.open(hearing.url("/"), speech=one_sentence)
    start(page)
    page.wait_for_function("() => document.querySelector('#rows .open .text')?.textContent.length > 8")
    stop(page)
    said = finals(page)
    assert said
    assert CLIP_TEXT.startswith(said[0][:10])
    start(page)
    wait_finals(page, len(said) + 1)
    stop(page)
    assert finals(page)[: len(said)] == said
    assert error_rate(CLIP_TEXT, " ".join(finals(page)[len(said) :])) <= 0.1
    assert start_seconds(page) == sorted(start_seconds(page))
    assert not page.is_visible("#problem")


def test_two_tabs_hear_two_speakers(hearing: Server, visitors: Visitors, one_sentence: Path, tmp_path: Path) -> None:
    other = write_speech(tmp_path / "other.wav", [clip(CLIP_TAIL_FROM_S)])
    context = visitors.browser("--use-fake-ui-for-media-stream").new_context(permissions=["microphone"])
    pages = []
    for speech in (one_sentence, other):
        page = visitors.watch(context.new_page(), hearing.url("/"))
        page.add_init_script(tab_microphone(speech))
        page.goto(hearing.url("/"))
        page.wait_for_selector("#toggle:enabled")
        pages.append(page)
    for page in pages:
        start(page)
    for page, expected in zip(pages, (CLIP_TEXT, CLIP_TAIL_TEXT), strict=True):
        wait_finals(page, 1)
        assert error_rate(expected, " ".join(finals(page))) <= 0.2


def test_the_readme_example_for_browsers_works(hearing: Server, visitors: Visitors, one_sentence: Path) -> None:
    [example] = re.findall(r"^```js\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    page = visitors.open(hearing.url("/"), speech=one_sentence)
    page.goto(hearing.url("/healthz"))  # the example is for pages that have no such policy as ours
    with page.expect_console_message(lambda message: message.text == CLIP_TEXT, timeout=PATIENCE_MS):
        script = example.replace("ws://localhost:7860", hearing.url("").replace("http", "ws"))
        page.add_script_tag(content=script, type="module")
