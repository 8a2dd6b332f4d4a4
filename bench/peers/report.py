"""The race in figures: a table, ratios, a picture. Pure: nothing here plays, starts or reads anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from bench.measures import percentile
from bench.process import Load
from bench.scoring import Score
from bench.snapshots import Measures

HARK = "Hark"


@dataclass(frozen=True, slots=True)
class Live:
    """One server with so many streams at once. ``problem``: why there are no measures, or what makes them invalid."""

    server: str
    streams: int
    measures: Measures | None = None
    load: Load | None = None
    late_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class File:
    """One long recording at once: how long it took, and its errors. ``problem``: why there are none."""

    server: str
    audio_s: float = 0.0
    taken_s: float = 0.0
    score: Score | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A column: its head, its key in the JSON, and whether more is better."""

    head: str
    key: str
    more_is_better: bool = False
    unit: str = " s"


LIVE_FIGURES = (
    Figure("last word p50", "last_word_p50_s"),
    Figure("p95", "last_word_p95_s"),
    Figure("final p50", "final_p50_s"),
    Figure("p95", "final_p95_s"),
    Figure("never final", "never_final", unit="%"),
    Figure("word shown p50", "word_shown_p50_s"),
    Figure("p95", "word_shown_p95_s"),
    Figure("WER settled", "wer_settled", unit="%"),
    Figure("WER shown", "wer_shown", unit="%"),
    Figure("taken back", "taken_back", unit=""),
    Figure("CPU", "cpu_percent", unit=" %"),
    Figure("MiB", "rss_mib", unit=""),
)
FILE_FIGURES = (
    Figure("audio s / s", "speed", more_is_better=True, unit="x"),
    Figure("WER", "wer", unit="%"),
)
_BARS = (("last word shown, p50", "last_word_p50_s", "#7aa6c2"), ("marked final, p50", "final_p50_s", "#1f5673"))


# Figures ------------------------------------------------------------------------------------------------------------


def live_figures(live: Live) -> dict[str, Any]:
    """Times in seconds, shares in [0, 1], None where there was nothing to measure."""
    row: dict[str, Any] = {"server": live.server, "streams": live.streams, "problem": live.problem}
    if live.measures is None:
        return row
    m = live.measures
    last_words = [o.last_word_s for o in m.outcomes if o.last_word_s is not None]
    finals = [o.final_s for o in m.outcomes if o.final_s is not None]
    return row | {
        "utterances": len(m.outcomes),
        "last_word_p50_s": _rounded(percentile(last_words, 50)),
        "last_word_p95_s": _rounded(percentile(last_words, 95)),
        "final_p50_s": _rounded(percentile(finals, 50)),
        "final_p95_s": _rounded(percentile(finals, 95)),
        "never_final": round(1 - len(finals) / len(m.outcomes), 4) if m.outcomes else None,
        "word_shown_p50_s": _rounded(percentile(m.word_delays_s, 50)),
        "word_shown_p95_s": _rounded(percentile(m.word_delays_s, 95)),
        "wer_settled": _rounded(m.settled.rate, 4),
        "wer_shown": _rounded(m.shown.rate, 4),
        "reference_words": m.settled.units,
        "taken_back": m.taken_back,
        "cpu_percent": None if live.load is None else round(live.load.cpu_percent, 1),
        "rss_mib": None if live.load is None else round(live.load.rss_mib),
        "client_late_p99_s": round(live.late_s, 4),
    }


def file_figures(file: File) -> dict[str, Any]:
    row: dict[str, Any] = {"server": file.server, "problem": file.problem}
    if file.score is None:
        return row
    return row | {
        "audio_s": round(file.audio_s, 1),
        "taken_s": round(file.taken_s, 2),
        "speed": round(file.audio_s / file.taken_s, 2),
        "wer": _rounded(file.score.rate, 4),
    }


