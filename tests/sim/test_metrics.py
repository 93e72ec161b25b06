"""What is exported of the stepped cluster: each request one outcome, totals that only rise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvferry.cluster.errors import Overloaded
from kvferry.cluster.metrics.catalog import CATALOG
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.worker.messages import Envelope, Role
from tests.cluster.metrics.scraping import Scrape, scrape
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster
from tests.sim.test_protocol import submit_mix


def started(**settings: object) -> SimCluster:
    cluster = SimCluster(**settings)  # type: ignore[arg-type]
    cluster.run(1.5)
    return cluster


def scraped(cluster: SimCluster) -> Scrape:
    assert cluster.router is not None
    return scrape(cluster.router, cluster.clock.now)


def outcomes(found: Scrape) -> dict[str, float]:
    return found.by("finished_reason", "kvferry_requests_finished_total")


def told_ends(cluster: SimCluster) -> Counter[str]:
    return Counter(
        end.finish.reason.value for listener in cluster.listeners.values() for end in listener.ends
    )


class Storm:
    """Random requests, cancels and deaths, with messages lost, doubled and delayed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = SimCluster(
            num_prefill=2,
            num_decode=2,
            prefill_blocks=24,
            decode_blocks=20,
            router_config=RouterConfig(queue_limit=6, max_attempts=2, worker_wait=2.0),
            scheduler=SchedulerConfig(4, 16, 8, 0.0),
        )
        self.cluster.run(1.5)
        self.cluster.filter = self.fault
        self.num_rejected = 0

    def fault(self, envelope: Envelope) -> Sequence[int]:
        at = self.random.random()
        if at < 0.04:
            return ()
        if at < 0.08:
            return (0, self.random.randrange(14))
        return (self.random.randrange(14),) if at < 0.16 else (0,)  # heartbeats overtake another

    def turn(self, number: int) -> None:
        cluster, choose = self.cluster, self.random
        assert cluster.router is not None
        if choose.random() < 0.35:
            length = choose.choice((1, 4, 9, 17, 30))
            spec = stub_spec(
                f"r{number}",
                [choose.randrange(900) for _ in range(length)],
                choose.choice((1, 3, 8)),
                num_branches=choose.choice((1, 1, 1, 3)),
                stop_token_ids=range(0, 997, 11),
            )
            try:
                cluster.submit(spec)
            except Overloaded:
                del cluster.listeners[spec.request_id]
                self.num_rejected += 1
        if choose.random() < 0.06 and cluster.router.requests:
            cluster.router.cancel(choose.choice(list(cluster.router.requests)), cluster.clock.now)
        if choose.random() < 0.03:
            computing = [w for w in cluster.workers if w.prefill is not None]
            choose.choice(computing).runner.fail_next = choose.choice((1, 2))
        if choose.random() < 0.015:
            victim = choose.choice([w for w in cluster.workers if w.alive])
            cluster.kill(victim)
            if choose.random() < 0.7:
                role = Role(victim.ref.node_id.partition("-")[0])
                cluster.start_worker(victim.ref.node_id, (role,))


@pytest.mark.parametrize("seed", range(6))
def test_every_accepted_request_is_in_exactly_one_outcome(seed: int) -> None:
    storm = Storm(seed)
    cluster, before = storm.cluster, scraped(storm.cluster)
    for number in range(400):
        storm.turn(number)
        cluster.advance()
        if not number % 20:
            now = scraped(cluster)
            in_flight = len(cluster.router.requests) if cluster.router is not None else 0
            accepted = now.value("kvferry_requests_accepted_total")
            assert sum(outcomes(now).values()) == accepted - in_flight
            later = now.counters()
            fallen = [key for key, value in before.counters().items() if later[key] < value]
            assert fallen == []
            before = now
    cluster.run_until_ended(120)
    found = scraped(cluster)
    assert found.value("kvferry_requests_accepted_total") == len(cluster.listeners)
    assert outcomes(found) == told_ends(cluster)
    assert len(outcomes(found)) > 2, "the storm had more than one kind of end"
    assert found.sum("kvferry_request_errors_total") == told_ends(cluster)["error"]
    tokens = sum(len(t) for x in cluster.listeners.values() for t in x.branches.values())
    assert found.value("kvferry_generation_tokens_total") == tokens
    prompts = (len(cluster.specs[name].prompt_token_ids) for name in cluster.listeners)
    assert found.value("kvferry_prompt_tokens_total") == sum(prompts)
    with_tokens = [x for x in cluster.listeners.values() if x.tokens]
    assert found.value("kvferry_time_to_first_token_seconds_count") == len(with_tokens)
    branches = [t for x in cluster.listeners.values() for t in x.branches.values() if t]
    gaps = sum(len(branch) - 1 for branch in branches)
    assert found.value("kvferry_inter_token_latency_seconds_count") == gaps
    well = told_ends(cluster)["stop"] + told_ends(cluster)["length"]
    assert found.value("kvferry_e2e_request_latency_seconds_count") == well


