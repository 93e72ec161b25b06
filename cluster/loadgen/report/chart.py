"""A plot as data: lines, their intervals, axes. What draws it knows nothing of loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Okabe and Ito's colours, which people of every kind of sight can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; ``intervals`` has (low, high) of each point, or None where there is none.

    Lines of one ``colour`` (an index) belong together; ``is_dashed`` tells them apart.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int = 0
    intervals: tuple[tuple[float, float] | None, ...] = ()
    is_dashed: bool = False
    has_marks: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot. ``name`` is that of its file; the y axis begins at 0."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = field(default_factory=tuple)
    y_max: float | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing to draw."""
        return not any(line.points for line in self.lines)

    def spans(self) -> tuple[float, float, float]:
        """Lowest and highest x, highest y (never 0).

        Wide intervals of few repeats are cut, or nothing else could be seen.
        """
        points = [point for line in self.lines for point in line.points]
        tops = [y for _, y in points]
        highest = max(tops, default=1.0)
        ends = [pair[1] for line in self.lines for pair in line.intervals if pair is not None]
        reach = min(max(ends, default=highest), 2 * highest)
        top = self.y_max if self.y_max is not None else max(highest, reach)
        xs = [x for x, _ in points] or [0.0, 1.0]
        left, right = min(0.0, *xs), max(xs)
        if any(line.has_marks for line in self.lines):
            right += 0.04 * (right - left)
        return left, right if right > left else left + 1.0, top if top > 0 else 1.0


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    if not raw > 0:
        return [low]
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * by for by in (1, 2, 5, 10) if power * by >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
