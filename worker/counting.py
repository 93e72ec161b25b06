"""What the engine, its pool and its tables have counted, as one report."""

from __future__ import annotations

from kvferry.engine.engine import Engine
from kvferry.worker.reports import CacheCounters


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
