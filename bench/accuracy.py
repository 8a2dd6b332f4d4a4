"""Word error rate and encoder time of the default engine over whole corpus files, up to 28 s each.

    python -m bench.accuracy --model-dir DIR [--sets read-en,phone] [--every 4] [--limit 50] [--full-window]

The corpus is found by HARK_CORPUS or at ../shared/corpus. Texts are compared after whisper-normalizer (English or
basic); Chinese and Japanese by character. Each file is one request with everything called speech, so the non-speech
set shows what the guards alone keep out.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import scoring
from bench.corpus import find_corpus, read_audio
from models.ctranslate import CtranslateConfig, CtranslateWhisper, Model, States
from streaming.types import DecodeOptions, DecodeRequest, Float32, Hypothesis, Pcm16, Priority

MAX_CLIP_S = 28.0
ALL_SETS = ("read-en", "spontaneous-en", "phone", "multilingual", "nonspeech")


@dataclass(frozen=True)
class Clip:
    """A corpus file: where it is, what is said in it ("" for nothing), and in which language."""

    path: Path
    corpus_set: str
    language: str
    text: str
    duration_s: float


@dataclass
class Tally:
    """Sums over clips. Times in seconds."""

    score: scoring.Score = field(default_factory=scoring.Score)
    clips: int = 0
    audio_s: float = 0.0
    encoder_s: float = 0.0
    decode_s: float = 0.0
    full_windows: int = 0
    sampled: int = 0
    rejected: int = 0

    def add(self, clip: Clip, answer: Hypothesis, encoder_s: float) -> int:
        """Count one clip; returns its errors."""
        errors = scoring.score(clip.text, answer.text, clip.language)
        self.score += errors
        self.clips += 1
        self.audio_s += clip.duration_s
        self.encoder_s += encoder_s
        self.decode_s += answer.decode_s
        self.full_windows += answer.full_window
        self.sampled += answer.temperature > 0.0
        self.rejected += bool(answer.rejected)
        return errors.errors

    def line(self, name: str) -> str:
        return (
            f"{name:16} {self.clips:5} {self.audio_s / 60:6.1f} {100 * (self.score.rate or 0.0):9.2f} "
            f"{self.score.substitutions:5} {self.score.deletions:4} {self.score.insertions:4} {self.encoder_s:9.1f} "
            f"{self.decode_s - self.encoder_s:8.1f} {self.decode_s / max(self.audio_s, 1e-9):6.3f} "
            f"{self.full_windows:5} {self.sampled:7} {self.rejected:8}"
        )


HEADER = "set              clips    min WER/CER %     S    D    I  encode s  other s    RTF  full sampled rejected"


class TimedModel(Model):
    """The model, with the seconds its encoder took."""

    encoder_s = 0.0

    def _encode_features(self, log_mel: Float32) -> States:
        began = time.perf_counter()
        states = super()._encode_features(log_mel)
        self.encoder_s += time.perf_counter() - began
        return states


class TimedWhisper(CtranslateWhisper):
    """The engine with a timed model."""

    def __init__(self, config: CtranslateConfig) -> None:
        self.model: TimedModel = TimedModel(config)


def clips(corpus: Path, sets: Sequence[str], every: int) -> Iterator[Clip]:
    """Each set's clips with a known text, not longer than 28 s; non-speech ones are cut to that instead."""
    rows = [json.loads(line) for line in (corpus / "manifest.jsonl").read_text("utf-8").splitlines()]
    for name in sets:
        usable = [
            row
            for row in rows
            if row["set"] == name and row["text"] is not None and (row["text"] == "" or row["duration_s"] <= MAX_CLIP_S)
        ]
        for row in usable[::every]:
            duration_s = min(row["duration_s"], MAX_CLIP_S)
            yield Clip(corpus / row["path"], name, row["language"], row["text"], duration_s)


def request(number: int, clip: Clip, audio: Pcm16, known: frozenset[str]) -> DecodeRequest:
    """The clip as a file's only utterance. Its language is given where the model knows it."""
    language = clip.language if clip.language in known and clip.text else None
    return DecodeRequest(
        request_id=number,
        utterance_id=number,
        channel=0,
        priority=Priority.FILE,
        audio=audio,
        start_sample=0,
        speech_samples=audio.shape[0],
        options=DecodeOptions(language=language),
    )


def run(engine: TimedWhisper, chosen: Sequence[Clip], *, detect: bool, verbose: bool) -> dict[str, Tally]:
    """Decode every clip; texts on non-speech and, if verbose, every clip with errors are printed."""
    tallies: dict[str, Tally] = {}
    for number, clip in enumerate(chosen):
        audio = read_audio(clip.path, limit_s=MAX_CLIP_S)
        asked = request(number, clip, audio, engine.info.languages)
        if detect:
            asked = replace(asked, options=DecodeOptions())
        before_s = engine.model.encoder_s
        answer = engine.decode(asked)
        tally = tallies.setdefault(clip.corpus_set, Tally())
        errors = tally.add(clip, answer, engine.model.encoder_s - before_s)
        if answer.rejected or (errors and (verbose or not clip.text)):
            print(
                f"  {clip.path.name}: {errors} errors, {answer.language}, full={answer.full_window}, "
                f"t={answer.temperature}, logprob {answer.average_logprob:.2f}, no speech "
                f"{answer.no_speech_probability:.2f}, rejected {answer.rejected or '-'}: {answer.text!r}",
                flush=True,
            )
            if verbose and clip.text:
                print(f"    reference: {clip.text!r}")
    return tallies


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=find_corpus())
    parser.add_argument("--sets", default=",".join(ALL_SETS), help="comma-separated")
    parser.add_argument("--limit", type=int, default=None, help="at most so many clips a set")
    parser.add_argument("--every", type=int, default=1, help="take every n-th clip")
    parser.add_argument("--full-window", action="store_true", help="encode 30 s always")
    parser.add_argument("--margin-s", type=float, default=3.0)
    parser.add_argument("--detect", action="store_true", help="detect the language instead of giving it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args(argv)
    if given.corpus is None:
        parser.error("no speech corpus: name its folder with --corpus or HARK_CORPUS")
    return given


def main(argv: Sequence[str]) -> None:
    asked = arguments(argv)
    config = CtranslateConfig(
        model_dir=asked.model_dir,
        model_name=asked.model_dir.name,
        workers=1,
        threads_per_worker=asked.threads,
        margin_s=asked.margin_s,
        shaped=not asked.full_window,
    )
    engine = TimedWhisper(config)
    engine.model.encoder_s = 0.0
    chosen = [
        clip
        for name in asked.sets.split(",")
        for clip in list(clips(asked.corpus, [name], asked.every))[: asked.limit]
        if engine.info.languages != {"en"} or clip.language == "en" or not clip.text
    ]
    tallies = run(engine, chosen, detect=asked.detect, verbose=asked.verbose)
    print(HEADER)
    for name, tally in tallies.items():
        print(tally.line(name))


if __name__ == "__main__":
    main(sys.argv[1:])
