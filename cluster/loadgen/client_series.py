"""What the client saw over time, and whole distributions, small enough to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.cluster.loadgen.goodput import COMPLETED
from kvferry.cluster.loadgen.measures import Pass
from kvferry.cluster.reports.common import Json, dist

MAX_BINS = 120


def series_json(measured: Pass) -> list[Json]:
    """Even stretches of the repeat, each of a whole number of seconds; at most ``MAX_BINS``.

    A gap between two tokens belongs to the stretch in which it ended.
    """
    sent = [sample for sample in measured.samples if sample.receipt.was_sent]
    if not sent:
        return []
    start = measured.started_at
    length_s = max(sample.receipt.ended_at for sample in sent) - start
    width_s = max(1, math.ceil(length_s / MAX_BINS))
    count = max(1, math.ceil(length_s / width_s))
    gaps: list[list[float]] = [[] for _ in range(count)]
    tokens, arrivals, ends = [0] * count, [0] * count, [0] * count

    def place(moment: float) -> int:
        return min(count - 1, max(0, int((moment - start) / width_s)))

    for sample in sent:
        arrivals[place(sample.receipt.sent_at)] += 1
        if sample.outcome == COMPLETED:
            ends[place(sample.receipt.ended_at)] += 1
        times = sample.receipt.token_times
        for number, moment in enumerate(times):
            at = place(moment)
            tokens[at] += 1
            if number:
                gaps[at].append(moment - times[number - 1])
    return [
        {
            "t_s": float(at * width_s),
            "width_s": float(width_s),
            "sent": arrivals[at],
            "completed": ends[at],
            "output_tokens": tokens[at],
            "itl_s": dist(gaps[at]),
        }
        for at in range(count)
    ]


def quantiles(values: Sequence[float]) -> list[float]:
    """The 0th, 1st, ... 100th percentile, between closest ranks; empty of none."""
    ordered = sorted(values)
    if not ordered:
        return []
    found = []
    for percent in range(101):
        at = percent / 100 * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (at - low))
    return found
