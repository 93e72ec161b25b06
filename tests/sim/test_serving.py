"""Serving in the simulated cluster without faults: movement, pressure, cancels, colocation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.engine.request import FinishReason, RequestId
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.faults import FaultPlan, FaultyConnector
from kvferry.worker.messages import Envelope
from kvferry.worker.worker import WorkerTimes
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster, body_name


def started(**settings: object) -> SimCluster:
    cluster = SimCluster(**settings)  # type: ignore[arg-type]
    cluster.run(1.5)
    return cluster


def assert_clean(cluster: SimCluster) -> None:
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("length", range(1, 14))
def test_prompts_of_every_residue_are_moved_and_never_computed_on_decode(length: int) -> None:
    cluster = started()
    cluster.named("decode").runner.forbid_prompt = True
    cluster.submit(stub_spec("r", range(50, 50 + length), 6))
    cluster.run_until_ended()
    cluster.assert_exact()
    decode = cluster.named("decode").decode
    assert decode is not None
    assert decode.puller.blocks_moved == -(-length // 4)
    assert_clean(cluster)


def test_blocks_are_read_while_later_chunks_are_still_computed() -> None:
    cluster = started()
    cluster.submit(stub_spec("r", range(50, 50 + 24), 4))  # three chunks of eight
    request = next(iter(cluster.router.requests.values()))  # type: ignore[union-attr]
    cluster.run_until_ended()
    assert request.prefill_stats is not None and request.prefill_stats.num_chunks == 3
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    assert request.decode_stats.transfer.blocks_before_last_chunk > 0
    assert request.decode_stats.transfer.blocks_moved == 6


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_the_token_limit_counts_token_one_once(num_tokens: int) -> None:
    cluster = started()
    listener = cluster.submit(stub_spec("r", range(9), num_tokens))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert listener.ends[0].finish.reason is FinishReason.LENGTH
    assert_clean(cluster)


def test_a_colocated_worker_serves_alone() -> None:
    cluster = started(num_prefill=0, num_decode=0, num_colocated=1)
    for i in range(6):
        cluster.submit(stub_spec(f"r{i}", range(i, i * 5 + 1), 7))
    cluster.run_until_ended()
    cluster.assert_exact()
    assert_clean(cluster)


def test_more_requests_than_the_decode_pool_holds_preempt_and_stay_right() -> None:
    cluster = started(
        decode_blocks=14,
        prefill_blocks=64,
        scheduler=SchedulerConfig(32, 64, 8, 0.0),
    )
    rng = random.Random(5)
    requests = []
    for i in range(32):
        prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 16))]
        cluster.submit(stub_spec(f"r{i}", prompt, rng.randrange(8, 24)))
        requests.append(cluster.router.requests[RequestId(f"r{i}")])  # type: ignore[union-attr]
    cluster.run_until_ended(300)
    cluster.assert_exact()
    preempted = sum(r.decode_stats.num_preemptions for r in requests if r.decode_stats)
    assert preempted >= 1
    recomputed = sum(r.decode_stats.recomputed_prompt_tokens for r in requests if r.decode_stats)
    assert recomputed >= 1, "what decode computes again is counted"
    assert cluster.router is not None
    assert cluster.router.counters["preempted"] == preempted
    assert_clean(cluster)


@pytest.mark.parametrize("after", range(14))
def test_a_cancel_in_every_state_frees_everything(after: int) -> None:
    cluster = started(blocks_per_poll=1)
    listener = cluster.submit(stub_spec("r", range(60, 83), 30))
    for _ in range(after):
        cluster.advance()
    assert cluster.router is not None
    assert cluster.router.cancel(RequestId("r"), cluster.clock.now)
    assert not cluster.router.cancel(RequestId("r"), cluster.clock.now)
    assert [end.finish.reason for end in listener.ends] == [FinishReason.ABORT]
    assert listener.tokens == cluster.expected("r")[: len(listener.tokens)]
    cluster.run(0.5)
    assert cluster.leftovers() == []


@pytest.mark.parametrize("kind", ["PullRefused", "LeaseEnded", "LegFailed", "CancelLeg"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_word_about_a_cancel_is_healed_by_the_lists(kind: str, count: int) -> None:
    cluster = started(blocks_per_poll=1)
    cluster.submit(stub_spec("r", range(60, 83), 30))
    cluster.submit(stub_spec("s", range(60, 79), 80))
    for _ in range(8):
        cluster.advance()
    dropped = 0

    def lose(envelope: Envelope) -> Sequence[int]:
        nonlocal dropped
        if body_name(envelope.body) == kind and dropped < count:
            dropped += 1
            return ()
        return (0,)

    cluster.filter = lose
    assert cluster.router is not None
    cluster.router.cancel(RequestId("r"), cluster.clock.now)
    cluster.run(2.3)
    for sim in cluster.workers:
        keys = [
            *(sim.prefill.jobs if sim.prefill else ()),
            *(sim.decode.legs if sim.decode else ()),
        ]
        assert all(key[0] != "r" for key in keys), (sim.ref, keys)
    cluster.run_until_ended()
    assert cluster.listeners["s"].tokens == cluster.expected("s")
    assert_clean(cluster)


def test_a_corrupted_block_is_read_again_and_the_stream_stays_right() -> None:
    cluster = started()
    decode = cluster.named("decode")
    flipped: list[bool] = []

    def flip_once(move: object, target: object) -> None:
        if not flipped:
            flipped.append(True)
            target[3] ^= 1  # type: ignore[index]

    decode.connector.tamper = flip_once
    cluster.submit(stub_spec("r", range(60, 83), 6))
    request = next(iter(cluster.router.requests.values()))  # type: ignore[union-attr]
    cluster.run_until_ended()
    assert flipped
    cluster.assert_exact()
    assert request.num_attempts == 1
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    assert request.decode_stats.transfer.reads_failed == 1
    assert_clean(cluster)


def test_a_block_that_stays_corrupt_fails_the_leg_and_is_never_sampled_from() -> None:
    cluster = started()
    decode = cluster.named("decode")

    def flip(move: object, target: object) -> None:
        target[3] ^= 1  # type: ignore[index]

    decode.connector.tamper = flip
    listener = cluster.submit(stub_spec("r", range(60, 83), 6))
    cluster.run_until_ended()
    (end,) = listener.ends
    assert type(end.error).__name__ == "TransferFailed"
    assert listener.tokens == cluster.expected("r")[: len(listener.tokens)]
    assert_clean(cluster)


def test_a_reader_that_stands_still_loses_its_lease_and_nothing_leaks() -> None:
    from dataclasses import replace

    cluster = SimCluster()
    cluster.times = replace(cluster.times, stall_limit=3.0)
    cluster = SimCluster(times=cluster.times)
    cluster.run(1.5)
    decode = cluster.named("decode")
    stalled = FaultyConnector(decode.connector, FaultPlan(stall=1.0), random.Random(1))
    decode.worker.connector = stalled
    decode.worker.reads._connector = stalled
    listener = cluster.submit(stub_spec("r", range(60, 83), 6))
    cluster.run_until_ended(60)
    assert listener.ends[0].error is not None
    assert_clean(cluster)


def test_a_step_that_raises_ends_its_requests_and_the_worker_serves_on() -> None:
    cluster = started()
    cluster.named("decode").runner.fail_next = True
    cluster.submit(stub_spec("r", range(9), 5))
    cluster.run_until_ended()
    cluster.assert_exact()  # the second attempt
    assert cluster.router is not None and cluster.router.counters["recovered"] == 1
    assert_clean(cluster)


def test_a_request_too_large_for_the_pool_is_refused_by_name() -> None:
    cluster = started(decode_blocks=4)
    listener = cluster.submit(stub_spec("r", range(9), 30))
    cluster.run_until_ended()
    (end,) = listener.ends
    assert type(end.error).__name__ == "InvalidRequest"
    assert "38 positions need 10 blocks, this worker has 4" in str(end.error)
    assert_clean(cluster)


def test_a_burst_of_eight_times_the_capacity_queues_and_finishes() -> None:
    cluster = started(decode_blocks=8, prefill_blocks=16)
    for i in range(32):
        cluster.submit(stub_spec(f"r{i}", range(i, i + 9), 6))
    cluster.run_until_ended(300)
    cluster.assert_exact()
    assert_clean(cluster)


def test_a_read_that_never_reports_is_given_up_and_made_again() -> None:
    """One block's result is lost while other reads of the same source go on."""
    cluster = SimCluster(times=WorkerTimes(read_timeout=2.0))
    cluster.run(1.5)
    decode = cluster.named("decode")
    lossy = FaultyConnector(decode.connector, FaultPlan(drop=0.2, seed=4), random.Random(4))
    decode.worker.connector = lossy
    decode.worker.reads._connector = lossy
    requests = []
    for i in range(12):
        cluster.submit(stub_spec(f"r{i}", range(i, i + 19), 6))
        requests.append(cluster.router.requests[RequestId(f"r{i}")])  # type: ignore[union-attr]
        cluster.run(0.5)
    cluster.run_until_ended(120)
    cluster.assert_exact()
    assert lossy.injected["drop"] > 0
    stats = [r.decode_stats for r in requests if r.decode_stats is not None]
    assert sum(s.transfer.reads_failed for s in stats if s.transfer is not None) > 0
    assert_clean(cluster)


