"""bench.compare: screens → figures, each server's messages → screens, the client, the report. Nothing is installed."""

import asyncio
import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import websockets
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import compare
from bench.peers import environments
from bench.peers.client import Played, play
from bench.peers.environments import SetupFailed
from bench.peers.hark import HarkWire
from bench.peers.report import (
    FILE_FIGURES,
    HARK,
    LIVE_FIGURES,
    File,
    Live,
    file_figures,
    live_figures,
    live_table,
    picture,
    ratio_lines,
    ratios,
)
from bench.peers.whisper_live import WhisperLiveWire
from bench.peers.whisperlivekit import WHISPERLIVEKIT, WhisperLiveKitWire
from bench.peers.wire import Refused, Request, Screen, Wire
from bench.player import PlayFailed
from bench.process import Load, ServerFailed, idle, listens, logged, watched
from bench.scoring import Score
from bench.snapshots import (
    Measures,
    Outcome,
    Snapshot,
    first_seen,
    heard_words,
    measure,
    spoken_words,
    taken_back,
)
from bench.tracks import Spoken, Track
from streaming.audio import SAMPLE_RATE

# Screens → figures ---------------------------------------------------------------------------------------------------


def spoken(start_s: float, end_s: float, text: str) -> Spoken:
    return Spoken("r", text, "en", round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE))


def track(*utterances: Spoken) -> Track:
    return Track(np.zeros(round((utterances[-1].end_s + 1) * SAMPLE_RATE), np.int16), utterances)


# "abc de" takes six characters of time: one a second.
ONE = spoken(1.0, 7.0, "ABC DE.")
TWO = spoken(10.0, 17.0, "fg hijk")


def test_words_take_as_long_as_their_characters() -> None:
    words = [(w.text, w.start_s, w.end_s, w.utterance) for w in spoken_words([ONE, TWO])]
    assert words == [("abc", 1, 4, 0), ("de", 5, 7, 0), ("fg", 10, 12, 1), ("hijk", 13, 17, 1)]
    assert spoken_words([spoken(0, 1, "--")]) == []


def test_heard_words_stand_for_spoken_ones_right_or_wrong() -> None:
    heard = heard_words(spoken_words([ONE, TWO]), "Abc, the de fg high")
    assert [(w.text, w.spoken and w.spoken.text, w.is_right) for w in heard] == [
        ("abc", "abc", True),
        ("the", None, False),
        ("de", "de", True),
        ("fg", "fg", True),
        ("high", "hijk", False),
    ]
    assert [w.begun_s for w in heard] == [1, 1, 5, 10, 13]  # one too many began with the word before


def test_delays_count_from_the_speech_to_the_first_screen_that_has_the_word() -> None:
    screens = [
        Snapshot(4.5, "", "abc"),
        Snapshot(7.5, "abc", "abc the"),
        Snapshot(8.0, "abc", "abc de"),
        Snapshot(9.0, "abc de", "abc de"),
        Snapshot(17.4, "abc de", "abc de fg hijk"),
        Snapshot(19.0, "abc de fg", "abc de fg hijk"),
    ]
    found = measure(track(ONE, TWO), screens)
    assert [(o.last_word_s, o.final_s) for o in found.outcomes] == [(1.0, 2.0), (pytest.approx(0.4), None)]
    assert found.word_delays_s == pytest.approx([0.5, 1.0, 5.4, 0.4])
    assert (found.settled, found.shown) == (Score(4, 0, 1, 0), Score(4, 0, 0, 0))
    assert found.taken_back == 0


def test_a_word_that_vanishes_before_the_end_was_not_recognised() -> None:
    screens = [Snapshot(7.5, "", "abc de"), Snapshot(9.0, "abc", "abc")]
    [outcome] = measure(track(ONE), screens).outcomes
    assert (outcome.last_word_s, outcome.final_s) == (None, None)  # "abc" ends three seconds before the speech does


def test_a_last_word_that_was_misheard_is_still_the_last_word() -> None:
    [outcome] = measure(track(ONE), [Snapshot(7.2, "", "abc the"), Snapshot(8.0, "abc the", "abc the")]).outcomes
    assert (outcome.last_word_s, outcome.final_s) == (pytest.approx(0.2), 1.0)


def test_a_server_that_says_nothing_settles_nothing() -> None:
    found = measure(track(ONE, TWO), [])
    assert [(o.last_word_s, o.final_s) for o in found.outcomes] == [(None, None)] * 2
    assert (found.settled, found.word_delays_s) == (Score(4, 0, 4, 0), ())


