"""Counts of observations by size, in buckets fixed from the start.

Cheap enough for every step: one search among a dozen bounds and two additions. Does not know what
is observed nor who reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0)
TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class Histogram:
    """Observations so far.

    Attributes:
        bounds: upper ends of the buckets, ascending; each belongs to its bucket.
        counts: observations per bucket, not cumulative; the last is of all above the last bound.
        total: their sum.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, perhaps several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        """How many values were counted."""
        return sum(self.counts)
