"""The speech corpus: real recordings with reference texts, which lie outside the repository.

Found at ``$HARK_CORPUS``, else beside the repository at ``../shared/corpus``; tests that need it skip where it is not.
"""

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pytest

from streaming.types import Pcm16

_REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
_SAMPLE_RATE_HZ = 16_000


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One recording. ``text`` is None where no reference is known and "" where nothing is said.

    ``expect`` is set for damaged files alone: "decode", "partial" or "reject".
    """

    id: str
    path: Path
    set: str
    language: str | None
    duration_s: float | None
    sample_rate_hz: int | None
    channels: int | None
    text: str | None
    source: str
    license: str
    codec: str | None = None
    speaker: str | None = None
    expect: str | None = None
    decode_error: str | None = None
    note: str | None = None


def corpus_root() -> Path | None:
    """The corpus's folder, or None where there is none."""
    root = Path(os.environ.get("HARK_CORPUS") or _REPOSITORY_ROOT.parent / "shared" / "corpus")
    return root if (root / "manifest.jsonl").is_file() else None


def require_corpus() -> Path:
    """The corpus's folder, or skip."""
    root = corpus_root()
    if root is None:
        pytest.skip("no speech corpus: set HARK_CORPUS to its folder")
    return root


@functools.cache
def _manifest(root: Path) -> tuple[CorpusRow, ...]:
    lines = (root / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(_row(root, json.loads(line)) for line in lines if line)


def _row(root: Path, values: dict[str, object]) -> CorpusRow:
    renamed = {("sample_rate_hz" if key == "sample_rate" else key): value for key, value in values.items()}
    return CorpusRow(**{**renamed, "path": root / str(values["path"])})  # type: ignore[arg-type]


def corpus_rows(set_name: str | None = None, *, language: str | None = None) -> tuple[CorpusRow, ...]:
    """The rows of one set (or all), in the manifest's order, of one language (or all); skips without the corpus."""
    rows = _manifest(require_corpus())
    return tuple(row for row in rows if set_name in (None, row.set) and language in (None, row.language))


def corpus_row(row_id: str) -> CorpusRow:
    """The row of that id; skips without the corpus, raises KeyError for an unknown id."""
    for row in corpus_rows():
        if row.id == row_id:
            return row
    raise KeyError(row_id)


def read_pcm16(path: Path, *, limit_s: float | None = None) -> Pcm16:
    """The first audio stream as int16, shape (n,), mono, 16 kHz; its first ``limit_s`` seconds where that is given.

    Raises av.FFmpegError where the file cannot be decoded.
    """
    limit_samples = None if limit_s is None else round(limit_s * _SAMPLE_RATE_HZ)
    resampler = av.AudioResampler("s16", "mono", _SAMPLE_RATE_HZ)
    blocks: list[Pcm16] = []
    with av.open(str(path), metadata_errors="ignore") as container:
        for frame in container.decode(audio=0):
            blocks += [block.to_ndarray()[0] for block in resampler.resample(frame)]
            if limit_samples is not None and sum(map(len, blocks)) >= limit_samples:
                break
        else:
            blocks += [block.to_ndarray()[0] for block in resampler.resample(None)]
    return np.concatenate([np.zeros(0, np.int16), *blocks])[:limit_samples]
