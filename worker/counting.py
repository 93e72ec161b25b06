"""What a worker, its engine, pool and tables have counted, as reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.engine.engine import Engine
from kvferry.engine.histogram import TRANSFER_SECONDS, Histogram
from kvferry.kv_transfer.connector import ReadStatus
from kvferry.worker.reports import CacheCounters, HistogramReport, TransferTally, WorkerTallies

READ_FAILURES = (
    *(status.value for status in ReadStatus if status is not ReadStatus.OK),
    "late",  # no block within the time
    "connection",  # the read could not be begun
)


@dataclass(slots=True)
class TransferCount:
    """What one connector has read; see ``TransferTally``."""

    num_moved: int = 0
    bytes_moved: int = 0
    failures: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(READ_FAILURES, 0)))
    seconds: Histogram = field(default_factory=lambda: Histogram(TRANSFER_SECONDS))

    def tally(self, connector: str) -> TransferTally:
        """For the load report."""
        return TransferTally(
            connector, self.num_moved, self.bytes_moved, pairs(self.failures), told(self.seconds)
        )


def pairs(counter: Counter[str]) -> tuple[tuple[str, int], ...]:
    """A counter as a message carries it."""
    return tuple(sorted(counter.items()))


def told(histogram: Histogram) -> HistogramReport:
    """A histogram as a message carries it."""
    return HistogramReport(tuple(histogram.counts), histogram.total)


def worker_tallies(engine: Engine, refused: Counter[str], number: int) -> WorkerTallies:
    """What every worker counts; its roles add theirs."""
    return WorkerTallies(
        number, told(engine.step_seconds), told(engine.step_tokens), pairs(refused)
    )


def cache_counters(engine: Engine) -> CacheCounters:
    """The totals of one engine since its start."""
    kv, pool, counted = engine.kv, engine.pool, engine.scheduler.counters
    return CacheCounters(
        queried_tokens=kv.queried_tokens,
        hit_tokens_local=kv.hit_tokens_local,
        hit_tokens_moved=kv.hit_tokens_moved,
        hit_tokens_host=counted.hit_tokens_host,
        num_evictions=pool.num_evictions,
        num_cow_copies=kv.num_copies,
        preemptions_recompute=counted.preemptions_recompute,
        preemptions_offload=counted.preemptions_offload,
        recomputed_tokens_preemption=counted.recomputed_tokens_preemption,
        recomputed_tokens_recovery=counted.recomputed_tokens_recovery,
        mean_block_lifetime_s=pool.lifetimes.mean_s,
        mean_block_idle_s=pool.idle_times.mean_s,
    )