def ratios(rows: Sequence[Mapping[str, Any]], figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """For each figure that can be divided: Hark's, the best peer's and which that is, Hark's by the peer's.

    ``better``: who wins, "equal" where nobody does. Rows are of one number of streams. A peer that settled nothing at
    all is not compared: it would be the one that takes least back.
    """
    rows = [row for row in rows if row["server"] == HARK or row.get("never_final") != 1]
    found: dict[str, dict[str, Any]] = {}
    for figure in figures:
        values = {row["server"]: row[figure.key] for row in rows if row.get(figure.key) is not None}
        hark = values.pop(HARK, None)
        if hark is None or not values:
            continue
        best = max(values, key=values.__getitem__) if figure.more_is_better else min(values, key=values.__getitem__)
        wins = hark > values[best] if figure.more_is_better else hark < values[best]
        found[figure.key] = {
            "hark": hark,
            "peer": values[best],
            "best_peer": best,
            "ratio": round(hark / values[best], 3) if values[best] > 0 else None,
            "better": "equal" if hark == values[best] else HARK if wins else best,
        }
    return found


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


# Text ---------------------------------------------------------------------------------------------------------------


def live_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return _table([("server", 16), ("streams", 9)], ["server", "streams"], rows, LIVE_FIGURES)


def file_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return _table([("files", 34)], ["server"], rows, FILE_FIGURES)


def ratio_lines(of: str, found: Mapping[str, Mapping[str, Any]], figures: Sequence[Figure]) -> list[str]:
    """One line a figure, in plain words, whoever wins."""
    lines = [f"{of}: Hark by the best peer"]
    for key, r in found.items():
        figure = next(figure for figure in figures if figure.key == key)
        ratio = "  -  " if r["ratio"] is None else f"{r['ratio']:.2f}"
        values = f"{_cell(r['hark'], figure)} by {_cell(r['peer'], figure)} ({r['best_peer']})"
        lines.append(f"  {key:<18}{ratio:>8}   {values:<48}better: {r['better']}")
    return lines


def _table(
    heads: Sequence[tuple[str, int]], keys: Sequence[str], rows: Sequence[Mapping[str, Any]], figures: Sequence[Figure]
) -> str:
    widths = [max(len(figure.head) + 2, 9) for figure in figures]
    first = "".join(head.ljust(width) for head, width in heads)
    lines = [first + "".join(f.head.rjust(w) for f, w in zip(figures, widths, strict=True))]
    for row in rows:
        name = "".join(str(row[key]).ljust(width) for key, (_, width) in zip(keys, heads, strict=True))
        cells = "".join(_cell(row.get(f.key), f).rjust(w) for f, w in zip(figures, widths, strict=True))
        problem = row["problem"].splitlines()[0] if row["problem"] else ""
        measured = any(row.get(figure.key) is not None for figure in figures)
        lines.append((name + (cells if measured else "not run:") + (f"  {problem}" if problem else "")).rstrip())
    return "\n".join(lines)


def _cell(value: float | None, figure: Figure) -> str:
    if value is None:
        return "-"
    match figure.unit:
        case " s":
            return f"{value:.2f} s"
        case "%":
            return f"{100 * value:.1f} %"
        case _:
            return f"{value:g}{figure.unit}"


# Picture ------------------------------------------------------------------------------------------------------------


def picture(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG with two bars for each server and number of streams: delays after the end of speech, in seconds."""
    left, scale_px, bar, gap = 190, 560, 13, 14
    longest = max((row.get(key) or 0.0 for row in rows for _, key, _ in _BARS), default=0.0) or 1.0
    parts, y = [], 66
    for row in rows:
        label = f"{row['server']}, {row['streams']} stream{'s' if row['streams'] > 1 else ''}"
        parts.append(_text(left - 8, y + bar + 4, label, "end"))
        for _, key, colour in _BARS:
            value = row.get(key)
            length = 0.0 if value is None else max(0.0, value) / longest * scale_px
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" fill="{colour}"/>')
            shown = "-" if value is None else f"{value:.2f} s"
            parts.append(_text(left + length + 6, y + bar - 2, shown, "start"))
            y += bar + 1
        y += gap
    legend = [
        f'<rect x="{left + 200 * place}" y="36" width="12" height="12" fill="{colour}"/>'
        + _text(left + 200 * place + 18, 46, name, "start")
        for place, (name, _, colour) in enumerate(_BARS)
    ]
    width = left + scale_px + 80
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
            _text(left, 22, title, "start"),
            *legend,
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