def test_a_screen_shows_no_word_that_has_not_begun() -> None:
    two = [spoken(0.0, 3.0, "the"), spoken(6.0, 9.0, "the")]
    screens = [Snapshot(3.5, "", "the the"), Snapshot(8.0, "", "the the")]
    heard = heard_words(spoken_words(two), "the the")
    assert first_seen(heard, screens, lambda s: s.shown) == [3.5, 8.0]  # the same text, but the word has begun by now


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["The cat", "the CAT, saw"], 0),
        (["the cat", "the dog saw"], 1),
        (["the cat saw", "the"], 2),
        (["the cat", "", "the cat"], 2),
        (["the cat", "the big cat"], 0),  # put between: nothing is gone
        ([], 0),
    ],
)
def test_settled_words_that_go_or_change_were_taken_back(texts: list[str], count: int) -> None:
    assert taken_back(texts) == count


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=12)


@settings(deadline=None)  # machines may be busy
@given(WORDS, st.integers(1, 4), st.floats(0.0, 3.0))
def test_a_screen_that_grows_a_word_at_a_time_shows_each_when_it_does(
    words: list[str], n_utterances: int, delay_s: float
) -> None:
    """Whatever the words, repeated ones too: each is shown ``delay_s`` after its end, and settled with the next."""
    cuts = [len(words) * number // n_utterances for number in range(n_utterances + 1)]
    parts = [words[a:b] for a, b in itertools.pairwise(cuts) if a < b]
    utterances = [spoken(20.0 * n, 20.0 * n + 8, " ".join(part)) for n, part in enumerate(parts)]
    screens = [
        Snapshot(word.end_s + delay_s, " ".join(words[:number]), " ".join(words[: number + 1]))
        for number, word in enumerate(spoken_words(utterances))
    ]
    found = measure(track(*utterances), screens)
    assert found.word_delays_s == pytest.approx([delay_s] * len(words), abs=1e-3)
    assert [o.last_word_s for o in found.outcomes] == pytest.approx([delay_s] * len(parts), abs=1e-3)
    assert [o.final_s is None for o in found.outcomes] == [False] * (len(parts) - 1) + [True]
    assert (found.shown.errors, found.settled.errors, found.taken_back) == (0, 1, 0)


# Messages → screens --------------------------------------------------------------------------------------------------


def screens(wire: Wire, *events: dict[str, Any]) -> list[Screen | None]:
    return [wire.screen(event) for event in events]


def test_hark_settles_committed_words_and_finals_in_the_order_of_utterances() -> None:
    def event(kind: str, n: int, **fields: str) -> dict[str, Any]:
        return {"type": kind, "utterance": n, **fields}

    wire = HarkWire("en")
    assert wire.hello is not None
    assert json.loads(wire.hello) == {"type": "config", "language": "en"}
    assert [wire.is_ready({"type": kind}) for kind in ("ready", "lag", "ready")] == [False, False, True]
    assert screens(
        wire,
        event("partial", 0, committed="One", tentative=" two"),
        event("partial", 1, committed="", tentative="Three"),
        event("final", 0, text="One two."),
        {"type": "lag", "lag_ms": 3},
        event("failed", 1),
    ) == [
        Screen("One", "One two"),
        Screen("One", "One two Three"),
        Screen("One two.", "One two. Three"),
        None,
        Screen("One two.", "One two."),
    ]
    assert [wire.is_done({"type": kind}) for kind in ("lag", "done")] == [False, True]
    assert wire.screen({"type": "error", "fatal": False, "message": "late config"}) is None
    with pytest.raises(Refused, match="no place"):
        wire.is_ready({"type": "error", "fatal": True, "message": "no place"})


def test_whisper_live_keeps_completed_segments_that_left_its_messages() -> None:
    def segment(start: str, text: str, completed: bool) -> dict[str, Any]:
        return {"start": start, "end": "99.000", "text": text, "completed": completed}

    wire = WhisperLiveWire(None)
    assert np.frombuffer(wire.audio(np.array([-32_768, 0, 16_384], np.int16)), np.float32).tolist() == [-1, 0, 0.5]
    assert [wire.is_ready(e) for e in ({"language": "en"}, {"message": "SERVER_READY"})] == [False, True]
    assert screens(
        wire,
        {"segments": [segment("0.000", " One", False)]},
        {"segments": [segment("0.000", " One.", True), segment("2.000", " Two", False)]},
        {"segments": [segment("10.000", " Four", True), segment("2.000", " Two.", True)]},
        {"segments": [segment("10.000", " Five", True)]},
        {"uid": "bench", "language": "en"},
    ) == [
        Screen("", "One"),
        Screen("One.", "One. Two"),
        Screen("One. Two. Four", "One. Two. Four"),  # by time, and 10 comes after 2
        Screen("One. Two. Five", "One. Two. Five"),
        None,
    ]
    with pytest.raises(Refused, match="WAIT"):
        wire.is_ready({"status": "WAIT", "message": 3.2})


def test_whisperlivekit_settles_its_lines() -> None:
    wire = WhisperLiveKitWire("en")
    assert [wire.is_ready({"type": kind}) for kind in ("config", "x")] == [True, False]
    lines = [{"speaker": 1, "text": " One"}, {"speaker": -2, "text": None}, {"speaker": 1, "text": " two"}]
    message = {"status": "active_transcription", "lines": lines, "buffer_transcription": " three"}
    assert screens(wire, message, {"type": "ready_to_stop"}) == [Screen("One two", "One two three"), None]
    assert [wire.is_done(e) for e in (message, {"type": "ready_to_stop"})] == [False, True]
    with pytest.raises(Refused, match="no model"):
        wire.screen({"error": "no model"})
    command = WHISPERLIVEKIT.command(Request(Path("/bin"), Path("/w"), 80, None))
    assert command[command.index("--lan") + 1] == "auto"


# The client ----------------------------------------------------------------------------------------------------------

Handler = Callable[[websockets.ServerConnection], Awaitable[None]]


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[str]:
    async with websockets.serve(handler, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


async def play_one(url: str, wire: Callable[[], Wire], patience_s: float = 5.0) -> Played:
    said = Track((np.arange(4_000) % 100).astype(np.int16), (spoken(0.0, 0.2, "la"),))
    [played] = await play(url, wire, [said], message_ms=30, patience_s=patience_s)
    return played


async def test_audio_goes_at_the_pace_of_speech_and_screens_come_back() -> None:
    arrivals: list[tuple[float, bytes]] = []
    began_s = asyncio.get_running_loop().time()

    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.send('{"type":"config"}')
        async for message in connection:
            assert isinstance(message, bytes)
            if not message:
                await connection.send('{"lines":[{"text":"la"}],"buffer_transcription":""}')
                await connection.send('{"type":"ready_to_stop"}')
                return
            arrivals.append((asyncio.get_running_loop().time() - began_s, message))

    async with service(handler) as url:
        played = await play_one(url, lambda: WhisperLiveKitWire("en"))
    assert b"".join(data for _, data in arrivals) == (np.arange(4_000) % 100).astype(np.int16).tobytes()
    assert [len(data) for _, data in arrivals] == [960] * 8 + [320]
    assert all(at_s >= 0.03 * number for number, (at_s, _) in enumerate(arrivals[:-1], start=1))
    assert [(s.settled, s.shown) for s in played.snapshots] == [("la", "la")]
    assert played.snapshots[0].at_s >= 0.25
    assert (played.error, len(played.late_s)) == ("", 9)
    assert played.ended_s is not None


async def test_a_server_that_never_says_done_is_left_after_its_own_quiet_time() -> None:
    told: list[str | bytes] = []

    async def handler(connection: websockets.ServerConnection) -> None:
        assert json.loads(await connection.recv())["language"] == "en"
        await connection.send('{"message":"SERVER_READY"}')
        told.extend([message async for message in connection])

    def wire() -> Wire:
        found = WhisperLiveWire("en")
        found.quiet_s = 0.1
        return found

    async with service(handler) as url:
        played = await play_one(url, wire)
    assert told[-1] == b"END_OF_AUDIO"
    assert len(told) == 9 + 1  # and it did not hang up in the middle of the audio, which lasts longer than the quiet
    assert played.error == ""
    assert played.ended_s is not None
    assert played.ended_s >= 0.25 + 0.1


@pytest.mark.parametrize(
    ("last_words", "error"),
    [('{"error":"out of memory"}', "out of memory"), (None, "closed"), ("", "not done")],
)
async def test_a_stream_that_breaks_off_says_why(last_words: str | None, error: str) -> None:
    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.send('{"type":"config"}')
        await connection.send('{"lines":[],"buffer_transcription":"la"}')
        if last_words == "":
            await connection.wait_closed()
        elif last_words is not None:
            await connection.send(last_words)

    async with service(handler) as url:
        played = await play_one(url, lambda: WhisperLiveKitWire("en"), patience_s=0.2)
    assert error in played.error
    assert [s.shown for s in played.snapshots] == ["la"]  # what came is kept
    assert played.ended_s is None


async def test_a_refused_stream_is_a_failure() -> None:
    async def handler(connection: websockets.ServerConnection) -> None:
        await connection.recv()
        await connection.send('{"status":"WAIT","message":5}')

    async with service(handler) as url:
        with pytest.raises(PlayFailed, match="WAIT"):
            await play_one(url, lambda: WhisperLiveWire("en"))
    with pytest.raises(PlayFailed, match="cannot connect"):
        await play_one(url, lambda: WhisperLiveWire("en"))


# Processes and environments ------------------------------------------------------------------------------------------


_PARENT = """
import socket, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def is_alive(process: psutil.Process) -> bool:
    """A zombie is dead; it is only not yet collected by whoever adopted it."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_a_server_is_watched_and_stopped_with_its_children(tmp_path: Path) -> None:
    port = compare.free_port()
    command = [sys.executable, "-c", _PARENT, str(port)]
    with logged(command, {}, tmp_path / "logs" / "a.log", listens(port)) as pid:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        load = await watched(pid, asyncio.create_task(asyncio.sleep(0)))
    assert len(tree) == 2
    assert not any(is_alive(process) for process in tree)
    assert load is not None
    assert load.rss_mib > 1
    assert await watched(pid, asyncio.create_task(asyncio.sleep(0))) is None


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no weights'); raise SystemExit(3)"]
    log = tmp_path / "a.log"
    with pytest.raises(ServerFailed, match=r"exit code 3:\nno weights"), logged(command, {}, log, lambda: False):
        pass
    with pytest.raises(ServerFailed, match="nowhere"), logged(["/nowhere"], {}, log, lambda: False):
        pass


async def test_a_server_that_still_works_for_earlier_clients_is_waited_for(tmp_path: Path) -> None:
    """It is busy until a file appears."""
    go = tmp_path / "go"
    command = [sys.executable, "-c", f"import os, time\nwhile not os.path.exists({str(go)!r}): pass\ntime.sleep(600)"]
    with logged(command, {}, tmp_path / "a.log", lambda: True) as pid:
        assert not await idle(pid, 0.5)
        go.touch()
        assert await idle(pid, 60.0)


def test_an_environment_is_made_once_and_again_when_its_requirements_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> str:
        ran.append(command)
        (tmp_path / "thing").mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "_run", run)
    environments.set_up("Thing", [("--no-deps", "a==1"), ("b",)])
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-m", "pip"], ["-m", "pip"]]
    assert ran[1][-2:] == ["--no-deps", "a==1"]
    environments.set_up("Thing", [("--no-deps", "a==1"), ("b",)])
    assert len(ran) == 3
    environments.set_up("Thing", [("a==2",)])
    assert len(ran) == 5


def test_an_installation_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str]) -> str:
        (tmp_path / "thing").mkdir(exist_ok=True)
        if "pip" in command:
            raise SetupFailed("no such version")
        return ""

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "_run", run)
    for _ in range(2):
        with pytest.raises(SetupFailed, match="no such version"):
            environments.set_up("Thing", [("a==1",)])


