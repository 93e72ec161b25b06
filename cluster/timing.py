"""A request's times, from its lifetime events: all splits follow from these.

Every difference is between two readings of one clock. The router's clock gives receipt, dispatch
and the tokens' times; the workers' own durations are taken as they measured them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.cluster.routed_request import RoutedRequest


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds; None where the moment never came. queue + prefill + delivery = ttft.

    ``token_times`` are those of the first branch, router clock.
    """

    queue_s: float | None
    prefill_s: float | None
    delivery_s: float | None
    ttft_s: float | None
    handoff_s: float | None
    decode_wait_s: float | None
    first_step_s: float | None
    ttst_s: float | None
    tpot_s: float | None
    e2e_s: float
    token_times: Sequence[float]

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between tokens; one fewer than tokens."""
        return tuple(b - a for a, b in pairwise(self.token_times))


def request_timing(request: RoutedRequest, ended_at: float) -> RequestTiming:
    """The times of a request that has ended at ``ended_at`` (router clock)."""
    times = request.token_times
    received = request.received_at
    ttft = times[0] - received if times else None
    ttst = times[1] - received if len(times) > 1 else None
    stats, decode = request.first_prefill_stats or request.prefill_stats, request.gap_stats
    queue = prefill = delivery = None
    if ttft is not None and stats is not None and request.dispatched_at is not None:
        queue = request.dispatched_at - received + stats.queue_s
        prefill = stats.prefill_s
        delivery = ttft - queue - prefill
    wait = decode.decode_wait_s if decode is not None else None
    first_step = decode.first_step_s if decode is not None else None
    handoff = None
    if len(times) > 1 and wait is not None and first_step is not None:
        # Where one worker did both, all that is left is the jitter of two messages.
        handoff = max(0.0, times[1] - times[0] - wait - first_step)
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return RequestTiming(
        queue,
        prefill,
        delivery,
        ttft,
        handoff,
        wait,
        first_step,
        ttst,
        tpot,
        ended_at - received,
        times,
    )
