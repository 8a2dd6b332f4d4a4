"""How many live streams a machine carries: a model of what decodes cost, and its constants measured here.

    python -m bench.capacity --model-dir DIR [--threads 2] [--streams 1,4,8,16]
    python -m bench.capacity --gpu L4 [--gpu H100] [--model large-v3-turbo]

On a CPU the constants are measured on the CTranslate2 engine in under two minutes. For a GPU they are calculated from
FLOPs and bytes (bench/roofline.py) and a share of the device's limits that real kernels reach; nothing is measured.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.charts import Chart, draw
from bench.corpus import recordings
from bench.roofline import Peak, decoder_step, encoder, peak_of
from models.ctranslate import CtranslateConfig, Model, States
from models.ladder import Align, Decode, Window
from models.silence_tail import positions_to_encode
from models.vllm_settings import ModelShape
from streaming.audio import SAMPLE_RATE, to_float32
from streaming.types import Float32, Pcm16, Task

BATCHES = (1, 2, 4, 8)
MARGIN_S = 3.0
TOKENS_A_SECOND = 3.3  # of English read speech with Whisper's tokenizer: 24 tokens on 7.3 s (docs/log.md)
REACHED = 0.6  # of a data sheet's limits, by good kernels on shapes like these

SHAPES = {  # from the models' published configurations
    "base": ModelShape(512, 6, 6, 2048, 2048, 51865, 80),
    "small": ModelShape(768, 12, 12, 3072, 3072, 51865, 80),
    "medium": ModelShape(1024, 24, 24, 4096, 4096, 51865, 80),
    "large-v3": ModelShape(1280, 32, 32, 5120, 5120, 51866, 128),
    "large-v3-turbo": ModelShape(1280, 32, 4, 5120, 5120, 51866, 128),
    "distil-large-v3.5": ModelShape(1280, 32, 2, 5120, 5120, 51866, 128),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """What a decode takes of an engine, in seconds.

    Encoding takes ``encode_base_s`` and ``encode_position_s`` for each position of 20 ms. A call of the decoder takes
    ``prompt_s[batch]`` for each of its requests and ``step_s[batch]`` for each token of the longest; ``align_s[batch]``
    is for each request.
    """

    encode_base_s: float
    encode_position_s: float
    prompt_s: dict[int, float]
    step_s: dict[int, float]
    align_s: dict[int, float]

    def decode_s(self, audio_s: float, batch: int, margin_s: float = MARGIN_S) -> float:
        """The engine's time for one request of so much audio, decoded in a batch of such requests."""
        positions = positions_to_encode(int(audio_s * SAMPLE_RATE), int(margin_s * SAMPLE_RATE))
        steps = TOKENS_A_SECOND * audio_s + 1
        encode_s = self.encode_base_s + self.encode_position_s * positions
        return encode_s + self.prompt_s[batch] + self.step_s[batch] * steps / batch + self.align_s[batch]


@dataclass(frozen=True, slots=True)
class Speech:
    """How a stream speaks: so long an utterance, so much of the time; a partial after each ``partial_every_s`` of it.

    0 for no partials. ``edges_s``: audio before and after its speech that is decoded with an utterance. ``early``:
    finals asked for an utterance, of which all but one were too early (a pause that did not last).
    """

    utterance_s: float = 7.0
    share: float = 0.83
    partial_every_s: float = 3.0
    edges_s: float = 0.7
    early: float = 1.4


USUAL = Speech()


def load(costs: Costs, speech: Speech, streams: int, batch: int, workers: int = 1) -> tuple[float, float]:
    """Shares of the engine's time that finals and partials take."""
    spoken_s = streams * speech.share  # seconds of speech a second
    finals_s = costs.decode_s(speech.utterance_s + speech.edges_s, batch) * speech.early / speech.utterance_s
    # Partials hear half of an utterance on average.
    partial_s = costs.decode_s(speech.utterance_s / 2 + speech.edges_s, batch)
    partials_s = partial_s / speech.partial_every_s if speech.partial_every_s else 0.0
    return spoken_s * finals_s / workers, spoken_s * partials_s / workers