# The report ----------------------------------------------------------------------------------------------------------


def live(server: str, final_s: float | None, *, settled: Score, streams: int = 1) -> Live:
    outcome = Outcome(ONE, 0.5, final_s)
    measures = Measures((outcome, Outcome(TWO, None, None)), (0.2, 0.4), settled, settled, 1)
    return Live(server, streams, measures, Load(50.0, 300.0))


def test_a_peer_that_wins_is_named() -> None:
    rows = [
        live_figures(live(HARK, 2.0, settled=Score(10, 1))),
        live_figures(live("Fast", 1.0, settled=Score(10, 3))),
        live_figures(live("Slow", 8.0, settled=Score(10, 1))),
        live_figures(Live("Broken", 1, problem="did not start\nTraceback")),
    ]
    assert (rows[0]["final_p50_s"], rows[0]["never_final"], rows[0]["word_shown_p95_s"]) == (2.0, 0.5, 0.4)
    found = ratios(rows, LIVE_FIGURES)
    assert found["final_p50_s"] == {"hark": 2.0, "peer": 1.0, "best_peer": "Fast", "ratio": 2.0, "better": "Fast"}
    assert found["wer_settled"]["better"] == "equal"
    assert any(
        "final_p50_s" in line and line.endswith("better: Fast") for line in ratio_lines("1", found, LIVE_FIGURES)
    )
    table = live_table(rows).splitlines()
    assert table[-1].split("not run:")[1].strip() == "did not start"
    assert "2.00 s" in table[1]


