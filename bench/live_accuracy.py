"""Word error rate of what a live stream's finals say, against decoding each recording as one utterance.

    python -m bench.live_accuracy --model-dir DIR [--sets read-en] [--every 4] [--no-partials] [--pause-ms 500] ...

Each clip goes through a real Session with the real speech detector and the real engine, in small steps, but not in real
time: every answer comes before the next step, as from an engine that is fast enough. The joined finals are scored, so
cuts, pauses and the promise of committed words count as they do live. Words of committed text that the final lacks are
counted as retractions.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.accuracy import ALL_SETS, HEADER, Clip, Tally, TimedWhisper, clips
from bench.corpus import find_corpus, read_audio
from models.ctranslate import CtranslateConfig
from models.silero import SileroModel
from models.weights import WeightsConfig, locate_vad
from streaming.audio import SAMPLE_RATE
from streaming.config import EndpointerConfig, PartialConfig, SegmenterConfig, SessionConfig, cut_zone_ms
from streaming.errors import SttError
from streaming.events import CancelDecode, Decode, FinalTranscript, Output, PartialTranscript, TranscriptFailed
from streaming.session import Session
from streaming.stabilizer import normalize
from streaming.types import DecodeOptions, Hypothesis, Pcm16

LEAD_SAMPLES = SAMPLE_RATE // 2
TAIL_SAMPLES = SAMPLE_RATE * 3 // 2


@dataclass
class Played:
    """What one clip gave."""

    text: str = ""
    utterances: int = 0
    decodes: Counter[str] = field(default_factory=Counter)
    rejected: list[str] = field(default_factory=list)
    retracted: int = 0
    disagreed: int = 0
    decode_s: float = 0.0
    full_windows: int = 0


class Player:
    """Plays clips into sessions and answers every decode at once."""

    def __init__(self, engine: TimedWhisper, silero: SileroModel, config: SessionConfig, step_ms: int) -> None:
        self._engine = engine
        self._silero = silero
        self._config = config
        self._step = step_ms * SAMPLE_RATE // 1000

    def play(self, audio: Pcm16, language: str | None) -> Played:
        config = replace(self._config, options=DecodeOptions(language=language))
        session = Session(config, [self._silero.detector()])
        padded = np.concatenate((np.zeros(LEAD_SAMPLES, np.int16), audio, np.zeros(TAIL_SAMPLES, np.int16)))
        played, committed = Played(), dict[int, str]()
        for start in range(0, padded.size, self._step):
            self._carry_out(
                session, session.receive_audio(padded[start : start + self._step].tobytes()), played, committed
            )
        self._carry_out(session, session.receive_eof(), played, committed)
        return played

    def _carry_out(
        self, session: Session, outputs: Sequence[Output], played: Played, committed: dict[int, str]
    ) -> None:
        pending = list(outputs)
        cancelled = {output.request_id for output in outputs if isinstance(output, CancelDecode)}
        while pending:
            output = pending.pop(0)
            match output:
                case Decode(request) if request.request_id not in cancelled:
                    played.decodes[request.priority.name] += 1
                    try:
                        hypothesis = self._engine.decode(request)
                    except SttError as error:
                        pending += session.receive_failure(request.request_id, error)
                        continue
                    played.decode_s += hypothesis.decode_s
                    played.full_windows += hypothesis.full_window
                    played.disagreed += not _starts(hypothesis.text, request.committed)
                    pending += session.receive_hypothesis(hypothesis)
                case PartialTranscript():
                    committed[output.utterance_id] = output.committed
                case FinalTranscript():
                    played.text += " " + output.text
                    played.utterances += 1
                    played.retracted += not _starts(output.text, committed.get(output.utterance_id, ""))
                    if output.rejected:
                        played.rejected.append(output.rejected)
                case TranscriptFailed():
                    played.rejected.append(output.error.code)
                case _:
                    pass


def _starts(text: str, committed: str) -> bool:
    promised = [normalize(word) for word in committed.split()]
    return [normalize(word) for word in text.split()][: len(promised)] == promised


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=find_corpus())
    parser.add_argument("--sets", default=",".join(ALL_SETS), help="comma-separated")
    parser.add_argument("--every", type=int, default=1, help="take every n-th clip")
    parser.add_argument("--no-partials", action="store_true")
    parser.add_argument("--detect", action="store_true", help="detect the language instead of giving it")
    parser.add_argument("--full-window", action="store_true", help="encode 30 s always")
    parser.add_argument("--pause-ms", type=int, default=500)
    parser.add_argument("--pre-roll-ms", type=int, default=512)
    parser.add_argument("--early-roll-ms", type=int, default=128)
    parser.add_argument("--post-roll-ms", type=int, default=320)
    parser.add_argument("--max-utterance-ms", type=int, default=20_000)
    parser.add_argument("--hold-back-ms", type=int, default=800)
    parser.add_argument("--step-ms", type=int, default=400, help="audio between two looks at the engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args(argv)
    if asked.corpus is None:
        parser.error("no speech corpus: name its folder with --corpus or HARK_CORPUS")
    return asked


def _config(asked: argparse.Namespace) -> SessionConfig:
    return SessionConfig(
        endpointer=EndpointerConfig(pause_ms=asked.pause_ms),
        segmenter=SegmenterConfig(
            pre_roll_ms=asked.pre_roll_ms,
            early_roll_ms=asked.early_roll_ms,
            post_roll_ms=asked.post_roll_ms,
            max_utterance_ms=asked.max_utterance_ms,
            cut_zone_ms=cut_zone_ms(asked.max_utterance_ms),
        ),
        partials=PartialConfig(enabled=not asked.no_partials, hold_back_ms=asked.hold_back_ms),
    )


def _report(clip: Clip, played: Played, errors: int, verbose: bool) -> None:
    if played.rejected or (errors and (verbose or not clip.text)):
        print(f"  {clip.path.name}: {errors} errors, rejected {played.rejected or '-'}: {played.text!r}", flush=True)
        if verbose and clip.text:
            print(f"    reference: {clip.text!r}")


def main(argv: Sequence[str]) -> None:
    asked = arguments(argv)
    engine = TimedWhisper(
        CtranslateConfig(
            model_dir=asked.model_dir,
            model_name=asked.model_dir.name,
            workers=1,
            threads_per_worker=asked.threads,
            shaped=not asked.full_window,
        )
    )
    engine.model.encoder_s = 0.0
    player = Player(engine, SileroModel(locate_vad(WeightsConfig())), _config(asked), asked.step_ms)
    tallies: dict[str, Tally] = {}
    totals: dict[str, Counter[str]] = {}
    for name in asked.sets.split(","):
        for clip in clips(asked.corpus, [name], asked.every):
            if engine.info.languages == {"en"} and clip.text and clip.language != "en":
                continue
            known = clip.language in engine.info.languages and clip.text and not asked.detect
            before_s = engine.model.encoder_s
            audio = read_audio(clip.path)[: int(clip.duration_s * SAMPLE_RATE)]
            played = player.play(audio, clip.language if known else None)
            tally, total = tallies.setdefault(name, Tally()), totals.setdefault(name, Counter())
            answer = Hypothesis(
                0,
                played.text,
                decode_s=played.decode_s,
                full_window=played.full_windows > 0,
                rejected=",".join(played.rejected),
            )
            errors = tally.add(clip, answer, engine.model.encoder_s - before_s)
            total.update(utterances=played.utterances, retracted=played.retracted, disagreed=played.disagreed)
            total.update(played.decodes)
            _report(clip, played, errors, asked.verbose)
    print(HEADER)
    for name, tally in tallies.items():
        print(tally.line(name), dict(totals[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