def streams_at(costs: Costs, speech: Speech, batch: int, limit: float, workers: int = 1) -> int:
    """The most streams whose finals and partials together take at most so much of the engine."""
    one = sum(load(costs, speech, 1, batch, workers))
    return int(limit / one)


# Measured on CTranslate2 -------------------------------------------------------------------------------------------


def measured(model: Model, audio: Float32) -> Costs:
    """The costs of this model here and now. ``audio``: at least 10 s of speech, float32, 16 kHz."""
    short, long = audio[: 2 * SAMPLE_RATE], audio[: 10 * SAMPLE_RATE]
    positions = [positions_to_encode(part.size, int(MARGIN_S * SAMPLE_RATE)) for part in (short, long)]
    took = [_seconds(lambda part=part: model.encode(part, full=False)) for part in (short, long)]  # type: ignore[misc]
    slope = (took[1] - took[0]) / (positions[1] - positions[0])
    states = model.encode(long, full=False)
    prompts = {batch: _seconds(lambda batch=batch: _generate(model, states, batch, 1)) for batch in BATCHES}  # type: ignore[misc]
    steps = {}
    for batch in BATCHES:
        began = time.perf_counter()
        said = _generate(model, states, batch, 60)
        steps[batch] = (time.perf_counter() - began - prompts[batch]) / max(1, len(said) - 1)
    text = tuple(_generate(model, states, 1, 60))
    window = Window(0, long.size, full=False)
    align = Align(window, _start(model), text)
    aligns = {b: _seconds(lambda b=b: model.align([states] * b, [align] * b)) / b for b in BATCHES}  # type: ignore[misc]
    per_request = {batch: took_s / batch for batch, took_s in prompts.items()}
    return Costs(took[0] - slope * positions[0], slope, per_request, steps, aligns)


def _speech() -> Float32:
    """10 s of it. Raises SpeechMissing where there is none."""
    parts: list[Pcm16] = []
    for recording in recordings(["read-en"], 1)[1]:
        parts.append(recording.audio)
        if sum(part.size for part in parts) >= 10 * SAMPLE_RATE:
            break
    return to_float32(np.concatenate(parts)[: 10 * SAMPLE_RATE])


def _start(model: Model) -> tuple[int, ...]:
    return tuple(model.special.start_sequence("en", Task.TRANSCRIBE))


def _generate(model: Model, states: States, batch: int, cap: int) -> tuple[int, ...]:
    start = _start(model)
    step = Decode(Window(0, 1, full=False), start, (*start, model.special.no_timestamps), (), 0.0, cap)
    return model.generate([states] * batch, [step] * batch)[0].tokens


def _seconds(call: Callable[[], object], times: int = 3) -> float:
    """The least of some tries: what else runs on the machine only adds."""
    call()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took)


# Calculated for a GPU ----------------------------------------------------------------------------------------------


def calculated(shape: ModelShape, peak: Peak, reached: float = REACHED) -> Costs:
    """bf16 weights and activations, fp8 keys and values; words timed within the decoder's own pass."""
    one = encoder(shape, 1, 2)
    many = encoder(shape, 501, 2)
    position_s = (many.flops - one.flops) / 500 / (peak.tflops * 1e12)
    weights_s = one.bytes_read / (peak.gb_s * 1e9)
    step_s = {batch: peak.seconds(decoder_step(shape, batch, 20, 2, 1)) for batch in (*BATCHES, 64)}
    # Keys and values of the cross attention, projected once a request, and the prompt's pass beside them.
    projections = 2 * shape.decoder_layers * 2 * shape.width * shape.width * 1500
    prompt_s = projections / (peak.tflops * 1e12)
    return Costs(
        encode_base_s=weights_s / 8 / reached,  # read once for some eight windows
        encode_position_s=position_s / reached,
        prompt_s=dict.fromkeys(step_s, prompt_s / reached),
        step_s={batch: seconds / reached for batch, seconds in step_s.items()},
        align_s={batch: seconds / batch / reached for batch, seconds in step_s.items()},
    )


