"""Preemption on a decode worker with a host tier, through the whole protocol."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.costs import Costs
from kvferry.engine.engine import Engine
from kvferry.engine.offload import Offloading
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_transfer.local import LocalConnector
from kvferry.kv_transfer.memory import allocate_private
from kvferry.worker.host_memory import HostMemory
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import Worker
from tests.engine.dict_mover import FixedCosts
from tests.fakes import StubRunner, stub_layout, stub_spec
from tests.sim.cluster import MODEL, SimCluster, SimWorker


@dataclass
class TieredCluster(SimCluster):
    """Every worker has a host tier of real memory."""

    num_slots: int = 64
    costs: Costs = field(default_factory=lambda: FixedCosts(True))

    def build(self, ref: NodeRef, num_blocks: int) -> SimWorker:
        layout = stub_layout(self.block_size)
        memory = allocate_private(num_blocks, layout.block_bytes())
        connector = LocalConnector(
            self.fabric,
            memory,
            worker_id=ref.node_id,
            epoch=ref.epoch,
            model=MODEL,
            layout=layout,
            blocks_per_poll=self.blocks_per_poll,
        )
        offloading = Offloading(
            HostTier(self.num_slots, caching=self.caching),
            HostMemory(memory.blocks, self.num_slots),
            self.block_size,
            self.clock,
            self.costs,
        )
        engine = Engine(
            self.scheduler,
            StubRunner(memory.blocks, self.block_size),
            BlockPool(num_blocks, memory.raise_generation, self.index()),
            self.block_size,
            MODEL,
            self.clock,
            offloading=offloading,
        )
        worker = Worker(ref, engine, connector, self.times)
        return SimWorker(worker, engine._runner, connector)


def small(**more: object) -> TieredCluster:
    """Four requests that grow beyond what decode has blocks for."""
    cluster = TieredCluster(decode_blocks=14, **more)  # type: ignore[arg-type]
    cluster.run(1.5)
    for number in range(4):
        prompt = [number * 30 + place for place in range(9 + number)]
        cluster.submit(stub_spec(f"r{number}", prompt, 16))
    return cluster


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_are_exact_whichever_way_kv_comes_back(offload: bool, caching: bool) -> None:
    cluster = small(caching=caching, costs=FixedCosts(offload))
    assert cluster.router is not None
    requests = list(cluster.router.requests.values())
    cluster.run_until_ended()
    cluster.assert_exact()
    counters = cluster.named("decode").worker.engine.scheduler.counters
    preempted = sum(r.decode_stats.num_preemptions for r in requests if r.decode_stats)
    recomputed = sum(r.decode_stats.recomputed_prompt_tokens for r in requests if r.decode_stats)
    assert preempted == counters.num_preemptions > 0
    assert (counters.preemptions_offload > 0) == offload
    if offload:
        assert recomputed == 0 == counters.recomputed_tokens_preemption
        assert counters.host_hit_blocks > 0
    elif not caching:
        assert recomputed > 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


def test_a_swapped_request_is_reported_and_can_be_cancelled() -> None:
    cluster = small(caching=False)
    worker = cluster.named("decode").worker
    scheduler = worker.engine.scheduler
    assert cluster.run(30, lambda: scheduler.num_swapped > 0)
    load = worker.load()
    assert load.num_swapped == scheduler.num_swapped >= 1
    assert load.num_waiting == len(scheduler.waiting) - load.num_swapped
    name = scheduler.waiting[0].key.request_id
    assert cluster.router is not None and cluster.router.cancel(name, cluster.clock.now)
    cluster.run_until_ended()
    offloading = worker.engine.offloading
    assert offloading is not None and not len(offloading.tier)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


def test_the_audit_of_a_worker_names_what_leaked_in_its_host_tier() -> None:
    cluster = small(caching=False)
    worker = cluster.named("decode").worker
    assert cluster.run(30, lambda: worker.engine.scheduler.num_swapped > 0)
    assert worker.audit(cluster.clock.now).consistent
    (swapped, *_) = [s for s in worker.engine.scheduler.waiting if s.num_swapped_tokens]
    del worker.engine.scheduler.sequences[swapped.key]
    problems = worker.audit(cluster.clock.now).problems
    assert any("leaked: kept for" in p and swapped.key.request_id in p for p in problems)


def test_the_death_of_the_router_frees_the_host_tier() -> None:
    cluster = small(caching=False)
    worker = cluster.named("decode").worker
    assert cluster.run(30, lambda: worker.engine.scheduler.num_swapped > 0)
    cluster.kill_router()
    offloading = worker.engine.offloading
    assert offloading is not None
    assert cluster.run(5, lambda: not len(offloading.tier))


def test_priorities_decide_who_is_placed_first() -> None:
    cluster = SimCluster(
        decode_blocks=8,
        caching=False,
        scheduler=SchedulerConfig(1, 32, 8, 0.0, 10.0),
        router_config=RouterConfig(ageing=10.0),
    )
    cluster.run(1.5)
    order: list[str] = []
    for name, priority in (("first", 0), ("late", 3), ("soon", 0), ("next", 1)):
        spec = stub_spec(name, range(20), 6)
        cluster.submit(replace(spec, priority=priority))
    while len(order) < 4:
        cluster.advance()
        order += [n for n, x in cluster.listeners.items() if x.ends and n not in order]
        assert cluster.clock.now < 60
    assert order == ["first", "soon", "next", "late"]
    cluster.assert_exact()


@pytest.mark.parametrize("blocks", [8, 10, 12, 14])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_whose_kv_waits_in_the_host_tier_are_exact(blocks: int, caching: bool) -> None:
    cluster = TieredCluster(decode_blocks=blocks, caching=caching)
    cluster.run(1.5)
    for number in range(2):
        prompt = range(number * 30, number * 30 + 9 + number)
        cluster.submit(stub_spec(f"r{number}", prompt, 12, num_beams=3))
    cluster.run_until_ended(200)
    cluster.assert_exact()
    assert cluster.named("decode").worker.engine.scheduler.counters.preemptions_offload > 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