def test_a_peer_that_settled_nothing_is_best_at_nothing() -> None:
    silent = Live("Silent", 1, measure(track(ONE), []), Load(1.0, 1.0))
    rows = [live_figures(live(HARK, 2.0, settled=Score(1))), live_figures(silent)]
    assert rows[1]["never_final"] == 1
    assert ratios(rows, LIVE_FIGURES) == {}


def test_more_speed_is_better_and_less_delay_is() -> None:
    fast, slow = (file_figures(File(name, 60.0, taken_s, Score(9))) for name, taken_s in ((HARK, 3.0), ("B", 6.0)))
    assert ratios([fast, slow], FILE_FIGURES)["speed"] == {
        "hark": 20.0,
        "peer": 10.0,
        "best_peer": "B",
        "ratio": 2.0,
        "better": HARK,
    }
    assert ratios([fast], FILE_FIGURES) == {}
    assert ratios([slow, file_figures(File(HARK, problem="gone"))], FILE_FIGURES) == {}


def test_the_picture_is_svg_with_a_bar_for_each_delay() -> None:
    rows = [live_figures(live("A & B", 4.0, settled=Score(1))), live_figures(Live("Broken", 2, problem="x"))]
    root = ElementTree.fromstring(picture(rows, "Delays <s>"))
    widths = [float(bar.get("width", "")) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert sorted(widths[3:]) == [0.0, 0.0, pytest.approx(70.0), 560.0]  # 0.5 s and 4 s, and none of the broken one
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A & B, 1 stream" in texts
    assert "Broken, 2 streams" in texts


def row(server: str, problem: str = "", *, measured: bool = True) -> dict[str, Any]:
    return {"server": server, "problem": problem} | ({"utterances": 3} if measured else {})


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row(HARK), row("A")], 0),
        ([row(HARK), row("A"), row("B", "gone", measured=False)], 0),
        ([row(HARK), row("A", "gone", measured=False)], compare.EXIT_SERVICE_FAILED),
        ([row(HARK)], 0),  # no peer was asked for
        ([row(HARK, "gone", measured=False), row("A")], compare.EXIT_SERVICE_FAILED),
        ([row(HARK, "not done"), row("A")], compare.EXIT_SERVICE_FAILED),
        ([row(HARK), row("A", "INVALID: late")], compare.EXIT_INVALID),
    ],
)
def test_exit_codes(rows: list[dict[str, Any]], code: int) -> None:
    assert compare.exit_code({"live": rows, "files": []}) == code