def test_counts_of_preemption_are_told_even_if_a_stop_string_ends_the_request() -> None:
    """Figures travel when they change, not only with the worker's own finish."""
    cluster = started(decode_blocks=9, scheduler=SchedulerConfig(8, 64, 8, 0.0))
    requests = []
    for i in range(3):
        cluster.submit(stub_spec(f"r{i}", range(i, i + 8), 26))
        requests.append(cluster.router.requests[RequestId(f"r{i}")])  # type: ignore[union-attr]
    assert cluster.run(30, lambda: any(r.num_preemptions and r.end is None for r in requests))
    (request, *_) = [r for r in requests if r.num_preemptions and r.end is None]
    assert cluster.router is not None
    before = cluster.router.counters["preempted"]
    cluster.router.cancel(request.request_id, cluster.clock.now)
    assert cluster.router.counters["preempted"] >= before + 1


def test_transfer_time_is_that_of_the_copies() -> None:
    """Bytes over the time in which they moved: the clock is read after the copies."""
    cluster = started(blocks_per_poll=100)
    decode = cluster.named("decode")
    poll = decode.connector.poll

    def slow_poll(now: float) -> object:
        results = poll(now)
        if results:
            cluster.clock.now += 0.25
        return results

    decode.connector.poll = slow_poll
    cluster.submit(stub_spec("r", range(60, 80), 3))
    request = next(iter(cluster.router.requests.values()))  # type: ignore[union-attr]
    cluster.run_until_ended()
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    assert (request.decode_stats.transfer.transfer_s or 0.0) >= 0.25
    assert (request.decode_stats.decode_wait_s or 0.0) < 0.25


@pytest.mark.parametrize(
    ("requests", "num_branches", "settings"),
    [
        (
            [(18, 1), (9, 5), (17, 1), (16, 2), (8, 1), (14, 4)],
            1,
            {"decode_blocks": 48, "block_size": 1, "scheduler": SchedulerConfig(4, 32, 3, 0.5)},
        ),
        (
            [(7, 3), (5, 3), (7, 5), (5, 7), (7, 9), (6, 1)],
            8,
            {"decode_blocks": 16, "scheduler": SchedulerConfig(32, 288, 256, 0.01)},
        ),
    ],
)
def test_requests_do_not_go_from_one_full_worker_to_the_other_for_ever(
    requests: list[tuple[int, int]], num_branches: int, settings: dict[str, Any]
) -> None:
    """Free blocks are not always room: the watermark and branches' own blocks want some."""
    cluster = SimCluster(num_decode=2, prefill_blocks=256, audit_every_step=False, **settings)
    cluster.run(1.5)
    for number, (length, max_tokens) in enumerate(requests):
        prompt = range(number * 40, number * 40 + length)
        cluster.submit(stub_spec(f"r{number}", prompt, max_tokens, num_branches=num_branches))
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert cluster.sent["Reserve"] < 60, "a wait is a wait"
