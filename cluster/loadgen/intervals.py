"""How sure a figure is: 95 % confidence intervals over repeats. Pure.

Repeats are few and each is one independent reading of a figure, so the interval is Student's t:
mean ± t · s / √n, with t of n − 1 degrees of freedom. One repeat has no interval. Requests of one
repeat wait for each other, so nothing is made of their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from kvferry.cluster.reports.common import Json

LEVEL = 0.95
METHOD = "student-t over repeats"

_FIGURES = (
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_per_s",
    "slo_fraction",
    "cpu_s_per_output_token",
)
_DISTS = ("ttft_s", "ttst_s", "tpot_s", "itl_s", "e2e_s")
_OF_DIST = ("mean", "p50", "p90", "p99")


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The number that Student's t stays below, in size, with probability ``level``.

    The distribution function for whole degrees of freedom is a finite sum (Abramowitz and Stegun
    26.7.3 and 26.7.4); it is inverted by bisection.
    """
    if freedom < 1:
        raise ValueError(f"got {freedom} degrees of freedom, wanted at least 1")
    low, high = 0.0, 1.0
    while _two_sided(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _two_sided(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term = total = (cosine if freedom > 1 else 0.0) if is_odd else 1.0
    for number in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    if is_odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def interval(values: Sequence[float]) -> Json | None:
    """Mean and interval of one figure's repeats; None of fewer than two."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"n": len(values), "mean": mean, "low": mean - half, "high": mean + half}


def intervals_json(repeats: Sequence[Json]) -> Json | None:
    """Of every figure in the ``results`` of some repeats; None of fewer than two."""
    if len(repeats) < 2:
        return None
    figures = {name: _of([repeat[name] for repeat in repeats]) for name in _FIGURES}
    dists = {
        name: {key: _of([(repeat[name] or {}).get(key) for repeat in repeats]) for key in _OF_DIST}
        for name in _DISTS
    }
    return {"level": LEVEL, "method": METHOD, **figures, **dists}


def _of(values: Sequence[float | None]) -> Json | None:
    """None as soon as one repeat does not have the figure."""
    known = [value for value in values if value is not None]
    return interval(known) if len(known) == len(values) else None
