"""The page's modules by themselves, in the browser that they are written for: transcript, view, formats."""

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page, Playwright

from app.wire.subtitles import cues, to_srt, to_vtt
from streaming.audio import SAMPLE_RATE
from streaming.events import FinalTranscript
from streaming.types import Word
from tests.support.browser import Visitors
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Event = dict[str, Any]


@pytest.fixture
def page(scripted: Server, visitors: Visitors) -> Iterator[Page]:
    page = visitors.open(scripted.url("/"))
    page.wait_for_selector("#toggle:enabled")
    page.evaluate(
        """async () => {
          for (const name of ["transcript", "view", "formats", "events", "ring"]) {
            Object.assign(window, await import(`./static/${name}.js`));
          }
          window.told = [];
          window.transcript = new Transcript(({ id, text }, what) => window.told.push([id, what, text]));
        }"""
    )
    return page


def started(utterance: int, at_ms: int) -> Event:
    return {"type": "speech_started", "utterance": utterance, "at_ms": at_ms}


def partial(utterance: int, start_ms: int, end_ms: int, committed: str, tentative: str = "") -> Event:
    texts = {"committed": committed, "tentative": tentative}
    return {"type": "partial", "utterance": utterance, "start_ms": start_ms, "end_ms": end_ms, **texts}


def final(utterance: int, start_ms: int, end_ms: int, text: str) -> Event:
    return {"type": "final", "utterance": utterance, "start_ms": start_ms, "end_ms": end_ms, "text": text, "words": []}


def feed(page: Page, events: list[Event], stream: int = 0, origin_ms: int = 0) -> None:
    script = "([events, stream, origin]) => { for (const event of events) transcript.receive(event, stream, origin); }"
    page.evaluate(script, [events, stream, origin_ms])


def rows(page: Page) -> list[tuple[str, str, int]]:
    """State, text and start of each utterance."""
    shown = "transcript.utterances.map(({ state, text, committed, tentative, startMs }) => "
    return [tuple(row) for row in page.evaluate(shown + "[state, text || committed + tentative, startMs])")]


# The transcript over broken streams ----------------------------------------------------------------------------------


def test_open_text_stays_until_the_next_stream_has_heard_it_again(page: Page) -> None:
    feed(
        page, [started(0, 100), final(0, 100, 900, "One."), started(1, 2_000), partial(1, 2_000, 3_000, "two", " thre")]
    )
    page.evaluate("transcript.detach()")
    assert rows(page) == [("final", "One.", 100), ("waiting", "two thre", 2_000)]
    feed(page, [started(0, 300)], stream=1, origin_ms=1_700)
    assert rows(page)[1:] == [("open", "two thre", 2_000)]
    feed(page, [partial(0, 300, 1_900, "", "two three")], stream=1, origin_ms=1_700)
    assert rows(page)[1:] == [("open", "two three", 2_000)]
    feed(page, [final(0, 300, 2_500, "Two, three four.")], stream=1, origin_ms=1_700)
    assert rows(page) == [("final", "One.", 100), ("final", "Two, three four.", 2_000)]


def test_what_is_never_heard_again_is_kept_as_unfinished(page: Page) -> None:
    feed(page, [started(0, 100), partial(0, 100, 900, "half a", " sen"), started(1, 5_000)])
    page.evaluate("transcript.detach()")
    assert rows(page) == [("waiting", "half a sen", 100)]  # of the other one nothing was shown
    feed(page, [{"type": "lag", "audio_ms": 500, "lag_ms": 0}], stream=1, origin_ms=0)
    assert rows(page) == [("waiting", "half a sen", 100)]
    feed(page, [{"type": "lag", "audio_ms": 3_000, "lag_ms": 0}], stream=1, origin_ms=0)
    assert rows(page) == [("unfinished", "half a sen …", 100)]
    assert page.evaluate("transcript.settled.length") == 1


def test_an_utterance_without_words_leaves_nothing(page: Page) -> None:
    feed(page, [started(0, 0), final(0, 0, 500, ""), started(1, 900), final(1, 900, 1_500, "Yes.")])
    assert rows(page) == [("final", "Yes.", 900)]
    assert page.evaluate("told.map(([, what]) => what)") == ["added", "removed", "added", "settled"]


def test_clearing_keeps_what_is_being_said(page: Page) -> None:
    feed(page, [started(0, 0), final(0, 0, 500, "Old."), started(1, 900), partial(1, 900, 1_200, "new")])
    page.evaluate("transcript.clear()")
    assert rows(page) == [("open", "new", 900)]


