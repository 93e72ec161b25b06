"""Whether two sets of repeats differ by more than their noise. Pure.

Where both sets answered the same plans, repeat for repeat, the repeats are paired: the interval is
Student's t of the differences, so that what a plan makes easy or hard for both cancels out. Else
Welch's t of the difference of means, its degrees of freedom (Welch-Satterthwaite) rounded down.

A set of one repeat says nothing of noise, and then there is no interval. Neither is there one where
the repeats do not differ at all and the means do: no spread is not certainty. A figure that counts
requests moves in steps; repeats that agree to a step would seem nearly certain, so the spread of
such a figure is taken as half a step at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from kvferry.cluster.loadgen.intervals import LEVEL, t_quantile
from kvferry.cluster.reports.common import Json

PAIRED, WELCH, NONE = "paired", "welch", "none"
_ROUNDING = 1e-9  # as a share of the means: a smaller spread is that of floating point

Readings = Mapping[str, float]
"""One figure of several repeats, by what tells the repeats' plans apart (their fingerprints)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of B less that of A.

    Attributes:
        a, b: means over the repeats; ``num_a``, ``num_b`` are their numbers.
        low, high: interval of ``b - a``; None where noise is unknown, for want of repeats or
            of any spread between them.
        method: ``paired``, ``welch`` or ``none``.
        more_is_better: what ``better`` goes by.
    """

    a: float
    b: float
    low: float | None
    high: float | None
    method: str
    num_a: int
    num_b: int
    more_is_better: bool = True

    @property
    def mean(self) -> float:
        """``b - a``."""
        return self.b - self.a

    @property
    def is_flat(self) -> bool:
        """Whether noise is unknown although there are repeats: they do not differ."""
        return self.low is None and self.num_a > 1 and self.num_b > 1

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether the interval leaves out 0; None where there is none."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> str | None:
        """``a`` or ``b`` where the difference is beyond noise, else None."""
        if not self.is_beyond_noise:
            return None
        return "b" if (self.mean > 0) == self.more_is_better else "a"

    def relative(self, value: float | None) -> float | None:
        """``value`` as a share of A's mean; None of nothing."""
        return None if value is None or self.a == 0 else value / abs(self.a)

    def to_json(self) -> Json:
        """Every figure, absolute and as a share of A's mean."""
        return {
            "a": self.a,
            "b": self.b,
            "difference": self.mean,
            "low": self.low,
            "high": self.high,
            "relative": self.relative(self.mean),
            "relative_low": self.relative(self.low),
            "relative_high": self.relative(self.high),
            "method": self.method,
            "num_a": self.num_a,
            "num_b": self.num_b,
            "beyond_noise": self.is_beyond_noise,
            "better": self.better,
        }


def difference(
    a: Readings,
    b: Readings,
    more_is_better: bool = True,
    level: float = LEVEL,
    step: float = 0.0,
) -> Difference | None:
    """B less A with an interval of ``level``; None where one of them has no reading.

    ``step`` is what one request more or less makes in a reading; 0 of figures without steps.
    """
    if not a or not b:
        return None
    mean_a, mean_b = fmean(a.values()), fmean(b.values())
    half: float | None = None
    method = NONE
    if a.keys() == b.keys() and len(a) > 1:
        gaps = [b[key] - a[key] for key in a]
        method = PAIRED
        spread = max(stdev(gaps), step / 2)
        half = t_quantile(len(gaps) - 1, level) * spread / math.sqrt(len(gaps))
    elif len(a) > 1 and len(b) > 1:
        method = WELCH
        half = _welch(list(a.values()), list(b.values()), level, step)
    gap = mean_b - mean_a
    nothing = _ROUNDING * max(abs(mean_a), abs(mean_b))
    if half is not None and half <= nothing < abs(gap):
        half = None
    low, high = (None, None) if half is None else (gap - half, gap + half)
    return Difference(mean_a, mean_b, low, high, method, len(a), len(b), more_is_better)


def _welch(a: list[float], b: list[float], level: float, step: float) -> float:
    """Half of the interval's width. Both sides' least variances make half a step together."""
    least = step**2 / 8
    part_a, part_b = max(variance(a), least) / len(a), max(variance(b), least) / len(b)
    total = part_a + part_b
    if total == 0:
        return 0.0
    freedom = total**2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return t_quantile(max(1, math.floor(freedom)), level) * math.sqrt(total)
