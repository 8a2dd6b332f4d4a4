"""Whether Hark stays as it was: streams that come and go for half an hour, and what each minute was like.

    python -m bench.soak [--minutes 30] [--streams 4] [--sets read-en] [--json FILE] [--plot FILE.svg]

So many places, in each of which one stream after the other plays a track of 15 to 60 s at the pace of speech and ends;
every fourth is cut off in the middle instead, as a client that vanishes. Exit codes as in bench.replay.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.charts import Chart, draw
from bench.corpus import Recording, SpeechMissing, recordings
from bench.measures import measure, percentile
from bench.player import Played, PlayFailed, play
from bench.process import ServerFailed
from bench.replay import EXIT_NO_SPEECH, EXIT_SERVICE_FAILED, machine, versions
from bench.server import Server, started
from bench.tracks import Track, build_track

_SAMPLE_INTERVAL_S = 5.0
_SHORTEST_S, _LONGEST_S = 15.0, 60.0
_PATIENCE_S = 60.0


@dataclass(slots=True)
class Minute:
    """What ended or was seen in one minute."""

    finals_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    missing: int = 0
    streams: int = 0
    refused: int = 0
    samples: list[Mapping[str, float]] = field(default_factory=list)

    def figures(self) -> dict[str, float | int | None]:
        most = {name: max(sample[name] for sample in self.samples) for name in (self.samples or [{}])[0]}
        return {
            "streams": self.streams,
            "refused": self.refused,
            "finals": len(self.finals_s),
            "never_final": self.missing,
            **{f"final_p{p}_s": percentile(self.finals_s, p) for p in (50, 95, 99)},
            "max_lag_s": max(self.lags_s, default=None),
            **most,
        }


class Soak:
    """The run: its places, and what they have seen."""

    def __init__(self, server: Server, source: Iterator[Recording], asked: argparse.Namespace) -> None:
        self._server = server
        self._source = source
        self._asked = asked
        self._rng = random.Random(asked.seed)
        self._began_s = time.monotonic()
        self.minutes: list[Minute] = []
        self.errors: list[str] = []

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._asked.streams):
                    group.create_task(self._place())
        finally:
            watching.cancel()

    @property
    def _minute(self) -> Minute:
        number = int((time.monotonic() - self._began_s) // 60)
        while len(self.minutes) <= number:
            self.minutes.append(Minute())
        return self.minutes[number]

    async def _place(self) -> None:
        end_s = self._began_s + 60 * self._asked.minutes
        while time.monotonic() < end_s:
            await asyncio.sleep(self._rng.uniform(0.0, 4.0))
            seconds = self._rng.uniform(_SHORTEST_S, _LONGEST_S)
            track = build_track(self._source, seconds, self._rng.randrange(2**30))
            vanishes = self._rng.random() < 0.25
            played = await self._play(track, cut_s=self._rng.uniform(3, track.duration_s) if vanishes else None)
            if played is not None:
                self._note(track, played)

    async def _play(self, track: Track, cut_s: float | None) -> Played | None:
        playing = play(self._server.url, [track], parameters={}, message_ms=32, patience_s=_PATIENCE_S)
        try:
            async with asyncio.timeout(cut_s):
                return (await playing)[0]
        except TimeoutError:
            return None
        except PlayFailed:  # no room: another try after the place's usual pause
            self._minute.refused += 1
            return None

    def _note(self, track: Track, played: Played) -> None:
        measures = measure(track, played.received)
        minute = self._minute
        minute.streams += 1
        minute.lags_s.append(measures.max_lag_s)
        minute.finals_s += [o.final_s for o in measures.outcomes if o.final_s is not None]
        minute.missing += sum(o.final_s is None for o in measures.outcomes)
        if played.error:
            self.errors.append(played.error)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._minute.samples.append(_seen(self._server.pid))
            await asyncio.sleep(_SAMPLE_INTERVAL_S)


def _seen(pid: int) -> dict[str, float]:
    """Memory, threads and open files of the gateway and of the engine below it."""
    gateway = psutil.Process(pid)
    engine = gateway.children(recursive=True)
    return {
        "gateway_mib": gateway.memory_info().rss / 2**20,
        "engine_mib": sum(process.memory_info().rss for process in engine) / 2**20,
        "threads": gateway.num_threads() + sum(process.num_threads() for process in engine),
        "open_files": gateway.num_fds() + sum(process.num_fds() for process in engine),
    }


# Reporting ----------------------------------------------------------------------------------------------------------

_ROWS = (
    ("final after end of speech, s", ("final_p50_s", "final_p95_s", "final_p99_s")),
    ("most lag, s", ("max_lag_s",)),
    ("memory, MiB", ("gateway_mib", "engine_mib")),
    ("threads and files", ("threads", "open_files")),
)


def plot(minutes: Sequence[Mapping[str, Any]]) -> str:
    """An SVG with a chart for each kind of figure, over the minutes."""
    x = list(range(1, len(minutes) + 1))
    charts = [
        Chart(title, "minute", x, {name: [m.get(name) for m in minutes] for name in names}) for title, names in _ROWS
    ]
    return draw(charts)


def _table(minutes: Sequence[Mapping[str, Any]]) -> str:
    names = ["streams", "refused", "finals", "never_final", *(name for _, names in _ROWS for name in names)]
    lines = ["minute  " + "  ".join(name.rjust(11) for name in names)]
    for number, minute in enumerate(minutes):
        cells = [minute.get(name) for name in names]
        shown = ["-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"{number:6}  " + "  ".join(cell.rjust(11) for cell in shown))
    return "\n".join(lines)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=4, help="at once")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=["read-en"], help="sets of the corpus")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    before = machine()
    try:
        speech, source = recordings(asked.sets, asked.seed)
    except SpeechMissing as missing:
        print(f"bench.soak: {missing}", file=sys.stderr)
        return EXIT_NO_SPEECH
    try:
        with started(dict(os.environ)) as server:
            soak = Soak(server, source, asked)
            asyncio.run(soak.run())
    except ServerFailed as failed:
        print(f"bench.soak: {failed}", file=sys.stderr)
        return EXIT_SERVICE_FAILED
    minutes = [minute.figures() for minute in soak.minutes]
    print(f"{speech}; {asked.streams} streams at once; {before['cpu']}, {before['usable_cores']} cores\n")
    print(_table(minutes))
    for error in soak.errors:
        print(error)
    if asked.json is not None:
        document = {"machine": before, "versions": versions(), "minutes": minutes, "errors": soak.errors}
        asked.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if asked.plot is not None:
        asked.plot.write_text(plot(minutes), "utf-8")
    return EXIT_SERVICE_FAILED if soak.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