# The view of a long session ------------------------------------------------------------------------------------------


_LONG_SESSION = """async (count) => {
  const $ = (id) => document.getElementById(id), frame = () => new Promise(requestAnimationFrame);
  window.transcript = new Transcript();
  const names = ["lines", "rows", "earlier", "newest", "hint", "announcer"];
  window.view = new TranscriptView(transcript, Object.fromEntries(names.map((id) => [id, $(id)])));
  window.most = 0;
  window.say = async (from, to) => {
    const times = [];
    for (let n = from; n < to; n++) {
      const began = performance.now(), at = { utterance: n, start_ms: n * 3000, end_ms: n * 3000 + 2000 };
      transcript.receive({ type: "speech_started", utterance: n, at_ms: n * 3000 }, 0, 0);
      for (const committed of ["this is", "this is a sentence", "this is a sentence with a number"]) {
        transcript.receive({ type: "partial", ...at, committed, tentative: " and" }, 0, 0);
      }
      transcript.receive({ type: "final", ...at, text: `this is a sentence with a number, ${n}.`, words: [] }, 0, 0);
      times.push(performance.now() - began);
      if (n % 20 === 0) await frame();
      window.most = Math.max(window.most, document.querySelectorAll("#rows *").length);
    }
    await frame();
    return times.sort((a, b) => a - b)[times.length >> 1];
  };
  return await window.say(0, count);
}"""


BYTES_AN_UTTERANCE = 1_024  # its text and times as data take 250; as elements they would take ten times as much


@dataclass(frozen=True)
class Footprint:
    """What a page holds after its garbage has been collected. ``nodes``: of the document, and those kept without it."""

    heap_bytes: int
    nodes: int


def footprint(page: Page) -> Footprint:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap_bytes = session.send("Runtime.getHeapUsage")["usedSize"]
    nodes = session.send("Memory.getDOMCounters")["nodes"]
    session.detach()
    return Footprint(heap_bytes, nodes)


def test_a_session_of_a_thousand_utterances_stays_small_and_fast(page: Page) -> None:
    early_ms = page.evaluate(_LONG_SESSION, 300)
    early = footprint(page)
    late_ms = page.evaluate("say(300, 1_000)")
    late = footprint(page)
    assert late.nodes < early.nodes + 100
    assert late.heap_bytes - early.heap_bytes < 700 * BYTES_AN_UTTERANCE
    assert page.evaluate("transcript.utterances.length") == 1_000
    assert page.evaluate("most") <= 250 * 5 + 5  # elements a row: itself, time, text, and its two parts
    assert page.locator("#announcer p").count() <= 5
    assert late_ms < 3 * early_ms + 2  # an update costs what it did at the beginning
    assert "number, 999." in page.inner_text("#rows")
    assert page.evaluate("lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 2")
    assert len(page.evaluate("toText(transcript.settled)").splitlines()) == 1_000


def test_the_page_lets_go_when_the_reader_scrolls_up(page: Page) -> None:
    page.evaluate(_LONG_SESSION, 1_000)
    page.evaluate("lines.scrollTop = 1_000")
    page.wait_for_selector("#newest:visible")
    stands = page.evaluate("lines.scrollTop")
    page.evaluate("say(1_000, 1_100)")
    assert page.evaluate("lines.scrollTop") == stands
    page.evaluate("lines.scrollTop = 0")
    first = page.inner_text("#rows .row:first-child .text")
    page.click("#earlier")
    assert page.inner_text("#rows .row:nth-child(101) .text") == first
    assert page.locator("#rows .row").count() <= 600
    for _ in range(9):
        if page.is_visible("#earlier"):
            page.click("#earlier")
    assert page.inner_text("#rows .row:first-child .text").endswith("number, 0.")
    assert page.locator("#rows .row").count() <= 600
    page.click("#newest")
    page.wait_for_function("() => lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 2")
    assert "number, 1099." in page.inner_text("#rows")
    assert page.locator("#rows .row").count() <= 250


