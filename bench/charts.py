"""Line charts as SVG, one below the other. Pure: numbers in, text out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f6feb", "#b35900", "#a40e26", "#2da44e")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 720, 120, 60, 10, 30, 64


@dataclass(frozen=True, slots=True)
class Chart:
    """``series``: by name, a number or None for each of ``x``."""

    title: str
    x_title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]


def draw(charts: Sequence[Chart]) -> str:
    """An SVG document."""
    height = _TOP + len(charts) * (_HEIGHT + _GAP)
    body = "\n".join(_chart(chart, _TOP + n * (_HEIGHT + _GAP)) for n, chart in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _chart(chart: Chart, top: int) -> str:
    most = max((y for values in chart.series.values() for y in values if y is not None), default=1.0) or 1.0
    parts = [f'<text x="{_LEFT}" y="{top - 10}" font-weight="bold">{escape(chart.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + _HEIGHT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{most * share:.3g}</text>')
    for end, anchor in ((0, "start"), (-1, "end")):
        x = _place(chart.x[end], chart.x) if chart.x else _LEFT
        label = f"{chart.x[end]:g}" if chart.x else ""
        parts.append(f'<text x="{x:.0f}" y="{top + _HEIGHT + 16}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{top + _HEIGHT + 16}">{escape(chart.x_title)}</text>')
    for number, (name, values) in enumerate(chart.series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        known = [(x, y) for x, y in zip(chart.x, values, strict=True) if y is not None]
        line = " ".join(f"{_place(x, chart.x):.1f},{top + _HEIGHT * (1 - y / most):.1f}" for x, y in known)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = _WIDTH - _RIGHT - 150 * (len(chart.series) - number) + 20
        parts.append(f'<text x="{at}" y="{top - 10}" fill="{colour}">{escape(name)}</text>')
    return "\n".join(parts)


def _place(x: float, all_x: Sequence[float]) -> float:
    span = all_x[-1] - all_x[0] or 1.0
    return _LEFT + (_WIDTH - _RIGHT - _LEFT) * (x - all_x[0]) / span
