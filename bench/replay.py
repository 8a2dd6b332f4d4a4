"""How Hark feels: recorded speech played at the pace of speech over the public WebSocket, and what came back when.

    python -m bench.replay [--streams 1,4 | --largest 64] [--seconds 48] [--sets read-en] [--json FILE]

Starts a service of its own on a free port unless --url names one. bench/README.md says what each figure means. Exit
codes: 0 measured; 1 the service failed; 2 there is no speech to play; 3 measured, but the client itself was late, so
that the figures are invalid.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.corpus import SpeechMissing, recordings
from bench.measures import Measures, Received, measure, percentile
from bench.player import Played, PlayFailed, play
from bench.process import ServerFailed
from bench.server import Server, started
from bench.tracks import Track, deal

EXIT_SERVICE_FAILED, EXIT_NO_SPEECH, EXIT_INVALID = 1, 2, 3
LATE_LIMIT_S = 0.05  # p99 of the client's own lateness; beyond it the figures say more about the client
PATIENCE_S = 45.0
_SAMPLE_INTERVAL_S = 0.5
# What of the environment changes the figures of a service that is started here; other settings are nobody's business.
_SERVICE_SETTINGS = (
    "HARK_ENGINE", "HARK_MODEL", "HARK_DEVICE", "HARK_COMPUTE_TYPE", "HARK_WORKERS", "HARK_THREADS", "HARK_MARGIN_S",
    "HARK_FULL_WINDOW", "HARK_PAUSE_MS", "HARK_PARTIAL_INTERVAL_MS", "HARK_MAX_UTTERANCE_MS",
)  # fmt: skip
_PACKAGES = ("hark", "numpy", "onnxruntime", "ctranslate2", "faster-whisper", "tokenizers", "uvicorn", "websockets")


@dataclass(frozen=True, slots=True)
class Load:
    """What the service's processes used while the streams played, by part: % of one core, and the most MiB."""

    cpu_percent: Mapping[str, float]
    rss_mib: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """So many streams at once."""

    tracks: Sequence[Track]
    played: Sequence[Played]
    measures: Measures
    load: Load | None
    wall_s: float

    @property
    def late_s(self) -> float:
        return percentile([late for played in self.played for late in played.late_s], 99) or 0.0

    @property
    def is_valid(self) -> bool:
        return self.late_s <= LATE_LIMIT_S

    @property
    def errors(self) -> list[str]:
        return [played.error for played in self.played if played.error]


# Measuring ----------------------------------------------------------------------------------------------------------


async def run(url: str, tracks: Sequence[Track], asked: argparse.Namespace, server: Server | None) -> Run:
    """Play the tracks at once. Raises PlayFailed."""
    began_s = time.monotonic()
    playing = asyncio.create_task(
        play(url, tracks, parameters=asked.parameters, message_ms=asked.message_ms, patience_s=PATIENCE_S)
    )
    load = None if server is None else await _watch(server, playing)
    played = await playing
    measures = sum((measure(t, p.received) for t, p in zip(tracks, played, strict=True)), Measures())
    return Run(tracks, played, measures, load, time.monotonic() - began_s)


async def _watch(server: Server, playing: asyncio.Task[list[Played]]) -> Load | None:
    """CPU and memory from now until the streams are done; None where the service died."""
    try:
        began_s, before = time.monotonic(), server.usage()
        most = {part: usage.rss_bytes for part, usage in before.items()}
        while not playing.done():
            await asyncio.wait([playing], timeout=_SAMPLE_INTERVAL_S)
            after = server.usage()
            most = {part: max(most[part], usage.rss_bytes) for part, usage in after.items()}
    except psutil.NoSuchProcess:
        return None
    wall_s = time.monotonic() - began_s
    cpu = {part: 100 * max(0.0, after[part].cpu_s - usage.cpu_s) / wall_s for part, usage in before.items()}
    return Load(cpu, {part: size / 2**20 for part, size in most.items()})


# Reporting ----------------------------------------------------------------------------------------------------------


