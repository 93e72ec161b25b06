"""What the router counts of its requests, while it runs.

Plain numbers, added to where something happens: an event message costs one observation, never one
per token. Knows the events, not how they are exported (``cluster.metrics.families``), nor what
workers count (``cluster.metrics.ledger``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvferry.cluster.errors import public_class
from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.catalog import Metric
from kvferry.cluster.metrics.ledger import Ledger
from kvferry.cluster.routed_request import RoutedBranch, RoutedRequest
from kvferry.cluster.timing import request_timing
from kvferry.engine.histogram import Histogram
from kvferry.engine.request import FinishReason
from kvferry.worker.messages import FailureCause

MAX_TEXTS = 32  # reasons that a policy gives; each is a series, and what comes later is "other"

_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)
_ROUTERS_OWN = (
    *(catalog.TTFT, catalog.ITL, catalog.TPOT, catalog.E2E, catalog.QUEUE_TIME),
    *(catalog.PREFILL_TIME, catalog.DECODE_TIME, catalog.HANDOFF_TIME, catalog.RECOVERY_GAP),
)


class Recorder:
    """See the module.

    Attributes:
        ledger: what the workers have told that they counted.
        counts: by metric and the values of its own labels.
        histograms: the router's, by metric.
    """

    def __init__(self, router_epoch: int) -> None:
        self.ledger = Ledger(router_epoch)
        self.counts: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
        self.histograms = {metric: Histogram(metric.bounds) for metric in _ROUTERS_OWN}
        self.generation_tokens = 0
        self._first_token = self.histograms[catalog.TTFT]
        self._gaps = self.histograms[catalog.ITL]
        self._recovery = self.histograms[catalog.RECOVERY_GAP]
        self._reasons: set[str] = set()

    def accepted(self, request: RoutedRequest) -> None:
        """A request was taken in."""
        self.counts[catalog.PROMPT_TOKENS, ()] += len(request.spec.prompt_token_ids)

    def rejected(self, error: BaseException) -> None:
        """A request was refused before it was accepted."""
        self.counts[catalog.REJECTED, (public_class(error).__name__,)] += 1

    def connection_refused(self, port: str, reason: str) -> None:
        """A connection was refused before anything was asked over it."""
        self.counts[catalog.CONNECTIONS_REFUSED, (port, reason)] += 1

    def connections_refused(self, port: str, so_far: Mapping[str, int]) -> None:
        """So many were refused at a port that counts for itself, by reason."""
        for reason, count in so_far.items():
            self.counts[catalog.CONNECTIONS_REFUSED, (port, reason)] = count

    def placed(self, policy: str, reason: str) -> None:
        """A request has a place."""
        if reason not in self._reasons:
            if len(self._reasons) >= MAX_TEXTS:
                reason = "other"
            self._reasons.add(reason)
        self.counts[catalog.DECISIONS, (policy, reason)] += 1

    def delivered(
        self, request: RoutedRequest, branch: RoutedBranch, count: int, now: float
    ) -> None:
        """The listener has just accepted ``count`` tokens of a branch, at least one."""
        self.generation_tokens += count
        before = len(branch.token_times) - count
        if before:
            self._gaps.observe(now - branch.token_times[before - 1])
        elif not branch.number:
            self._first_token.observe(now - request.received_at)
        if count > 1:
            self._gaps.observe(0.0, count - 1)
        if request.lost_at is not None:
            self._recovery.observe(now - request.lost_at)
            request.lost_at = None

    def recovered(self, request: RoutedRequest, cause: FailureCause, now: float) -> None:
        """An attempt is lost, and another begins."""
        self.counts[catalog.RECOVERED, (cause.value,)] += 1
        if request.lost_at is None:
            request.lost_at = now

    def ended(self, request: RoutedRequest, now: float) -> None:
        """A request has ended, in whatever way; its end is known."""
        assert request.end is not None
        counts = self.counts
        counts[catalog.RECOMPUTED_PROMPT, ()] += request.recomputed_prompt_tokens
        counts[catalog.REUSED, ()] += request.reused_tokens
        if request.end.error is not None:
            counts[catalog.ERRORS, (public_class(request.end.error).__name__,)] += 1
        if request.end.finish.reason not in _ENDED_WELL:
            return
        timing, times = request_timing(request, now), request.token_times
        for metric, seconds in (
            (catalog.E2E, timing.e2e_s),
            (catalog.QUEUE_TIME, timing.queue_s),
            (catalog.PREFILL_TIME, timing.prefill_s),
            (catalog.DECODE_TIME, times[-1] - times[0] if times else None),
            (catalog.HANDOFF_TIME, timing.handoff_s),
            (catalog.TPOT, timing.tpot_s),
        ):
            if seconds is not None:
                self.histograms[metric].observe(seconds)
