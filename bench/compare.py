"""Hark beside its peers: the same recorded speech at the same pace to one server after the other, in one run.

    python -m bench.compare [--peers whisper-live,whisperlivekit,faster-whisper] [--streams 1,4] [--seconds 48]
                            [--file-minutes 10 | --no-files] [--json FILE] [--plot FILE.svg] [--setup-only]

Peers are installed into environments of their own below .bench; all servers get the same weights and the same number
of threads. A peer that fails stands in the table with the reason, and the others go on. bench/README.md says what each
figure means. Exit codes: 0 measured; 1 Hark failed, or no peer could be measured; 2 there is no speech to play; 3
measured, but the client itself was late.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.corpus import SpeechMissing, find_corpus, read_audio, recordings
from bench.measures import percentile
from bench.peers import environments
from bench.peers.client import Played, play
from bench.peers.environments import SetupFailed
from bench.peers.hark import PATH as HARK_PATH
from bench.peers.hark import HarkWire
from bench.peers.report import (
    FILE_FIGURES,
    HARK,
    LIVE_FIGURES,
    File,
    Live,
    file_figures,
    file_table,
    live_figures,
    live_table,
    picture,
    ratio_lines,
    ratios,
)
from bench.peers.whisper_live import WHISPER_LIVE
from bench.peers.whisperlivekit import WHISPERLIVEKIT
from bench.peers.wire import Peer, Request, Wire
from bench.player import PlayFailed
from bench.process import ServerFailed, answers, free_port, idle, listens, logged, watched
from bench.replay import (
    EXIT_INVALID,
    EXIT_NO_SPEECH,
    EXIT_SERVICE_FAILED,
    LATE_LIMIT_S,
    counts,
    machine,
    positive,
    versions,
)
from bench.scoring import score
from bench.snapshots import Measures, measure
from bench.tracks import Track, deal
from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16

PATIENCE_S = 45.0
_WARM_UP_S = 3.0
_WARM_UP_PATIENCE_S = 20.0
_IDLE_TIMEOUT_S = 120.0
_FILE_TIMEOUT_S = 3_600.0
_FILES_PATH = "/v1/audio/transcriptions"
_ROOT = Path(__file__).resolve().parents[1]
LIVE_PEERS = {"whisper-live": WHISPER_LIVE, "whisperlivekit": WHISPERLIVEKIT}
FILES_PEER = "faster-whisper"
_FILES_REQUIREMENTS = (("faster-whisper==1.2.1",),)
_FILES_PACKAGES = ("faster-whisper", "ctranslate2", "onnxruntime", "av")
# Which of Hark's settings change its figures; the others may be secrets.
_HARK_SETTINGS = tuple(
    f"HARK_{name}"
    for name in (
        "ENGINE", "DEVICE", "COMPUTE_TYPE", "WORKERS", "THREADS", "MARGIN_S", "FULL_WINDOW", "PAUSE_MS",
        "PARTIAL_INTERVAL_MS", "MAX_UTTERANCE_MS", "MAX_LOAD",
    )
)  # fmt: skip
# What was looked at and is not played to, so that nobody has to wonder.
NOT_RUN = {
    "RealtimeSTT": "its server for several clients leaves the end of an utterance to the client",
    "speaches": "not in the Python package registry",
    "vLLM's own server": "takes no CTranslate2 weights, so it would not be the same model file",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played to every server, and under which conditions."""

    tracks: Sequence[Track]
    warm_up: Track
    streams: Sequence[int]
    message_ms: int
    weights: Path
    language: str | None
    threads: int

    @property
    def environment(self) -> dict[str, str]:
        """For every server: the same threads, nothing fetched while it is measured."""
        return dict(os.environ) | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server that runs: what it was started with, its process, its WebSocket, a codec for a connection to it."""

    command: Sequence[str]
    pid: int
    url: str
    wire: Callable[[], Wire]


@dataclass(frozen=True, slots=True)
class Recording:
    """A long recording as a WAV file, and a short one to warm up with."""

    path: Path
    warm_up: Path
    audio_s: float
    text: str
    language: str


# Servers ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hark(plan: Plan) -> Iterator[Target]:
    """Raises ServerFailed."""
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"HARK_MODEL": str(plan.weights), "HARK_MAX_SESSIONS": str(max(64, *plan.streams))}
    ready = answers(f"http://127.0.0.1:{port}/readyz")
    with logged(command, plan.environment | settings, _log_path(HARK), ready) as pid:
        yield Target(command, pid, f"ws://127.0.0.1:{port}{HARK_PATH}", partial(HarkWire, plan.language))


@contextlib.contextmanager
def peer(of: Peer, plan: Plan) -> Iterator[Target]:
    """Raises ServerFailed."""
    port = free_port()
    command = of.command(Request(environments.programs(of.name), plan.weights, port, plan.language))
    ready = listens(port) if of.ready_path is None else answers(f"http://127.0.0.1:{port}{of.ready_path}")
    with logged(command, plan.environment, _log_path(of.name), ready) as pid:
        yield Target(command, pid, f"ws://127.0.0.1:{port}{of.path}", partial(of.wire, plan.language))


def shown_command(command: Sequence[str]) -> str:
    """As it would be typed in the repository's root: without the names of this machine's folders."""
    return shlex.join(command).replace(str(_ROOT), ".").replace(str(Path.home()), "~")


def _log_path(name: str) -> Path:
    return environments.FOLDER / "logs" / f"{name.lower()}.log"


# Live ---------------------------------------------------------------------------------------------------------------


def race(name: str, server: contextlib.AbstractContextManager[Target], plan: Plan) -> tuple[list[Live], dict[str, Any]]:
    """Every number of streams on one server, and what is written down about it; failures are rows too."""
    rows: list[Live] = []
    record: dict[str, Any] = {"server": name, "runs": []}
    try:
        with server as target:
            record["command"] = shown_command(target.command)
            asyncio.run(_warm_up(target, plan))
            for count in plan.streams:
                row, details = asyncio.run(_run(name, target, plan, count))
                rows.append(row)
                record["runs"].append(details)
    except (ServerFailed, PlayFailed) as failed:
        print(f"bench.compare: {name}: {failed}", file=sys.stderr)
        record["problem"] = str(failed)
        rows += [Live(name, count, problem=str(failed)) for count in plan.streams[len(rows) :]]
    return rows, record


def _not_raced(name: str, problem: str, plan: Plan) -> tuple[list[Live], dict[str, Any]]:
    return [Live(name, count, problem=problem) for count in plan.streams], {"server": name, "problem": problem}


async def _warm_up(target: Target, plan: Plan) -> None:
    """One short stream that is not measured: some servers load their model for their first client."""
    await play(target.url, target.wire, [plan.warm_up], message_ms=plan.message_ms, patience_s=_WARM_UP_PATIENCE_S)


async def _run(name: str, target: Target, plan: Plan, count: int) -> tuple[Live, dict[str, Any]]:
    tracks = plan.tracks[:count]
    was_idle = await idle(target.pid, _IDLE_TIMEOUT_S)
    playing = asyncio.create_task(
        play(target.url, target.wire, tracks, message_ms=plan.message_ms, patience_s=PATIENCE_S)
    )
    load = await watched(target.pid, playing)
    played = await playing
    each = [measure(track, p.snapshots) for track, p in zip(tracks, played, strict=True)]
    late_s = percentile([late for p in played for late in p.late_s], 99) or 0.0
    problems = [p.error for p in played if p.error]
    if late_s > LATE_LIMIT_S:
        problems.append("INVALID: the client itself was late")
    row = Live(name, count, sum(each, Measures()), load, late_s, "; ".join(dict.fromkeys(problems)))
    return row, {
        "streams": count,
        "was_idle_before": was_idle,
        "details": [_details(p, m) for p, m in zip(played, each, strict=True)],
    }


def _details(played: Played, measures: Measures) -> dict[str, Any]:
    last = played.snapshots[-1] if played.snapshots else None
    return {
        "error": played.error,
        "ended_s": played.ended_s and round(played.ended_s, 3),
        "blocked_s": round(played.blocked_s, 3),
        "snapshots": len(played.snapshots),
        "settled": last and last.settled,
        "shown": last and last.shown,
        "taken_back": measures.taken_back,
        "utterances": [
            {
                "recording": o.spoken.recording,
                "text": o.spoken.text,
                "end_s": round(o.spoken.end_s, 3),
                "last_word_s": o.last_word_s and round(o.last_word_s, 3),
                "final_s": o.final_s and round(o.final_s, 3),
            }
            for o in measures.outcomes
        ],
    }


# Files --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def long_recording(minutes: float) -> Iterator[Recording]:
    """The corpus's longest recording, cut where an utterance ends. Raises SpeechMissing."""
    root = find_corpus()
    if root is None:
        raise SpeechMissing("no corpus, so no long recording")
    rows = [json.loads(line) for line in (root / "manifest.jsonl").read_text("utf-8").splitlines() if line]
    longest = max((row for row in rows if row["set"] == "longform"), key=lambda row: float(row["duration_s"]))
    path = root / longest["path"]
    segments = json.loads(path.with_name(f"{path.stem}.segments.json").read_text("utf-8"))
    kept = [segment for segment in segments if segment["end"] <= 60 * minutes]
    if not kept:
        raise SpeechMissing(f"no utterance of the long recording ends within {minutes:g} minutes")
    audio = read_audio(path, limit_s=kept[-1]["end"])
    with tempfile.TemporaryDirectory(prefix="hark-bench-") as folder:
        whole, start = Path(folder) / "recording.wav", Path(folder) / "start.wav"
        _write_wav(whole, audio)
        _write_wav(start, audio[: 10 * SAMPLE_RATE])
        text = " ".join(segment["text"] for segment in kept)
        yield Recording(whole, start, audio.size / SAMPLE_RATE, text, longest["language"])


