"""Recordings to play: the speech corpus, or speech that can be made where there is no corpus."""

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from models.scripted import VOCABULARY, encode_words
from streaming.audio import SAMPLE_RATE, FrameDecoder, Resampler, to_pcm16
from streaming.config import AudioFormat, Encoding
from streaming.types import Pcm16

_HEADERLESS = {".alaw": Encoding.ALAW, ".mulaw": Encoding.MULAW}
SHORTEST_S = 2.0
LONGEST_S = 15.0  # below the service's forced cut, so that one recording can be one utterance

# fmt: off
_SENTENCES = (
    "The ferry leaves the harbour every morning at a quarter past seven.",
    "Please bring a warm coat, because the mountain hut has no heating.",
    "Nobody in the village could remember such a long and quiet winter.",
    "She counted the coins twice and put them back into the wooden box.",
    "The meeting has been moved to Thursday, in the small room upstairs.",
    "A narrow path follows the river until it reaches the old stone mill.",
    "He repaired the clock himself, with nothing but a knife and some oil.",
    "We shall need more paper if everybody wants to draw the same bird.",
    "The baker opens early, and by noon there is hardly any bread left.",
    "Turn left after the bridge and look for a house with green windows.",
    "My neighbour grows tomatoes on the roof and gives most of them away.",
    "The letter arrived late, wet through, and was impossible to read.",
)
# fmt: on


class SpeechMissing(Exception):
    """There is nothing to play; the message says what is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One recording: int16 mono at 16 kHz, what is said in it, in which language (ISO 639-1)."""

    id: str
    audio: Pcm16
    text: str
    language: str


def find_corpus() -> Path | None:
    """``$HARK_CORPUS``, else ``../shared/corpus`` beside the repository; None where neither holds a corpus."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "corpus"
    root = Path(os.environ.get("HARK_CORPUS") or beside)
    return root if (root / "manifest.jsonl").is_file() else None


def read_audio(path: Path, *, limit_s: float | None = None) -> Pcm16:
    """The first audio stream as int16, shape (n,), mono, 16 kHz; its first ``limit_s`` seconds where that is given.

    Files that end in .alaw or .mulaw are headerless telephone audio. Raises av.FFmpegError where the file cannot be
    decoded.
    """
    limit_samples = None if limit_s is None else round(limit_s * SAMPLE_RATE)
    if path.suffix in _HEADERLESS:
        return _read_g711(path)[:limit_samples]
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    blocks = [np.zeros(0, np.int16)]
    with av.open(str(path), metadata_errors="ignore") as container:
        for frame in container.decode(audio=0):
            blocks += [block.to_ndarray()[0] for block in resampler.resample(frame)]
            if limit_samples is not None and sum(map(len, blocks)) >= limit_samples:
                break
        else:
            blocks += [block.to_ndarray()[0] for block in resampler.resample(None)]
    return np.concatenate(blocks)[:limit_samples]


def _read_g711(path: Path) -> Pcm16:
    resampler = Resampler(8_000, 1)
    frames = FrameDecoder(AudioFormat(_HEADERLESS[path.suffix], 8_000)).decode(path.read_bytes())
    return to_pcm16(np.concatenate((resampler.resample(frames), resampler.resample(frames[:0], last=True)))[:, 0])


def recordings(sets: Sequence[str], seed: int) -> tuple[str, Iterator[Recording]]:
    """What is played, in words, and an endless run of it in a seeded order: nothing comes twice before all came once.

    The set ``scripted`` is made for the scripted engine. Raises SpeechMissing.
    """
    root = find_corpus()
    if list(sets) == ["scripted"]:
        return "words of the scripted engine", _scripted(seed)
    if root is not None:
        return f"corpus {', '.join(sets)}", _from_corpus(root, sets, seed)
    if shutil.which("espeak-ng") is not None:
        return "SYNTHETIC sentences by espeak-ng (no corpus found)", _synthetic(seed)
    raise SpeechMissing(
        "no speech to play: the corpus is missing (set HARK_CORPUS to a folder with manifest.jsonl), "
        "and so is espeak-ng, which could have made some"
    )


def _from_corpus(root: Path, sets: Sequence[str], seed: int) -> Iterator[Recording]:
    rows = [json.loads(line) for line in (root / "manifest.jsonl").read_text("utf-8").splitlines() if line]
    usable = sorted(
        (row for row in rows if row["set"] in sets and row["text"] and SHORTEST_S <= row["duration_s"] <= LONGEST_S),
        key=lambda row: str(row["id"]),
    )
    if not usable:
        raise SpeechMissing(f"the corpus has no recordings of 2 to 15 s with a text in {', '.join(sets)}")

    def endless() -> Iterator[Recording]:
        order = random.Random(seed)
        while True:
            for row in order.sample(usable, len(usable)):
                yield Recording(row["id"], read_audio(root / row["path"]), row["text"], row["language"])

    return endless()


def _synthetic(seed: int) -> Iterator[Recording]:
    order = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="hark-bench-") as folder:
        path = Path(folder) / "sentence.wav"
        while True:
            for text in order.sample(_SENTENCES, len(_SENTENCES)):
                subprocess.run(["espeak-ng", "-v", "en-us", "-s", "155", "-w", str(path), text], check=True)
                yield Recording(f"sentence-{_SENTENCES.index(text)}", read_audio(path), text, "en")


def _scripted(seed: int) -> Iterator[Recording]:
    order = random.Random(seed)
    for number in range(1_000_000):
        words = [order.choice(VOCABULARY) for _ in range(order.randint(20, 60))]  # 2 to 6 s
        yield Recording(f"scripted-{number}", encode_words(words), " ".join(words), "en")