def test_words_that_stand_are_not_written_again(page: Page) -> None:
    """A selection in them survives, and a shorter guess does not make the lines below jump."""
    page.evaluate(_LONG_SESSION, 1)
    words = "word " * 60
    feed(page, [started(1, 5_000), partial(1, 5_000, 6_000, words.strip(), " and a guess " * 20)])
    page.evaluate("new Promise(requestAnimationFrame)")
    page.evaluate(
        """() => {
          const row = document.querySelector("#rows .open");
          window.node = row.querySelector(".text > span").firstChild;
          window.height = row.offsetHeight;
          getSelection().setBaseAndExtent(node, 0, node, 9);
        }"""
    )
    feed(page, [partial(1, 5_000, 7_000, (words + "more").strip(), "")])
    page.evaluate("new Promise(requestAnimationFrame)")
    assert page.evaluate("node.isConnected && getSelection().toString()") == "word word"
    assert page.evaluate("document.querySelector('#rows .open').offsetHeight === height")


# Files made from a transcript ----------------------------------------------------------------------------------------


_WORD = st.one_of(
    st.text(string.ascii_letters, min_size=1, max_size=12),
    st.sampled_from(["Hark,", "so.", "good?", "“quoted”", "a<b&c", "-->", "3.5", "ça", "well…"]),
)


@st.composite
def utterances(draw: st.DrawFn) -> list[FinalTranscript]:
    """Finals with words, as the engine gives them: a space before each word, times that go forward."""
    at_ms, found = draw(st.integers(0, 4_000_000)), []
    for number in range(draw(st.integers(1, 3))):
        words = []
        for text in draw(st.lists(_WORD, min_size=1, max_size=30)):
            length_ms = draw(st.integers(20, 1_500))
            words.append(Word(f" {text}", at_ms * 16, (at_ms + length_ms) * 16, 0.9))
            at_ms += length_ms + draw(st.sampled_from([0, 0, 10, 400, 2_000]))
        text = "".join(word.text for word in words).strip()
        start, end = words[0].start_sample, words[-1].end_sample
        found.append(FinalTranscript(number, 0, text, tuple(words), "en", 0.9, 0.9, start, end))
        at_ms += 600
    return found


def for_page(finals: list[FinalTranscript]) -> str:
    per_ms = SAMPLE_RATE // 1000
    return json.dumps(
        [
            {
                "startMs": final.start_sample // per_ms,
                "endMs": final.end_sample // per_ms,
                "text": final.text,
                "words": [
                    {"word": w.text.strip(), "startMs": w.start_sample // per_ms, "endMs": w.end_sample // per_ms}
                    for w in final.words
                ],
            }
            for final in finals
        ]
    )


@pytest.fixture(scope="module")
def formats(scripted: Server, playwright: Playwright) -> Iterator[Page]:
    visitors = Visitors(playwright)
    page = visitors.open(scripted.url("/"))
    page.evaluate("async () => { Object.assign(window, await import('./static/formats.js')); }")
    yield page
    visitors.leave()


@settings(max_examples=60)
@given(finals=utterances())
def test_subtitles_are_the_same_as_the_services(formats: Page, finals: list[FinalTranscript]) -> None:
    srt, vtt = formats.evaluate("(given) => [toSrt(JSON.parse(given)), toVtt(JSON.parse(given))]", for_page(finals))
    assert srt == to_srt(cues(finals))
    assert vtt == to_vtt(cues(finals))


def test_text_without_spaces_between_words_is_cut_too(page: Page) -> None:
    text = "今日はとても良い天気ですから、公園に行きましょう。" * 3
    items = [{"startMs": 0, "endMs": 9_000, "text": text, "words": []}]
    lines = page.evaluate("(items) => cues(items).flatMap(({ text }) => text.split('\\n'))", items)
    assert "".join(lines) == text
    assert max(map(len, lines)) <= 21


# Smaller ones --------------------------------------------------------------------------------------------------------


def test_events_are_read_however_the_answer_is_cut(page: Page) -> None:
    answer = 'data: {"a":1}\n\n: still there\n\ndata: {"b":\ndata: 2}\n\ndata: cut off'
    script = """(answer) => {
      const reader = new EventReader(), found = [];
      for (let n = 1; n <= answer.length; n++) found.push(...reader.take(answer.slice(0, n)));
      return found;
    }"""
    assert page.evaluate(script, answer) == ['{"a":1}', '{"b":\n2}']


def test_the_ring_keeps_the_newest_audio(page: Page) -> None:
    script = """() => {
      const ring = new AudioRing(100, 3);
      for (let n = 0; n < 10; n++) ring.push(Int16Array.from({ length: 40 }, (_, i) => n * 40 + i).buffer);
      return [ring.start, ring.end, ring.from(330).flatMap((piece) => [...piece])];
    }"""
    start, end, samples = page.evaluate(script)
    assert (start, end) == (120, 400)
    assert samples == list(range(330, 400))
