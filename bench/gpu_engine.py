"""What the vLLM engine itself takes, without the gateway: run by bench.gpu in the engine's interpreter.

    python -m bench.gpu_engine MODEL_DIR RECORDINGS.npz FIGURES.json

The recordings are int16, 16 kHz. What is written is one JSON object, the fields of ``Figures``.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.host import log
from models.silence_tail import SAMPLES_PER_POSITION
from models.vllm_settings import GPU_POSITION_STEP, KEPT_STATES
from streaming.audio import SAMPLE_RATE
from streaming.types import DecodeOptions, DecodeRequest, Pcm16, Priority

PROMPT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured. ``steps``: two lengths of text, whose difference is decoder steps alone."""

    repeats: int
    positions: tuple[int, ...]
    batches: tuple[int, ...]
    steps: tuple[int, int]


FULL = Amount(5, tuple(range(GPU_POSITION_STEP, 1501, GPU_POSITION_STEP)), (1, 8, 16, 32, 64), (16, 80))
REDUCED = Amount(1, (200, 1500), (1, 2), (4, 12))  # a CPU takes as long for one window as a GPU for all of it


@dataclass(frozen=True, slots=True)
class Figures:
    """``encoder``: positions and seconds a window; ``prompt_s``: a first token whose states were kept; ``step``: batch
    and seconds a decoder step, ``step_tokens`` long on the average. ``audio_s`` of recordings took ``wall_s``,
    ``at_once`` together, through the whole ladder."""

    device: str
    vllm: str
    model_class: str
    number_bytes: int
    cache_number_bytes: int
    start_s: float
    encoder: list[tuple[int, float]]
    prompt_s: float
    step: list[tuple[int, float]]
    step_tokens: int
    recordings: int
    at_once: int
    audio_s: float
    wall_s: float


async def timed(work: Awaitable[Any]) -> float:
    began_s = time.perf_counter()
    await work
    return time.perf_counter() - began_s


class Bench:
    """Measurements of a started engine."""

    def __init__(self, engine: Any, amount: Amount) -> None:
        self._engine = engine
        self._core = engine.core
        self._amount = amount
        special = self._core.files.special
        self._prompt = [special.start_of_transcript, special.no_timestamps]
        self._noise = np.random.default_rng(1).normal(0, 0.01, 30 * SAMPLE_RATE).astype(np.float32)

    def _window(self, positions: int) -> Any:
        return self._core.at_length(self._noise[: positions * SAMPLES_PER_POSITION], positions)

    async def _ask(self, window: Any, tokens: int) -> None:
        await self._core.ask(window, self._prompt, self._core.parameters(cap=tokens, ignore_eos=True))

    async def encoder(self, positions: int) -> tuple[float, float]:
        """Seconds of one window through the encoder, and of a first token without it: the states of the same window
        are kept, so that asking again does all but encode."""
        fresh, kept = [], []
        for _ in range(self._amount.repeats):
            window = self._window(positions)
            fresh.append(await timed(self._ask(window, 1)))
            kept.append(await timed(self._ask(window, 1)))
        return statistics.median(fresh) - statistics.median(kept), statistics.median(kept)

    async def step(self, batch: int) -> float:
        """Seconds of one decoder step of ``batch`` sequences, their states kept."""
        windows = [self._window(100) for _ in range(batch)]
        few, many = self._amount.steps

        async def all_of(tokens: int) -> None:
            await asyncio.gather(*(self._ask(window, tokens) for window in windows))

        await all_of(1)
        differences = []
        for _ in range(self._amount.repeats):
            shorter = await timed(all_of(few))
            differences.append(await timed(all_of(many)) - shorter)
        return statistics.median(differences) / (many - few)

    async def throughput(self, recordings: Sequence[Pcm16], at_once: int) -> float:
        """Seconds for all recordings, each a request as an uploaded file makes."""
        places = asyncio.Semaphore(at_once)

        async def one(number: int, audio: Pcm16) -> None:
            async with places:
                # start_sample makes each an utterance of its own, so that none is another one's draft
                options = DecodeOptions(language="en")
                await self._engine.decode(
                    DecodeRequest(number, number, 0, Priority.FILE, audio, number, len(audio), options=options)
                )

        return await timed(asyncio.gather(*(one(number, audio) for number, audio in enumerate(recordings))))


async def measure(model_dir: Path, recordings: Sequence[Pcm16]) -> Figures:
    import vllm

    from models.vllm_engine import VllmConfig, VllmWhisper

    said: dict[str, Any] = {}

    def hear(event: str, **fields: Any) -> None:
        said.update(fields)
        log(event, **fields)

    engine = VllmWhisper(VllmConfig(model_dir=model_dir, model_name=model_dir.name), hear)
    start_s = await timed(engine.start())
    settings = engine.core.settings
    amount = FULL if settings.compile_encoder else REDUCED
    bench = Bench(engine, amount)
    try:
        encoder = [(positions, await bench.encoder(positions)) for positions in amount.positions]
        batches = [batch for batch in amount.batches if batch <= min(settings.sequences, KEPT_STATES)]
        step = [(batch, await bench.step(batch)) for batch in batches]
        wall_s = await bench.throughput(recordings, settings.sequences)
    finally:
        await engine.close()
    number_bytes = 4 if settings.engine["dtype"] == "float32" else 2
    return Figures(
        device=settings.reasons["device"],
        vllm=vllm.__version__,
        model_class=said["model_class"],
        number_bytes=number_bytes,
        cache_number_bytes=1 if settings.engine.get("kv_cache_dtype") == "fp8" else number_bytes,
        start_s=start_s,
        encoder=[(positions, encode_s) for positions, (encode_s, _) in encoder],
        prompt_s=statistics.median(prompt_s for _, (_, prompt_s) in encoder),
        step=step,
        step_tokens=PROMPT_TOKENS + sum(amount.steps) // 2,
        recordings=len(recordings),
        at_once=settings.sequences,
        audio_s=sum(len(audio) for audio in recordings) / SAMPLE_RATE,
        wall_s=wall_s,
    )


def main(model_dir: str, recordings: str, figures: str) -> None:
    with np.load(recordings) as given:
        measured = asyncio.run(measure(Path(model_dir), [given[name] for name in given.files]))
    Path(figures).write_text(json.dumps(asdict(measured)), "utf-8")


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main(*sys.argv[1:])
