"""A plot of requests over block size, as SVG by hand: two lines per distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 400, 60, 230, 40, 50


@dataclass(frozen=True, slots=True)
class Series:
    """One distribution: times contiguous reservation, by block size."""

    name: str
    formula: Mapping[int, float]
    measured: Mapping[int, float]


def draw(series: Sequence[Series], title: str) -> str:
    """An SVG document; block sizes on a logarithmic axis."""
    sizes = sorted({size for one in series for size in one.formula})
    most = max(max(*one.formula.values(), *one.measured.values()) for one in series)
    top = math.ceil(most) or 1
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    span = math.log2(sizes[-1] / sizes[0]) or 1.0

    def x(size: int) -> float:
        return round(_LEFT + inner_width * math.log2(size / sizes[0]) / span, 1)

    def y(value: float) -> float:
        return round(_TOP + inner_height * (1 - value / top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for value in range(0, top + 1, max(1, top // 8)):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}" '
            'stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value}</text>'
        )
    for size in sizes:
        parts.append(
            f'<text x="{x(size)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{size}</text>'
        )
    middle = _LEFT + inner_width / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">tokens per block</text>'
    )
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(size)},{y(one.formula[size])}" for size in sorted(one.formula))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="5 4"/>'
        )
        parts.extend(
            f'<circle cx="{x(size)}" cy="{y(value)}" r="3.5" fill="{colour}"/>'
            for size, value in sorted(one.measured.items())
        )
        row = _TOP + 10 + 20 * number
        parts.append(
            f'<circle cx="{_WIDTH - _RIGHT + 20}" cy="{row}" r="3.5" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 30}" y="{row + 4}">{escape(one.name)}</text>'
        )
    note = _TOP + 20 + 20 * len(series)
    parts.append(
        f'<text x="{_WIDTH - _RIGHT + 14}" y="{note}">dots: measured, dashes: formula</text></svg>'
    )
    return "\n".join(parts) + "\n"
