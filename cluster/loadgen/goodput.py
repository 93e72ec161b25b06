"""Goodput: how many requests per second keep to an objective. Pure; looks at rows of documents.

In an open loop the load is given, so good requests are counted over the time in which it was
given: from the first session's planned begin to the last one's, and one mean gap more, for n
begins have n - 1 gaps between them. How long the last answers ran then changes nothing, and
two servers that are good to every request have equal goodput. In a closed loop the load follows the
server, and good requests are counted over the repeat's duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.reports.common import Json

COMPLETED, FAILED, CANCELLED, UNFINISHED = "completed", "failed", "cancelled", "unfinished"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, in seconds; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_kept(self, outcome: str, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a request completed within it. One without a second token has no TPOT."""
        if outcome != COMPLETED or ttft_s is None:
            return False
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


def goodput_json(
    rows: Sequence[Mapping[str, Any]], slo: Slo | None, is_open: bool, duration_s: float
) -> Json:
    """``goodput_per_s``, ``goodput_span_s`` and ``slo_fraction`` of one repeat.

    A failed request is a request that was not good; a cancelled one is none at all.

    Args:
        rows: its requests, as documents have them.
        slo: None: nothing was asked, and the figures are null.
        is_open: whether requests came at their times.
        duration_s: from the first counted request's intended moment to the last end.
    """
    counted = [row for row in rows if row["is_counted"]]
    span_s = _span_s(counted) if is_open else 0.0
    span_s = span_s or duration_s
    if slo is None:
        return {"goodput_per_s": None, "goodput_span_s": span_s, "slo_fraction": None}
    good = sum(slo.is_kept(row["outcome"], row["ttft_s"], row["tpot_s"]) for row in counted)
    tried = sum(row["outcome"] in (COMPLETED, FAILED) for row in counted)
    return {
        "goodput_per_s": good / span_s if span_s > 0 else None,
        "goodput_span_s": span_s,
        "slo_fraction": good / tried if tried else None,
    }


def _span_s(counted: Sequence[Mapping[str, Any]]) -> float:
    """The time in which sessions began; 0 of fewer than two, and where all began at once."""
    begins = [float(row["intended_s"]) for row in counted if row["turn"] == 0]
    if len(begins) < 2:
        return 0.0
    return (max(begins) - min(begins)) * len(begins) / (len(begins) - 1)