def summary(r: Run) -> dict[str, Any]:
    """A run's figures. Times in seconds, shares in [0, 1], None where there was nothing to measure."""
    m = r.measures
    never = sum(outcome.final_s is None for outcome in m.outcomes)
    return {
        "streams": len(r.tracks),
        "utterances": len(m.outcomes),
        "speech_s": round(m.speech_s, 1),
        "first_text_s": _spread([o.first_text_s for o in m.outcomes]),
        "word_shown_s": _spread([word.delay_s for word in m.words]),
        "words_shown_by_partial": _share(sum(word.by_partial for word in m.words), len(m.words)),
        "last_word_shown_s": _spread([o.last_word_s for o in m.outcomes]),
        "final_after_speech_s": _spread([o.final_s for o in m.outcomes]),
        "final_after_detected_end_s": _spread([o.final_detected_s for o in m.outcomes]),
        "never_final": _share(never, len(m.outcomes)),
        "failed": m.failed,
        "wer": None if m.score.rate is None else round(m.score.rate, 4),
        "reference_words": m.score.units,
        "substitutions": m.score.substitutions,
        "deletions": m.score.deletions,
        "insertions": m.score.insertions,
        "retractions": len(m.retractions),
        "partials_per_speech_s": _share(m.partials, m.speech_s),
        "update_gap_s": _spread(m.update_gaps_s) | {"max": round(max(m.update_gaps_s, default=0.0), 3)},
        "max_lag_s": round(m.max_lag_s, 3),
        "done_after_audio_s": _last(r),
        "gateway_cpu_percent": None if r.load is None else round(r.load.cpu_percent["gateway"], 1),
        "engine_cpu_percent": None if r.load is None else round(r.load.cpu_percent["engine"], 1),
        "gateway_rss_mib": None if r.load is None else round(r.load.rss_mib["gateway"]),
        "engine_rss_mib": None if r.load is None else round(r.load.rss_mib["engine"]),
        "client_late_s": {
            "p99": round(r.late_s, 4),
            "max": round(max((late for p in r.played for late in p.late_s), default=0.0), 4),
        },
        "service_blocked_client_s": round(max(p.blocked_s for p in r.played), 3),
        "valid": r.is_valid,
        "errors": r.errors,
    }


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    found = {"p50": percentile(known, 50), "p95": percentile(known, 95)}
    return {name: None if value is None else round(value, 3) for name, value in found.items()}


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _last(r: Run) -> float | None:
    """How long after its last sample the slowest stream was done; None if one never was."""
    after = [p.ended_s and p.ended_s - track.duration_s for p, track in zip(r.played, r.tracks, strict=True)]
    return None if None in after else round(max(value or 0.0 for value in after), 3)


