"""A chart as an SVG element, to stand inside a page. Text is escaped; nothing is referred to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from kvferry.cluster.loadgen.report.chart import COLOURS, Chart, Line, ticks

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 330, 62, 14, 34, 48
_LEGEND = 16  # height of a legend's row
_COLUMNS = 2

Place = Callable[[float], float]


def draw(chart: Chart) -> str:
    """The element; its title and a description are for those who do not see it."""
    left, right, top = chart.spans()
    rows = -(-len(chart.lines) // _COLUMNS)
    height = _HEIGHT + _LEGEND * rows
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + inner_width * (value - left) / (right - left), 1)

    def y(value: float) -> float:
        share = min(1.0, max(0.0, value / top))
        return round(_TOP + inner_height * (1 - share), 1)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        f"<title>{escape(chart.title)}</title>",
        f'<text x="{_LEFT}" y="20" class="t">{escape(chart.title)}</text>',
        *_grid(chart, left, right, top, x, y),
    ]
    for line in chart.lines:
        parts.extend(_line(line, x, y))
    parts.extend(_legend(chart))
    parts.append("</svg>")
    return "".join(parts)


def _grid(chart: Chart, left: float, right: float, top: float, x: Place, y: Place) -> Iterator[str]:
    bottom, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in ticks(0.0, top):
        yield f'<path class="g" d="M{_LEFT} {y(value)}H{end}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4}" class="e">{value:.6g}</text>'
    for value in ticks(left, right):
        yield f'<path class="g" d="M{x(value)} {bottom}v4"/>'
        yield f'<text x="{x(value)}" y="{bottom + 17}" class="m">{value:.6g}</text>'
    yield f'<path class="a" d="M{_LEFT} {_TOP}V{bottom}H{end}"/>'
    middle = (_LEFT + end) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 12}" class="m">{escape(chart.x_label)}</text>'
    centre = (_TOP + bottom) / 2
    yield (
        f'<text transform="translate(14 {centre}) rotate(-90)" class="m">'
        f"{escape(chart.y_label)}</text>"
    )


def _line(line: Line, x: Place, y: Place) -> Iterator[str]:
    if not line.points:
        return
    colour = COLOURS[line.colour % len(COLOURS)]
    path = " ".join(f"{x(px)},{y(py)}" for px, py in line.points)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    yield f'<polyline class="l" points="{path}" stroke="{colour}"{dash}/>'
    for (px, _), ends in zip(line.points, line.intervals, strict=False):
        if ends is not None:
            low, high = y(ends[0]), y(ends[1])
            yield (
                f'<path class="l" stroke="{colour}" '
                f'd="M{x(px)} {low}V{high}m-4 0h8M{x(px) - 4} {low}h8"/>'
            )
    if line.has_marks or len(line.points) < 3:  # a line of one point cannot be seen
        for px, py in line.points:
            yield (
                f'<circle cx="{x(px)}" cy="{y(py)}" r="3.5" fill="{colour}">'
                f"<title>{escape(line.name)}: {py:.4g} at {px:.4g}</title></circle>"
            )


def _legend(chart: Chart) -> Iterator[str]:
    for number, line in enumerate(chart.lines):
        column, row = number % _COLUMNS, number // _COLUMNS
        at_x = _LEFT + column * (_WIDTH - _LEFT) // _COLUMNS
        at_y = _HEIGHT + _LEGEND * row
        colour = COLOURS[line.colour % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        yield f'<path class="l" stroke="{colour}"{dash} d="M{at_x} {at_y}h22"/>'
        yield f'<text x="{at_x + 28}" y="{at_y + 4}">{escape(line.name)}</text>'