def test_a_run_without_faults_shows_what_was_done_where() -> None:
    cluster = started(num_prefill=1, num_decode=1)
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.run(1.0)
    found = scraped(cluster)
    assert set(found.by("worker_id", "kvferry_worker_ready")) == {"prefill-0", "decode-0"}
    assert found.by("role", "kvferry_engine_step_seconds_count").keys() == {"prefill", "decode"}
    prefill, decode = cluster.named("prefill").worker, cluster.named("decode").worker
    for name, worker in (("prefill-0", prefill), ("decode-0", decode)):
        steps = worker.engine.step_tokens.num_observed
        assert steps > 0
        assert found.value("kvferry_iteration_tokens_count", worker_id=name) == steps
        blocks = found.by("class", "kvferry_kv_blocks")
        assert sum(found.values("kvferry_kv_blocks", worker_id=name)) == 32
    assert blocks.keys() <= {"free", "cached"}
    moved = found.value("kvferry_transfer_blocks_total", connector="local", role="decode")
    side = cluster.named("decode").decode
    assert side is not None and moved == side.puller.blocks_moved > 0
    # one that ends with its first token has its reservation cancelled
    streams = [listener.branches.values() for listener in cluster.listeners.values()]
    pulled = sum(any(len(tokens) > 1 for tokens in branches) for branches in streams)
    assert found.value("kvferry_transfer_seconds_count", connector="local") == pulled > 5
    assert found.sum("kvferry_transfer_failures_total") == 0
    assert found.value("kvferry_leases_active", role="prefill") == 0
    served = len(cluster.listeners)
    assert found.sum("kvferry_router_decisions_total", policy="least_loaded") == served
    assert found.value("kvferry_request_prefill_time_seconds_count") == served


def test_a_worker_that_comes_again_goes_on_counting_where_its_last_life_ended() -> None:
    cluster = started(num_decode=2)
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.run(1.0)
    victim = cluster.named("decode-0")
    before = scraped(cluster)
    name = "kvferry_engine_step_seconds_count"
    steps = before.value(name, worker_id="decode-0")
    assert steps == victim.worker.engine.step_seconds.num_observed > 0
    cluster.kill(victim)
    cluster.run(3.0)
    dead = scraped(cluster)
    assert dead.value(name, worker_id="decode-0") == steps, "what it had counted stays"
    assert dead.value("kvferry_worker_ready", worker_id="decode-0") == 0
    assert not list(dead.values("kvferry_num_requests_running", worker_id="decode-0"))
    deaths = dead.value("kvferry_worker_deaths_total", worker_id="decode-0", cause="silent")
    assert deaths == 1
    cluster.start_worker("decode-0", (Role.DECODE,))
    cluster.run(1.5)
    cluster.listeners.clear()
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.run(1.0)
    fresh = cluster.named("decode-0").worker.engine.step_seconds.num_observed
    assert fresh > 0
    assert scraped(cluster).value(name, worker_id="decode-0") == steps + fresh


def test_a_new_router_counts_from_its_own_beginning() -> None:
    cluster = started()
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.run(1.0)
    assert scraped(cluster).sum("kvferry_engine_step_seconds_count") > 0
    cluster.kill_router()
    cluster.listeners.clear()
    cluster.start_router()
    cluster.run(2.0)
    assert scraped(cluster).sum("kvferry_engine_step_seconds_count") == 0
    before = {w.ref: w.worker.engine.step_seconds.num_observed for w in cluster.workers}
    submit_mix(cluster)
    cluster.run_until_ended()
    cluster.run(1.0)
    for w in cluster.workers:
        counted = w.worker.engine.step_seconds.num_observed - before[w.ref]
        found = scraped(cluster).value("kvferry_engine_step_seconds_count", worker_id=w.ref.node_id)
        assert found == counted > 0


def test_a_recovery_is_counted_with_its_gap_and_what_was_reused() -> None:
    cluster = started(num_decode=2)
    cluster.submit(stub_spec("r", range(40), 20))
    listener = cluster.listeners["r"]
    assert cluster.run(20, lambda: len(listener.tokens) >= 5)
    assert cluster.router is not None
    placed = next(iter(cluster.router.requests.values())).decode
    assert placed is not None
    cluster.kill(cluster.named(placed.worker.node_id))
    cluster.run_until_ended()
    found = scraped(cluster)
    assert found.value("kvferry_recovered_requests_total", cause="source_lost") == 1
    assert found.value("kvferry_recovery_gap_seconds_count") == 1
    assert 0 < found.value("kvferry_recovery_gap_seconds_sum") < 5
    assert found.value("kvferry_reused_tokens_total") == 40, "the prompt was cached at its source"
    assert found.sum("kvferry_worker_deaths_total") == 1


def test_every_metric_of_the_catalogue_is_on_the_page_with_its_type_and_meaning() -> None:
    found = scraped(started())
    for metric in CATALOG:
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        family = found.families[name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
    assert len(found.families) == len(CATALOG)


def test_the_gauges_of_block_classes_are_what_the_audit_finds() -> None:
    cluster = started(blocks_per_poll=1)
    submit_mix(cluster)
    seen: Counter[str] = Counter()
    while any(not listener.ends for listener in cluster.listeners.values()):
        cluster.advance()
        for sim in cluster.workers:
            classes = dict(sim.worker.load().block_classes)
            audited = sim.worker.audit(cluster.clock.now).counts
            assert classes == {name.value: count for name, count in audited.items()}
            assert sum(classes.values()) == sim.worker.engine.pool.num_blocks
            seen.update(name for name, count in classes.items() if count)
    assert seen.keys() >= {"referenced", "pinned", "cached", "free"}
    cluster.run(1.0)
    found = scraped(cluster)
    for sim in cluster.workers:
        for name, count in sim.worker.load().block_classes:
            at = {"worker_id": sim.ref.node_id, "class": name}
            assert found.value("kvferry_kv_blocks", **at) == count