def table(summaries: Sequence[Mapping[str, Any]], pause_ms: object) -> str:
    """The figures, a column for each number of streams."""
    rows = [
        ("streams", [str(s["streams"]) for s in summaries]),
        ("utterances / seconds of speech", [f"{s['utterances']} / {s['speech_s']:.0f}" for s in summaries]),
        ("first text after start of speech, s, p50 / p95", [_pair(s["first_text_s"]) for s in summaries]),
        ("word spoken to word shown, s, p50 / p95", [_pair(s["word_shown_s"]) for s in summaries]),
        ("words first shown by a partial", [_percent(s["words_shown_by_partial"]) for s in summaries]),
        ("last word shown after end of speech, s, p50 / p95", [_pair(s["last_word_shown_s"]) for s in summaries]),
        (f"final after end of speech (pause {pause_ms} ms), s", [_pair(s["final_after_speech_s"]) for s in summaries]),
        ("final after the end that the service found, s", [_pair(s["final_after_detected_end_s"]) for s in summaries]),
        ("utterances never final / failed", [f"{_percent(s['never_final'])} / {s['failed']}" for s in summaries]),
        ("WER of the finals (S / D / I)", [_wer(s) for s in summaries]),
        ("committed words taken back", [str(s["retractions"]) for s in summaries]),
        ("partials a second of speech", [_number(s["partials_per_speech_s"]) for s in summaries]),
        ("screen still while speaking, s, p95 / max", [_gap(s["update_gap_s"]) for s in summaries]),
        ("most lag / done after the audio, s", [_keeping_up(s) for s in summaries]),
        ("CPU, % of a core, gateway / engine", [_parts(s, "cpu_percent") for s in summaries]),
        ("most memory, MiB, gateway / engine", [_parts(s, "rss_mib") for s in summaries]),
        ("client late, ms, p99 / max", [_late(s["client_late_s"]) for s in summaries]),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(name.ljust(width) + "".join(cell.rjust(22) for cell in cells).rstrip() for name, cells in rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _pair(spread: Mapping[str, float | None]) -> str:
    return f"{_number(spread['p50'])} / {_number(spread['p95'])}"


def _gap(spread: Mapping[str, float | None]) -> str:
    return f"{_number(spread['p95'])} / {_number(spread['max'])}"


def _wer(s: Mapping[str, Any]) -> str:
    return f"{_percent(s['wer'])} ({s['substitutions']}/{s['deletions']}/{s['insertions']})"


def _keeping_up(s: Mapping[str, Any]) -> str:
    done = "never" if s["done_after_audio_s"] is None else f"{s['done_after_audio_s']:.2f}"
    return f"{s['max_lag_s']:.2f} / {done}"


def _parts(s: Mapping[str, Any], figure: str) -> str:
    gateway, engine = s[f"gateway_{figure}"], s[f"engine_{figure}"]
    return "-" if gateway is None else f"{gateway:g} / {engine:g}"


def _late(late: Mapping[str, float]) -> str:
    return f"{1_000 * late['p99']:.0f} / {1_000 * late['max']:.0f}"


def machine() -> dict[str, Any]:
    """Where this ran, and how busy it was before: figures from a loaded machine mean little."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(psutil.Process().cpu_affinity() or ()) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        root = Path(__file__).parent
        found["commit"] = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    return found


def details(r: Run) -> list[dict[str, Any]]:
    """Every stream's utterances and finals, to look into a figure."""
    pairs = zip(r.tracks, r.played, strict=True)
    return [_stream_details(track, played, measure(track, played.received)) for track, played in pairs]


def _stream_details(track: Track, played: Played, measures: Measures) -> dict[str, Any]:
    return {
        "duration_s": round(track.duration_s, 3),
        "error": played.error,
        "retractions": list(measures.retractions),
        "utterances": [
            {
                "recording": o.spoken.recording,
                "text": o.spoken.text,
                "start_s": round(o.spoken.start_s, 3),
                "end_s": round(o.spoken.end_s, 3),
                "first_text_s": o.first_text_s and round(o.first_text_s, 3),
                "last_word_s": o.last_word_s and round(o.last_word_s, 3),
                "final_s": o.final_s and round(o.final_s, 3),
            }
            for o in measures.outcomes
        ],
        "finals": [_final_details(r) for r in played.received if r.kind in ("final", "failed")],
    }


def _final_details(r: Received) -> dict[str, Any]:
    text = r.text if r.kind == "final" else None
    return {"at_s": round(r.at_s, 3), "start_s": r.start_s, "end_s": r.end_s, "text": text}


# How many fit --------------------------------------------------------------------------------------------------------


def holds(figures: Mapping[str, Any], pause_ms: int) -> bool:
    """Whether the streams of a run were served in time: nearly all finals and partials, and every utterance.

    p95 of the finals within the pause and 1 s, p95 of the time that the screen stands still within 3 s.
    """
    final_s, gap_s = figures["final_after_speech_s"]["p95"], figures["update_gap_s"]["p95"]
    if final_s is None or figures["errors"] or figures["never_final"]:
        return False
    return bool(final_s <= pause_ms / 1_000 + 1.0 and (gap_s is None or gap_s <= 3.0))


def search(limit: int) -> Generator[int, bool, int]:
    """Yields how many streams to try next, is sent whether they held; returns the most that did, 0 for none.

    Doubles until a number does not hold, then halves what is between.
    """
    good, bad, count = 0, limit + 1, 1
    while good + 1 < bad:
        if (yield count):
            good = count
        else:
            bad = count
        count = min(2 * good, limit) if bad > limit else (good + bad) // 2
    return good


# The command --------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="the /v1/stream of a service that runs already")
    where.add_argument("--start", action="store_true", help="start a service for the measurement (the default)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--streams", type=counts, default=[1, 4], help="how many at once, one run each: 1,4")
    how_many.add_argument("--largest", type=int, metavar="N", help="find the most, up to N, that are served in time")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=positive, default=48.0, help="least length of every stream's track (48)")
    length.add_argument("--minutes", type=positive, help="the same in minutes")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=["read-en"], help="sets of the corpus")
    parser.add_argument("--seed", type=int, default=1, help="chooses the recordings and pauses")
    parser.add_argument("--message-ms", type=int, choices=range(10, 201), default=32, metavar="MS")
    parser.add_argument("--parameter", type=_parameter, action="append", default=[], help="of the stream: pause_ms=300")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    asked = parser.parse_args(argv)
    asked.parameters = dict(asked.parameter)
    asked.seconds = asked.seconds if asked.minutes is None else 60 * asked.minutes
    return asked