def _write_wav(path: Path, audio: Pcm16) -> None:
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(audio.tobytes())


def file_by_hark(plan: Plan, recording: Recording) -> tuple[File, dict[str, Any]]:
    """Over HTTP, from the first byte of the request to the answer."""
    try:
        with hark(plan) as target:
            url = target.url.replace("ws://", "http://").removesuffix(HARK_PATH) + _FILES_PATH
            _post(url, recording.warm_up, recording.language)
            began_s = time.monotonic()
            text = _post(url, recording.path, recording.language)
            taken_s = time.monotonic() - began_s
            command = f"{shown_command(target.command)}, then POST {_FILES_PATH}"
            record = {"server": HARK, "command": command, "text": text}
    except (ServerFailed, httpx.HTTPError) as failed:
        return _failed_file(HARK, str(failed))
    return File(HARK, recording.audio_s, taken_s, score(recording.text, text, recording.language)), record


def _post(url: str, path: Path, language: str) -> str:
    with httpx.Client(trust_env=False, timeout=_FILE_TIMEOUT_S) as http, path.open("rb") as data:
        answer = http.post(url, files={"file": (path.name, data)}, data={"language": language, "model": "whisper-1"})
        answer.raise_for_status()
        return str(answer.json()["text"])


def file_by_pipeline(plan: Plan, recording: Recording, beam_size: str) -> tuple[File, dict[str, Any]]:
    """faster-whisper's batched pipeline, in a process of its own environment."""
    name = f"{FILES_PEER} batched" + ("" if beam_size == "default" else f", beam {beam_size}")
    command = [
        str(environments.programs(FILES_PEER) / "python"), str(_ROOT / "bench" / "peers" / "batched.py"),
        str(plan.weights), str(recording.path), str(recording.warm_up), recording.language, beam_size,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=plan.environment, capture_output=True, text=True, timeout=_FILE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        return _failed_file(name, str(failed))
    except subprocess.CalledProcessError as failed:
        return _failed_file(name, "\n".join(failed.stderr.strip().splitlines()[-3:]))
    said = json.loads(done.stdout.splitlines()[-1])
    file = File(name, recording.audio_s, said["seconds"], score(recording.text, said["text"], recording.language))
    return file, {"server": name, "command": shown_command(command)} | said


def _failed_file(name: str, problem: str) -> tuple[File, dict[str, Any]]:
    print(f"bench.compare: {name}: {problem}", file=sys.stderr)
    return File(name, problem=problem), {"server": name, "problem": problem}


# Reporting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Results:
    """Rows in the order in which they were measured, and what else is written down of each server."""

    live: Sequence[Live]
    files: Sequence[File]
    records: Sequence[Mapping[str, Any]]
    without_files: str


def document(
    results: Results, plan: Plan, before: Mapping[str, Any], speech: str, argv: Sequence[str]
) -> dict[str, Any]:
    """All of it, for the JSON."""
    live = [live_figures(row) for row in results.live]
    files = [file_figures(row) for row in results.files]
    return {
        "command": shlex.join(["python", "-m", "bench.compare", *argv]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": before,
        "versions": {HARK: versions()} | _peer_versions(results),
        "settings": {
            "speech": speech,
            "seconds_of_speech": [round(track.speech_s, 1) for track in plan.tracks],
            "message_ms": plan.message_ms,
            "language": plan.language,
            "weights": shown_command([str(plan.weights)]),
            "environment": {"OMP_NUM_THREADS": str(plan.threads), "HF_HUB_OFFLINE": "1"},
            "hark": {name: os.environ[name] for name in _HARK_SETTINGS if name in os.environ},
        },
        "live": live,
        "live_ratios": {
            str(count): ratios([row for row in live if row["streams"] == count], LIVE_FIGURES) for count in plan.streams
        },
        "files": files,
        "file_ratios": ratios(files, FILE_FIGURES),
        "not_run": NOT_RUN | ({"files": results.without_files} if results.without_files else {}),
        "servers": list(results.records),
    }


def _peer_versions(results: Results) -> dict[str, Mapping[str, str]]:
    played = {row.server for row in results.live}
    asked = {of.name: of.packages for of in LIVE_PEERS.values() if of.name in played}
    if any(file.server.startswith(FILES_PEER) for file in results.files):
        asked[FILES_PEER] = _FILES_PACKAGES
    found: dict[str, Mapping[str, str]] = {}
    for name, packages in asked.items():
        with contextlib.suppress(SetupFailed):  # it stands among the rows already
            found[name] = environments.versions(name, packages)
    return found


def show(results: Mapping[str, Any]) -> None:
    """On the terminal: tables, then who is better at what."""
    host = results["machine"]
    print(f"{results['settings']['speech']}; {host['cpu']}, {host['usable_cores']} cores, as many threads")
    print(f"load average before: {host['load_average_before'][0]}\n")
    if results["live"]:
        print(live_table(results["live"]), end="\n\n")
    if results["files"]:
        print(file_table(results["files"]), end="\n\n")
    for count, found in results["live_ratios"].items():
        if found:
            print("\n".join(ratio_lines(f"streams at once: {count}", found, LIVE_FIGURES)), end="\n\n")
    if results["file_ratios"]:
        print("\n".join(ratio_lines("files", results["file_ratios"], FILE_FIGURES)), end="\n\n")
    for name, reason in results["not_run"].items():
        print(f"not run: {name}: {reason}")


# The command --------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").splitlines()[0])
    everyone = [*LIVE_PEERS, FILES_PEER]
    parser.add_argument("--peers", type=_names(everyone), default=everyone, help=f"of {','.join(everyone)} (all)")
    parser.add_argument("--streams", type=counts, default=[1, 4], help="how many at once, one run each: 1,4")
    parser.add_argument("--seconds", type=positive, default=48.0, help="least length of every stream's track (48)")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=["read-en"], help="sets of the corpus")
    parser.add_argument("--seed", type=int, default=1, help="chooses the recordings and pauses")
    parser.add_argument("--message-ms", type=int, choices=range(10, 201), default=32, metavar="MS")
    parser.add_argument("--weights", type=Path, help="a directory in CTranslate2's layout (else `hark fetch base`)")
    parser.add_argument("--file-minutes", type=positive, default=10.0, help="of the long recording (10)")
    parser.add_argument("--no-files", action="store_true", help="live streams only")
    parser.add_argument("--no-live", action="store_true", help="the long recording only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the delays")
    parser.add_argument("--setup-only", action="store_true", help="install the peers and stop")
    return parser.parse_args(argv)


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
        return names

    return parse


def fetched_weights() -> Path:
    """The base model's directory, fetched if it is not there. Raises SetupFailed."""
    command = [sys.executable, "-m", "app", "fetch", "base"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupFailed(f"hark fetch base: {done.stderr.strip()}")
    return Path(done.stdout.strip().splitlines()[-1].split("\t")[-1])


def make_plan(asked: argparse.Namespace) -> tuple[Plan, str]:
    """Raises SpeechMissing, SetupFailed."""
    speech, source = recordings(asked.sets, asked.seed)
    tracks = deal(source, max(asked.streams), asked.seconds, asked.seed)
    [warm_up] = deal(source, 1, _WARM_UP_S, asked.seed)
    languages = {spoken.language for track in tracks for spoken in track.utterances}
    weights = fetched_weights() if asked.weights is None else asked.weights.resolve()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    language = languages.pop() if len(languages) == 1 else None
    return Plan(tracks, warm_up, asked.streams, asked.message_ms, weights, language, threads), speech


def set_up_all(names: Sequence[str]) -> dict[str, str]:
    """Install the peers; those that could not be, with the reasons."""
    wanted = {of.name: of.requirements for key, of in LIVE_PEERS.items() if key in names}
    if FILES_PEER in names:
        wanted[FILES_PEER] = _FILES_REQUIREMENTS
    problems: dict[str, str] = {}
    for name, requirements in wanted.items():
        try:
            environments.set_up(name, requirements)
        except SetupFailed as failed:
            print(f"bench.compare: {name}: {failed}", file=sys.stderr)
            problems[name] = f"not installed: {failed}"
    return problems


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    # Before anything is measured: installing takes all cores and the network.
    not_installed = set_up_all(asked.peers)
    if asked.setup_only:
        return EXIT_SERVICE_FAILED if not_installed else 0
    before = machine()
    try:
        plan, speech = make_plan(asked)
    except SpeechMissing as missing:
        print(f"bench.compare: {missing}", file=sys.stderr)
        return EXIT_NO_SPEECH
    except SetupFailed as failed:
        print(f"bench.compare: {failed}", file=sys.stderr)
        return EXIT_SERVICE_FAILED
    results = document(_measure(asked, plan, not_installed), plan, before, speech, argv)
    show(results)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if asked.plot is not None:
        asked.plot.write_text(picture(results["live"], "Seconds after the end of speech"), "utf-8")
    return exit_code(results)


def _measure(asked: argparse.Namespace, plan: Plan, not_installed: Mapping[str, str]) -> Results:
    live: list[Live] = []
    files: list[File] = []
    records: list[Mapping[str, Any]] = []
    without_files = ""
    if not asked.no_live:
        servers = [(HARK, hark(plan))]
        servers += [(of.name, peer(of, plan)) for key, of in LIVE_PEERS.items() if key in asked.peers]
        for name, server in servers:
            problem = not_installed.get(name)
            rows, record = race(name, server, plan) if problem is None else _not_raced(name, problem, plan)
            live += rows
            records.append(record)
    if not asked.no_files:
        try:
            with long_recording(asked.file_minutes) as recording:
                measured = [file_by_hark(plan, recording)]
                if FILES_PEER in not_installed:
                    measured.append(_failed_file(FILES_PEER, not_installed[FILES_PEER]))
                elif FILES_PEER in asked.peers:
                    measured += [file_by_pipeline(plan, recording, beam) for beam in ("default", "1")]
            files += [file for file, _ in measured]
            records += [record for _, record in measured]
        except SpeechMissing as missing:
            without_files = str(missing)
    return Results(live, files, records, without_files)


def exit_code(results: Mapping[str, Any]) -> int:
    """Hark must have been measured wherever it was to be, and one peer beside it."""
    rows = [*results["live"], *results["files"]]
    measured = [row["server"] for row in rows if "utterances" in row or "speed" in row]
    if any(row["server"] == HARK and row["problem"] for row in rows if "INVALID" not in row["problem"]):
        return EXIT_SERVICE_FAILED
    if HARK not in measured or (len(set(measured)) < 2 and len({row["server"] for row in rows}) > 1):
        return EXIT_SERVICE_FAILED
    return EXIT_INVALID if any("INVALID" in row["problem"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
