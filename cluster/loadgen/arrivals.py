"""When sessions begin: offsets in seconds from the start, in rising order. Pure.

An open loop is a renewal process of rate 1 (constant, Poisson or gamma gaps), bent to a profile
of rates over time: flat, after a ramp, or on and off. What comes at unit time ``u`` comes at the
moment by which the profile has let ``u`` arrivals through, so that the gaps keep their kind at
every rate. A trace brings its own offsets, which are stretched, and spread over the grid that
they were rounded to.

The first arrival is at 0, or as soon as the profile lets it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvferry.cluster.loadgen.errors import BadLoad

CONSTANT = "constant"
POISSON = "poisson"
GAMMA = "gamma"
ARRIVALS = (CONSTANT, POISSON, GAMMA)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals at ``rate`` per second, whatever becomes of them.

    Attributes:
        kind: ``constant``, ``poisson`` or ``gamma`` gaps.
        burstiness: of gamma gaps: their shape; 1 is Poisson, less comes in bursts. The gaps'
            coefficient of variation is ``1 / sqrt(burstiness)``.
        ramp_s: the rate grows from 0 in so many seconds.
        on_s, off_s: ``rate`` for so long, then nothing for so long, again and again; 0: always on.
    """

    rate: float
    kind: str = POISSON
    burstiness: float = 1.0
    ramp_s: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if value <= 0:
                raise BadLoad(f"{name}: got {value}, wanted more than 0")
        for name, value in (("ramp_s", self.ramp_s), ("off_s", self.off_s), ("on_s", self.on_s)):
            if value < 0:
                raise BadLoad(f"{name}: got {value}, wanted 0 or more")
        if self.kind not in ARRIVALS:
            raise BadLoad(f"arrival: got {self.kind!r}, wanted {', '.join(ARRIVALS)}")
        if self.off_s > 0 and self.on_s <= 0:
            raise BadLoad(f"on_off: got {self.on_s} s on, wanted more than 0")

    def offsets(self, count: int, rng: random.Random) -> list[float]:
        """Of ``count`` arrivals."""
        gaps = (self._gap(rng) for _ in range(count - 1))
        return [self._when(unit) for unit in accumulate(gaps, initial=0.0)][:count]

    def _gap(self, rng: random.Random) -> float:
        """Of mean 1."""
        if self.kind == CONSTANT:
            return 1.0
        if self.kind == POISSON:
            return rng.expovariate(1.0)
        return rng.gammavariate(self.burstiness, 1 / self.burstiness)

    def _when(self, unit: float) -> float:
        """The moment by which the profile has let ``unit`` arrivals through."""
        ramped = self.rate * self.ramp_s / 2  # arrivals of the whole ramp
        if unit < ramped:
            on = math.sqrt(2 * self.ramp_s * unit / self.rate)
        else:
            on = self.ramp_s + (unit - ramped) / self.rate
        if self.off_s <= 0:
            return on
        return on + self.off_s * (on // self.on_s)


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """A trace's own offsets.

    Attributes:
        stretch: multiplies every offset: 4 makes the trace four times as slow.
        grid_s: the trace's times are rounded down to multiples of this (before stretching); each
            arrival is put somewhere into its stretch of the grid, evenly. 0: times are exact.
    """

    stretch: float = 1.0
    grid_s: float = 0.0

    def __post_init__(self) -> None:
        if self.stretch <= 0:
            raise BadLoad(f"stretch: got {self.stretch}, wanted more than 0")
        if self.grid_s < 0:
            raise BadLoad(f"grid_s: got {self.grid_s}, wanted 0 or more")

    def offsets(self, times: Sequence[float], rng: random.Random) -> list[float]:
        """Of the trace's ``times`` in seconds, in their order; never falling."""
        jittered = [time + rng.random() * self.grid_s for time in times]
        # Within a stretch of the grid the trace's order stands, the moments are dealt out to it.
        return [self.stretch * time for time in _dealt(times, jittered)]


def _dealt(times: Sequence[float], jittered: Sequence[float]) -> Iterator[float]:
    """The jittered times in rising order, which keeps each in its stretch if ``times`` rise."""
    if any(later < earlier for earlier, later in pairwise(times)):
        raise BadLoad("trace: times fall; wanted rows in order of arrival")
    yield from sorted(jittered)


def closed_starts(concurrency: int, ramp_s: float) -> list[float]:
    """When each client of a closed loop begins: evenly over the ramp."""
    if concurrency < 1:
        raise BadLoad(f"concurrency: got {concurrency}, wanted at least 1")
    return [ramp_s * client / concurrency for client in range(concurrency)]
