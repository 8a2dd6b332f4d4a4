"""Word error rate and cost of the vLLM engine: the shaped encoder against the 30 s window, in one run.

    python -m bench.vllm_accuracy --model-dir DIR --interpreter .venv-vllm/bin/python [--sets read-en] [--every 4]

DIR is in Transformers' layout. Each recording is one request to the engine's process, one after the other, so both
runs go the way of a recording's final: ladder, guards, word times. The full window gives the tokens that vLLM's own
class and processor give (docs/vllm.md).
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy import MAX_CLIP_S, Clip, Tally, clips, request
from bench.corpus import find_corpus, read_audio
from models.remote import RemoteConfig, RemoteRecognizer

START_TIMEOUT_S = 900.0
HEADER = (
    "| encoder | recordings | minutes | WER, % | S / D / I | decode, s | decoder steps | texts as full |\n"
    + "|---" * 8
    + "|"
)


async def hear(chosen: Sequence[Clip], asked: argparse.Namespace, *, shaped: bool) -> tuple[Tally, int, list[str]]:
    """Every clip, one after the other: sums, decoder steps, and the texts."""
    engine = {"kind": "vllm", "model_dir": str(asked.model_dir.resolve()), "model_name": asked.model_dir.name}
    config = RemoteConfig(
        engine={**engine, "shaped": shaped},
        interpreter=str(asked.interpreter.absolute()),  # not resolved: a virtual environment's is a link
        start_timeout_s=START_TIMEOUT_S,
        request_timeout_s=300.0,
        heartbeat_timeout_s=120.0,
    )
    recognizer = RemoteRecognizer(config)
    await recognizer.start()
    tally, steps, texts = Tally(), 0, list[str]()
    try:
        for number, clip in enumerate(chosen):
            audio = read_audio(clip.path, limit_s=MAX_CLIP_S)
            answer = await recognizer.decode(request(number, clip, audio, recognizer.info.languages))
            tally.add(clip, answer, 0.0)
            steps += answer.decoder_steps
            texts.append(answer.text)
    finally:
        await recognizer.close()
    return tally, steps, texts


def row(name: str, tally: Tally, steps: int, same: int) -> str:
    score = tally.score
    errors = f"{score.substitutions} / {score.deletions} / {score.insertions}"
    wer = 100 * (score.rate or 0.0)
    times = f"{tally.audio_s / 60:.1f} | {wer:.2f} | {errors} | {tally.decode_s:.0f}"
    return f"| {name} | {tally.clips} | {times} | {steps} | {same} |"


async def compare(asked: argparse.Namespace) -> None:
    chosen = [clip for name in asked.sets.split(",") for clip in clips(asked.corpus, [name], asked.every)]
    began = time.monotonic()
    full, full_steps, full_texts = await hear(chosen, asked, shaped=False)
    shaped, shaped_steps, shaped_texts = await hear(chosen, asked, shaped=True)
    same = sum(a == b for a, b in zip(full_texts, shaped_texts, strict=True))
    print(HEADER)
    print(row("30 s window", full, full_steps, len(chosen)))
    print(row("shaped", shaped, shaped_steps, same))
    print(f"\nboth with their starts: {time.monotonic() - began:.0f} s")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--interpreter", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--corpus", type=Path, default=find_corpus())
    parser.add_argument("--sets", default="read-en", help="comma-separated")
    parser.add_argument("--every", type=int, default=4, help="take every n-th clip")
    asked = parser.parse_args(argv)
    if asked.corpus is None:
        parser.error("no speech corpus: name its folder with --corpus or HARK_CORPUS")
    asyncio.run(compare(asked))


if __name__ == "__main__":
    main(sys.argv[1:])
