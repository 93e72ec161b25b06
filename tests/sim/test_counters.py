"""What the paged cache counts, in runs whose figures follow from the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.worker.reports import CacheCounters
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster


def started(**settings: Any) -> SimCluster:
    cluster = SimCluster(**settings)
    cluster.run(1.5)
    return cluster


def serve(cluster: SimCluster, name: str, prompt: Sequence[int], n: int = 1) -> None:
    cluster.submit(stub_spec(name, prompt, 6, num_branches=n))
    cluster.run_until_ended()
    cluster.assert_exact()
    cluster.run(3, lambda: not cluster.leftovers())


def counted(cluster: SimCluster, side: str) -> CacheCounters:
    return cluster.named(side).worker.load().cache


def test_hits_are_counted_by_where_the_block_came_from() -> None:
    cluster = started()
    serve(cluster, "first", range(20))
    assert counted(cluster, "prefill").queried_tokens == 20
    for side in ("prefill", "decode"):
        now = counted(cluster, side)
        assert (now.hit_tokens_local, now.hit_tokens_moved, now.hit_tokens_host) == (0, 0, 0)
    longer = [*range(20), *cluster.expected("first"), 70, 71]
    serve(cluster, "next turn", longer)
    decode, prefill = counted(cluster, "decode"), counted(cluster, "prefill")
    assert decode.hit_tokens_moved == 20, "the prompt had been moved there"
    assert decode.hit_tokens_local == 4, "a block of the answer had been computed there"
    assert (prefill.hit_tokens_local, prefill.hit_tokens_moved) == (20, 0)
    assert decode.queried_tokens == 20 + len(longer)


def test_copies_evictions_and_the_life_of_blocks_are_counted() -> None:
    cluster = started(decode_blocks=12, prefill_blocks=12)
    serve(cluster, "four", range(21), n=4)
    assert counted(cluster, "decode").num_cow_copies == 3
    before = counted(cluster, "prefill")
    assert before.num_evictions == 0 and before.mean_block_idle_s is None
    for number in range(4):
        serve(cluster, f"other {number}", range(100 * number + 100, 100 * number + 130))
    for side in ("prefill", "decode"):
        now = counted(cluster, side)
        assert now.num_evictions > 0
        assert now.mean_block_lifetime_s is not None and now.mean_block_idle_s is not None
        assert now.mean_block_lifetime_s > now.mean_block_idle_s > 0


def test_preemptions_and_what_is_computed_again_are_counted_by_reason() -> None:
    cluster = started(decode_blocks=9, num_decode=2, caching=False)
    serve(cluster, "pressed", range(20, 29), n=4)
    counts = [w.worker.load().cache for w in cluster.workers if w.decode is not None]
    assert sum(c.preemptions_recompute for c in counts) > 0
    assert sum(c.recomputed_tokens_preemption for c in counts) > 0
    assert all(c.preemptions_offload == 0 == c.recomputed_tokens_recovery for c in counts)
    assert cluster.router is not None
    cluster.submit(stub_spec("r", range(60, 73), 20))
    listener = cluster.listeners["r"]
    assert cluster.run(20, lambda: len(listener.tokens) >= 9)
    placed = cluster.router.requests[cluster.specs["r"].request_id].decode
    assert placed is not None
    cluster.kill(cluster.named(placed.worker.node_id))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert counted(cluster, "prefill").recomputed_tokens_recovery > 0


@pytest.mark.parametrize("num_branches", [1, 3])
def test_what_a_death_makes_computed_again_is_counted_for_every_branch(num_branches: int) -> None:
    cluster = started(num_decode=2, decode_blocks=100, prefill_blocks=100)
    cluster.submit(stub_spec("r", range(60, 69), 40, num_branches=num_branches))
    listener = cluster.listeners["r"]
    assert cluster.run(20, lambda: len(listener.tokens) >= 20)
    (serving,) = [w for w in cluster.workers if w.decode is not None and w.decode.legs]
    cluster.kill(serving)
    delivered = sum(map(len, listener.branches.values()))
    cluster.run_until_ended()
    cluster.assert_exact()
    alive = [w.worker.engine.scheduler.counters for w in cluster.workers if w.alive]
    counted = sum(counters.recomputed_tokens_recovery for counters in alive)
    assert counted >= delivered, "the prompt is here, cached; what was delivered is not"