def counts(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError("streams are at least 1")
    return found


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("NAME=VALUE is expected")
    return name, value


@contextlib.contextmanager
def _service(asked: argparse.Namespace) -> Iterator[tuple[str, Server | None]]:
    if asked.url is not None:
        yield asked.url, None
        return
    room = {"HARK_MAX_SESSIONS": str(max(64, asked.largest or 0, *asked.streams))}
    with started(room | dict(os.environ)) as server:
        yield server.url, server


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    before = machine()
    try:
        speech, source = recordings(asked.sets, asked.seed)
        tracks = deal(source, asked.largest or max(asked.streams), asked.seconds, asked.seed)
    except SpeechMissing as missing:
        print(f"bench.replay: {missing}", file=sys.stderr)
        return EXIT_NO_SPEECH
    runs: list[Run] = []
    failure = ""
    try:
        with _service(asked) as (url, server):
            for made in _runs(url, tracks, asked, server):
                runs.append(made)  # noqa: PERF402 - so that what was measured is kept where the next run fails
    except (ServerFailed, PlayFailed) as failed:
        failure = str(failed)
    code = _report(asked, argv, speech, before, runs) if runs else EXIT_SERVICE_FAILED
    if failure:
        print(f"bench.replay: {failure}", file=sys.stderr)
        return EXIT_SERVICE_FAILED
    return code


def _runs(url: str, tracks: Sequence[Track], asked: argparse.Namespace, server: Server | None) -> Iterator[Run]:
    """One run for each number of streams, or as many as it takes to find the largest. Raises PlayFailed."""
    if not asked.largest:
        yield from (asyncio.run(run(url, tracks[:count], asked, server)) for count in asked.streams)
        return
    searching = search(asked.largest)
    count = next(searching)
    with contextlib.suppress(StopIteration):
        while True:
            try:
                made = asyncio.run(run(url, tracks[:count], asked, server))
            except PlayFailed as refused:
                print(f"{count} streams: {refused}")
                count = searching.send(False)
                continue
            yield made
            pause_ms = int(made.played[0].config["config"]["pause_ms"])
            count = searching.send(holds(summary(made), pause_ms))


def _report(
    asked: argparse.Namespace, argv: Sequence[str], speech: str, before: Mapping[str, Any], runs: Sequence[Run]
) -> int:
    config = runs[0].played[0].config
    summaries = [summary(r) for r in runs]
    document = {
        "command": shlex.join(["python", "-m", "bench.replay", *argv]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": before,
        "versions": versions(),
        "settings": {
            "speech": speech,
            "seed": asked.seed,
            "seconds": asked.seconds,
            "message_ms": asked.message_ms,
            "model": config["model"],
            "stream": config["config"],
            "service": {name: os.environ[name] for name in _SERVICE_SETTINGS if name in os.environ},
        },
        "runs": [figures | {"details": details(r)} for figures, r in zip(summaries, runs, strict=True)],
    }
    print(f"{speech}; model {config['model']}; {before['cpu']}, {before['usable_cores']} cores")
    print(f"load average before: {before['load_average_before'][0]}\n")
    print(table(summaries, config["config"]["pause_ms"]))
    if asked.largest:
        held = [s["streams"] for s in summaries if holds(s, int(config["config"]["pause_ms"]))]
        print(f"\nserved in time: {max(held, default=0)} streams")
    for r in runs:
        for line in [*r.measures.retractions[:10], *r.errors]:
            print(f"{len(r.tracks)} streams: {line}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if any(r.errors for r in runs):
        return EXIT_SERVICE_FAILED
    if not all(r.is_valid for r in runs):
        print(f"\nINVALID: the client itself was late (p99 over {1_000 * LATE_LIMIT_S:.0f} ms); use a quieter machine")
        return EXIT_INVALID
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
