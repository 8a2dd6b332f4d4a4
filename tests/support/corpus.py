"""The speech corpus: real recordings with reference texts, which lie outside the repository.

Found at ``$HARK_CORPUS``, else beside the repository at ``../shared/corpus``; tests that need it skip where it is not.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.corpus import find_corpus


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


def require_corpus() -> Path:
    """The corpus's folder, or skip."""
    root = find_corpus()
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