# The command -------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-dir", type=Path, help="weights for CTranslate2, measured here")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gpu", action="append", default=[], help="calculate for this one: L4, H100, ...")
    parser.add_argument("--model", choices=SHAPES, default="large-v3-turbo", help="with --gpu")
    parser.add_argument("--utterance-s", type=float, default=USUAL.utterance_s)
    parser.add_argument("--share", type=float, default=USUAL.share, help="of its time that a stream speaks")
    parser.add_argument("--partial-every-s", type=float, default=USUAL.partial_every_s)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="with --model-dir")
    asked = parser.parse_args(argv)
    if (asked.model_dir is None) == (not asked.gpu):
        parser.error("either --model-dir or --gpu")
    return asked


def table(costs: Costs, speech: Speech) -> str:
    lines = [
        f"encode: {1e3 * costs.encode_base_s:.1f} ms + {1e3 * costs.encode_position_s:.3f} ms a position of 20 ms",
        f"{'batch':>6} {'prompt ms':>10} {'step ms':>9} {'align ms':>9} {'final ms':>9} {'partial ms':>10}"
        f" {'streams':>8} {'finals only':>12}",
    ]
    finals_only = Speech(speech.utterance_s, speech.share, 0.0)
    for batch in sorted(costs.step_s):
        final_s = costs.decode_s(speech.utterance_s + speech.edges_s, batch)
        partial_s = costs.decode_s(speech.utterance_s / 2 + speech.edges_s, batch)
        lines.append(
            f"{batch:>6} {1e3 * costs.prompt_s[batch]:>10.2f} {1e3 * costs.step_s[batch]:>9.2f} "
            f"{1e3 * costs.align_s[batch]:>9.2f} {1e3 * final_s:>9.1f} {1e3 * partial_s:>10.1f} "
            f"{streams_at(costs, speech, batch, 0.9):>8} {streams_at(costs, finals_only, batch, 0.85):>12}"
        )
    return "\n".join(lines)


def plot(costs: Costs, speech: Speech) -> str:
    """What a request takes by the size of its batch, and how many streams fit by how often a partial is shown."""
    batches = sorted(costs.step_s)
    audio_s = speech.utterance_s + speech.edges_s
    cadences = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
    lengths = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0]
    per_request = {"final": [1e3 * costs.decode_s(audio_s, batch) for batch in batches]}
    per_length = {f"batch {batch}": [1e3 * costs.decode_s(s, batch) for s in lengths] for batch in (1, 4)}
    carried = {
        f"batch {batch}": [float(streams_at(costs, replace(speech, partial_every_s=s), batch, 0.9)) for s in cadences]
        for batch in (1, 4)
    }
    return draw(
        [
            Chart("engine time of a final, ms", "decoded together", [float(batch) for batch in batches], per_request),
            Chart("engine time of a decode, ms", "seconds of audio", lengths, per_length),
            Chart("streams at 90 % of the engine", "seconds of speech between partials", cadences, carried),
        ]
    )


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    speech = Speech(asked.utterance_s, asked.share, asked.partial_every_s)
    print(
        f"utterances of {speech.utterance_s:g} s, {speech.share:.0%} of the time spoken, a partial each "
        f"{speech.partial_every_s:g} s; streams: finals and partials take 90 % of the engine; finals only: 85 %"
    )
    for name in asked.gpu:
        peak = peak_of(name)
        if peak is None:
            print(f"the limits of {name} are not known", file=sys.stderr)
            return 2
        print(f"\n{name}, {asked.model}: calculated at {REACHED:.0%} of {peak.tflops:g} TFLOP/s and {peak.gb_s:g} GB/s")
        print(table(calculated(SHAPES[asked.model], peak), speech))
    if asked.model_dir is not None:
        config = CtranslateConfig(asked.model_dir, asked.model_dir.name, workers=1, threads_per_worker=asked.threads)
        print(f"\n{asked.model_dir.name} on CTranslate2, one worker of {asked.threads} threads: measured")
        costs = measured(Model(config), _speech())
        print(table(costs, speech))
        if asked.plot is not None:
            asked.plot.write_text(plot(costs, speech), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