def test_nothing_to_play_ends_with_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("HARK_CORPUS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compare.main(["--peers", ""]) == compare.EXIT_NO_SPEECH
    assert "corpus is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.arguments(["--peers", "nobody"])


def test_a_peer_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    plan = compare.Plan([], track(ONE), [1, 4], 32, Path("/w"), "en", 2)
    rows, record = compare.race("WhisperLiveKit", compare.peer(WHISPERLIVEKIT, plan), plan)  # there is no such program
    assert [(r.streams, r.measures) for r in rows] == [(1, None), (4, None)]
    assert all("wlk" in r.problem for r in rows)
    assert "wlk" in record["problem"]
    assert "wlk" in capsys.readouterr().err


def test_a_peer_that_cannot_be_installed_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_up(name: str, _: object) -> None:
        if name != "WhisperLive":
            raise SetupFailed("pip: no network")

    def race(name: str, _: object, __: object) -> tuple[list[Live], dict[str, Any]]:
        return [Live(name, 1, Measures())], {"server": name}

    monkeypatch.setattr(environments, "set_up", set_up)
    monkeypatch.setattr(compare, "race", race)
    not_installed = compare.set_up_all(["whisper-live", "whisperlivekit", "faster-whisper"])
    assert set(not_installed) == {"WhisperLiveKit", "faster-whisper"}
    asked = compare.arguments(["--no-files"])
    plan = compare.Plan([], track(ONE), [1], 32, Path("/w"), "en", 2)
    results = compare._measure(asked, plan, not_installed)
    assert [(r.server, r.problem) for r in results.live] == [
        (HARK, ""),
        ("WhisperLive", ""),
        ("WhisperLiveKit", "not installed: pip: no network"),
    ]


def test_commands_are_shown_without_this_machines_folders() -> None:
    command = [f"{compare._ROOT}/.bench/x/venv/bin/python", str(Path.home() / ".cache" / "w"), "a b"]
    assert compare.shown_command(command) == "./.bench/x/venv/bin/python ~/.cache/w 'a b'"
