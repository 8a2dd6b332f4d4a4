"""What the vLLM engine takes on this machine's device, beside what the device's own limits would make it take.

    HARK_ENGINE_PYTHON=.venv-vllm/bin/python python -m bench.gpu [--seconds 30] [--streams 8,16,32] [--limit-s 0.5]

Runs in the gateway's environment; the model is HARK_MODEL. Prints one table in Markdown. On a CPU the same in a reduced
form, to see that it works. Exit codes: 0 measured; 1 the engine or the service failed; 2 there is no speech to play.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from app.main import weights_config
from app.settings import Settings, load_settings
from bench import roofline
from bench.corpus import SpeechMissing, recordings
from bench.gpu_engine import Figures
from bench.player import PlayFailed
from bench.process import ServerFailed
from bench.replay import arguments as replay_arguments
from bench.replay import run, summary
from bench.server import started
from bench.tracks import deal
from models import weights
from models.catalog import Layout
from models.silence_tail import SAMPLES_PER_POSITION
from models.vllm_settings import ModelShape
from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16

EXIT_FAILED, EXIT_NO_SPEECH = 1, 2
START_TIMEOUT_S = 900.0  # a first start compiles every length of the encoder
ENGINE_TIMEOUT_S = START_TIMEOUT_S + 300.0
GPU_STREAMS, CPU_STREAMS = (8, 16, 32, 64, 128), (1,)
GPU_RECORDINGS, CPU_RECORDINGS = 256, 4
_ROOT = Path(__file__).resolve().parents[1]

Row = tuple[str, str, str, str]


class EngineFailed(Exception):
    """bench.gpu_engine ended without figures."""


@dataclass(frozen=True, slots=True)
class Streams:
    """One number of paced streams. ``final_s``: p95 from the end that the service found to the final; None: none."""

    count: int
    final_s: float | None
    never_final: float
    is_valid: bool

    def within(self, limit_s: float) -> bool:
        return self.is_valid and self.never_final == 0 and self.final_s is not None and self.final_s <= limit_s


# Measuring ----------------------------------------------------------------------------------------------------------


def engine_figures(model_dir: Path, interpreter: str, clips: Sequence[Pcm16]) -> Figures:
    """bench.gpu_engine in the engine's interpreter. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="hark-bench-") as folder:
        given, made = Path(folder) / "recordings.npz", Path(folder) / "figures.json"
        np.savez(given, *clips)
        command = [interpreter, "-m", "bench.gpu_engine", str(model_dir), str(given), str(made)]
        try:
            subprocess.run(command, cwd=_ROOT, stdout=sys.stderr, timeout=ENGINE_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise EngineFailed(str(error)) from error
        return Figures(**json.loads(made.read_text("utf-8")))


def streams_figures(counts: Sequence[int], seconds: float, limit_s: float, settings: Settings) -> list[Streams]:
    """So many streams at once, one number after the other, until one is too many.

    Raises ServerFailed, PlayFailed, SpeechMissing.
    """
    asked = replay_arguments(["--seconds", str(seconds)])
    _, source = recordings(asked.sets, asked.seed)
    tracks = deal(source, max(counts), seconds, asked.seed)
    environment = {
        **os.environ,
        "HARK_ENGINE": "vllm",
        "HARK_MODEL": settings.model,
        "HARK_ENGINE_PYTHON": settings.engine_python,
        "HARK_START_TIMEOUT_S": str(START_TIMEOUT_S),
        "HARK_MAX_SESSIONS": str(max(counts)),
    }
    found: list[Streams] = []
    with started(environment, START_TIMEOUT_S) as server:
        for count in counts:
            figures = summary(asyncio.run(run(server.url, tracks[:count], asked, server)))
            found.append(streams_of(count, figures))
            if not found[-1].within(limit_s):
                break
    return found


def streams_of(count: int, figures: dict[str, Any]) -> Streams:
    """What of bench.replay's figures decides. A stream that ended early counts as one without finals."""
    never = 1.0 if figures["errors"] else figures["never_final"] or 0.0
    return Streams(count, figures["final_after_detected_end_s"]["p95"], never, figures["valid"])


# Reporting ----------------------------------------------------------------------------------------------------------


def engine_rows(figures: Figures, shape: ModelShape) -> list[Row]:
    """What was measured, the least that it could take, and the share that this is of it."""
    peak = roofline.peak_of(figures.device)
    rows: list[Row] = [("engine ready after", f"{figures.start_s:.0f} s", "", "")]
    for positions, encode_s in figures.encoder:
        work = roofline.encoder(shape, positions, figures.number_bytes)
        seconds = positions * SAMPLES_PER_POSITION / SAMPLE_RATE
        rows.append(_timed(f"encoder, a window of {seconds:g} s", encode_s, peak, work))
    rows.append(("first token, states kept", _ms(figures.prompt_s), "", ""))
    for batch, step_s in figures.step:
        work = roofline.decoder_step(
            shape, batch, figures.step_tokens, figures.number_bytes, figures.cache_number_bytes
        )
        rows.append(_timed(f"decoder step, {batch} at once", step_s, peak, work))
    what = f"{figures.recordings} recordings, {figures.audio_s:.0f} s, {figures.at_once} at once"
    rows.append((f"RTFx, {what}", f"{figures.audio_s / figures.wall_s:.1f}", "", ""))
    return rows


def _timed(what: str, took_s: float, peak: roofline.Peak | None, work: roofline.Work) -> Row:
    if peak is None:
        return what, _ms(took_s), "not known", "-"
    least_s = peak.seconds(work)
    # Less than the clock can tell apart gives no share.
    return what, _ms(took_s), _ms(least_s), f"{100 * least_s / took_s:.0f} %" if took_s > 0 else "-"


def _ms(seconds: float) -> str:
    return f"{1_000 * seconds:.2f} ms"


def stream_rows(found: Sequence[Streams], limit_s: float) -> list[Row]:
    rows: list[Row] = []
    for streams in found:
        final = "-" if streams.final_s is None else f"{streams.final_s:.2f} s"
        notes = [
            "" if streams.is_valid else "the client itself was late",
            f"{100 * streams.never_final:.1f} % never final" if streams.never_final else "",
        ]
        rows.append((f"p95 of finals, {streams.count} at once", final, "; ".join(filter(None, notes)), ""))
    most = max((streams.count for streams in found if streams.within(limit_s)), default=0)
    more = " or more" if found and found[-1].within(limit_s) else ""
    rows.append((f"streams with p95 of finals up to {limit_s:g} s", f"{most}{more}", "", ""))
    return rows


def table(title: str, rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [("what", "measured", "least, by the device's limits", "share"), ("---",) * 4, *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])


# The command --------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="least length of every stream's track (30)")
    parser.add_argument("--streams", help="how many at once, one run each, until one is too many (by device)")
    parser.add_argument("--limit-s", type=float, default=0.5, help="highest p95 of finals that passes (0.5)")
    parser.add_argument("--recordings", type=int, help="how many the engine is timed with (by device)")
    asked = parser.parse_args(argv)
    if asked.seconds <= 0 or asked.limit_s <= 0 or (asked.recordings is not None and asked.recordings < 1):
        parser.error("must be more than 0")
    try:
        asked.streams = asked.streams and [int(part) for part in asked.streams.split(",")]
    except ValueError:
        parser.error("--streams takes numbers with commas between them")
    if asked.streams and min(asked.streams) < 1:
        parser.error("streams are at least 1")
    return asked


def measure(asked: argparse.Namespace, settings: Settings) -> str:
    """The table. Raises EngineFailed, ServerFailed, PlayFailed, SpeechMissing, WeightsNotFound."""
    model_dir = weights.locate(settings.model, weights_config(settings), layout=Layout.TRANSFORMERS).resolve()
    shape = ModelShape.read(json.loads((model_dir / "config.json").read_text("utf-8")))
    speech, source = recordings(["read-en"], 1)
    has_gpu = shutil.which("nvidia-smi") is not None  # as the Makefile decides which vLLM is installed
    count = asked.recordings or (GPU_RECORDINGS if has_gpu else CPU_RECORDINGS)
    clips = [recording.audio for recording in islice(source, count)]
    figures = engine_figures(model_dir, settings.engine_python, clips)
    rows = engine_rows(figures, shape)
    counts = asked.streams or (GPU_STREAMS if has_gpu else CPU_STREAMS)
    rows += stream_rows(streams_figures(counts, asked.seconds, asked.limit_s, settings), asked.limit_s)
    title = f"{settings.model} on {figures.device}; vLLM {figures.vllm}, {figures.model_class}; {speech}"
    return table(title, rows)


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    try:
        print(measure(asked, load_settings(engine="vllm")))
    except SpeechMissing as missing:
        print(f"bench.gpu: {missing}", file=sys.stderr)
        return EXIT_NO_SPEECH
    except (EngineFailed, ServerFailed, PlayFailed, weights.WeightsNotFound) as failed:
        print(f"bench.gpu: {failed}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
