"""What the workers have counted, over all their lives, from the reports in their heartbeats.

A worker counts from zero in each of its lives. Here a name's totals never fall: what an earlier
life was last heard to have counted stays, and the present one's counts are added to it. A life that
is older than this router counts from its first report here: what it counted before was another
router's to tell.

Pure; does not know how totals are exported, nor what any worker is doing now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvferry.cluster.deaths import DeathCause
from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.catalog import Metric
from kvferry.engine.histogram import Histogram
from kvferry.worker.messages import HistogramReport, LoadReport, NodeRef, Role

Key = tuple[Metric, tuple[str, ...]]


@dataclass(slots=True)
class Totals:
    """Counters and histograms by metric and the values of its own labels."""

    counters: Counter[Key] = field(default_factory=Counter)
    histograms: dict[Key, Histogram] = field(default_factory=dict)

    def add(self, other: Totals, sign: int = 1) -> None:
        """Add another's to these, or take them away."""
        for key, value in other.counters.items():
            self.counters[key] += sign * value
        for key, theirs in other.histograms.items():
            ours = self.histograms.setdefault(key, Histogram(theirs.bounds))
            ours.counts = [a + sign * b for a, b in zip(ours.counts, theirs.counts, strict=True)]
            ours.total += sign * theirs.total


@dataclass(slots=True)
class KnownWorker:
    """A worker's name in its last known life.

    Attributes:
        ref: that life.
        roles: what it serves.
        load: its newest report.
        earlier: the lives before, less what this one counted before this router heard of it.
        deaths: of all its lives, by how they were found out.
        retired: it was drained and has left, so that nobody misses it.
    """

    ref: NodeRef
    roles: tuple[Role, ...]
    load: LoadReport | None = None
    earlier: Totals = field(default_factory=Totals)
    deaths: Counter[DeathCause] = field(default_factory=Counter)
    retired: bool = False


class Ledger:
    """See the module. ``workers``: by name, dead ones too."""

    def __init__(self, router_epoch: int) -> None:
        self.workers: dict[str, KnownWorker] = {}
        self._router_epoch = router_epoch

    def joined(self, ref: NodeRef, roles: tuple[Role, ...]) -> None:
        """A life of a worker is known; what an earlier one counted is kept."""
        known = self.workers.get(ref.node_id)
        if known is None:
            self.workers[ref.node_id] = KnownWorker(ref, roles)
        elif known.ref.epoch < ref.epoch:
            if known.load is not None:
                known.earlier.add(counted(known.load))
            known.ref, known.roles, known.load, known.retired = ref, roles, None, False

    def heard(self, ref: NodeRef, load: LoadReport) -> None:
        """A life has reported; an older report than the last one changes nothing."""
        known = self.workers.get(ref.node_id)
        if known is None or known.ref != ref:
            return
        if known.load is None:
            if ref.epoch < self._router_epoch:
                known.earlier.add(counted(load), -1)
        elif load.tallies.number < known.load.tallies.number:
            return
        known.load = load

    def died(self, ref: NodeRef, cause: DeathCause) -> None:
        """A life is over."""
        known = self.workers.get(ref.node_id)
        if known is not None:
            known.deaths[cause] += 1

    def left(self, ref: NodeRef) -> None:
        """A worker was drained and has left: it is not missing."""
        known = self.workers.get(ref.node_id)
        if known is not None and known.ref == ref:
            known.retired = True

    def totals(self) -> Iterator[tuple[KnownWorker, Totals]]:
        """Every known worker with all that it has counted."""
        for known in self.workers.values():
            whole = Totals()
            whole.add(known.earlier)
            if known.load is not None:
                whole.add(counted(known.load))
            yield known, whole


def counted(load: LoadReport) -> Totals:
    """The totals that one report states."""
    cache, tallies = load.cache, load.tallies
    found = Totals()
    found.counters.update(
        {
            (catalog.CACHE_QUERIES, ()): cache.queried_tokens,
            (catalog.CACHE_HITS, ("local",)): cache.hit_tokens_local,
            (catalog.CACHE_HITS, ("moved",)): cache.hit_tokens_moved,
            (catalog.CACHE_HITS, ("host",)): cache.hit_tokens_host,
            (catalog.RECOMPUTED, ("preemption",)): cache.recomputed_tokens_preemption,
            (catalog.RECOMPUTED, ("recovery",)): cache.recomputed_tokens_recovery,
            (catalog.PREEMPTIONS, ("recompute",)): cache.preemptions_recompute,
            (catalog.PREEMPTIONS, ("offload",)): cache.preemptions_offload,
            (catalog.EVICTIONS, ()): cache.num_evictions,
            (catalog.COW_COPIES, ()): cache.num_cow_copies,
            (catalog.LEASES_EXPIRED, ()): tallies.num_leases_expired,
        }
    )
    for kind, count in tallies.refused:
        found.counters[catalog.STALE, (kind,)] += count
    for port, reason, count in tallies.connections_refused:
        found.counters[catalog.CONNECTIONS_REFUSED, (port, reason)] += count
    histograms: dict[Key, HistogramReport] = {
        (catalog.STEPS, ()): tallies.step_seconds,
        (catalog.ITERATION_TOKENS, ()): tallies.step_tokens,
    }
    for transfer in tallies.transfers:
        connector = transfer.connector
        found.counters[catalog.TRANSFER_BLOCKS, (connector,)] += transfer.num_moved
        found.counters[catalog.TRANSFER_BYTES, (connector,)] += transfer.bytes_moved
        for reason, count in transfer.failures:
            found.counters[catalog.TRANSFER_FAILURES, (connector, reason)] += count
        histograms[catalog.TRANSFER_TIME, (connector,)] = transfer.seconds
    found.histograms.update(_known(histograms))
    return found


def _known(reports: Mapping[Key, HistogramReport]) -> Iterator[tuple[Key, Histogram]]:
    for key, report in reports.items():
        if report.bucket_counts:
            yield key, Histogram(key[0].bounds, list(report.bucket_counts), report.total)
