"""Pulling: what is announced is checked, read, verified, read again, and acknowledged in order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.decode_worker.puller import MAX_READS
from kvferry.engine.request import RequestId
from kvferry.kv_cache.block_pool import BlockState
from kvferry.kv_transfer.connector import BlockRef, Move
from kvferry.kv_transfer.faults import FaultPlan, FaultyConnector
from kvferry.worker import messages as m
from kvferry.worker.messages import AnnouncedBlock, FailureCause, Leg, LegState
from tests.decode_worker.bench import DECODE, OTHER, SOURCE, DecodeBench
from tests.fakes import ATTEMPT, stub_output, stub_spec
from tests.sim.cluster import SimCluster
from tests.worker.making import Sender

R = RequestId("r")


def acks(bench: DecodeBench) -> list[tuple[int, bool]]:
    """Acknowledgements since the last call: (verified until, hand-off received)."""
    return [
        (body.verified_until, body.hand_off_received)
        for body in bench.sent(m.Acknowledge)
        if isinstance(body, m.Acknowledge)
    ]


def failed(bench: DecodeBench, cause: FailureCause) -> str:
    """The message of the one failure that was told; the leg is gone and nothing leaked."""
    (body,) = bench.sent(m.LegFailed)
    assert isinstance(body, m.LegFailed)
    assert (body.request_id, body.attempt, body.leg) == (R, ATTEMPT, Leg.DECODE)
    assert body.cause is cause
    assert bench.is_empty()
    return body.message


def test_blocks_are_read_while_others_are_not_announced_yet() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=10)
    bench.announce(spec, 0)
    assert acks(bench) == [(0, False)]
    bench.step()
    assert acks(bench) == [(4, False)]
    assert bench.leg().state is LegState.RESERVED
    bench.announce(spec, 1, 2, hand_off=True)
    bench.step(2)
    assert acks(bench) == [(4, True), (8, True), (10, True)]
    assert bench.leg().state is LegState.RUNNING
    stats = bench.leg().pull.stats()
    assert (stats.blocks_moved, stats.bytes_moved, stats.blocks_before_last_chunk) == (3, 96, 1)


@settings(max_examples=40)
@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=6), st.integers(1, 5))
def test_in_whatever_order_and_how_often_blocks_are_announced_each_is_read_once(
    order: list[int], again: list[int], per_poll: int
) -> None:
    bench = DecodeBench(blocks_per_poll=per_poll)
    spec = bench.reserve(length=19, max_tokens=4)
    known: set[int] = set()
    for place, index in enumerate([*order, *again]):
        bench.announce(spec, index)
        known.add(index)
        if place % 2:
            bench.step()
        verified = set(bench.leg().pull.verified)
        leading = next((i for i in range(5) if i * 4 not in verified), 5)
        assert bench.leg().pull.verified_until == min(4 * leading, 19), "cumulative, no gap"
    bench.announce(spec, hand_off=True)
    bench.step(12)
    assert bench.role.puller.blocks_moved == 5
    tokens = [t for event in bench.tokens() for t in event.token_ids]
    assert tokens == stub_output(range(19), 4)


def test_a_repeated_announcement_is_acknowledged_again_and_reads_nothing() -> None:
    """The first acknowledgement may be what was lost."""
    bench = DecodeBench()
    spec = bench.pulled()
    bench.sent()
    for _ in range(2):
        bench.announce(spec, 0, 1, 2, hand_off=True)
        assert acks(bench) == [(10, True)]
    assert bench.role.puller.blocks_moved == 3
    assert not len(bench.made.worker.reads)


def wrong(block: AnnouncedBlock, what: str) -> AnnouncedBlock:
    """The announcement of a block with one thing wrong."""
    match what:
        case "hash":
            return replace(block, block_hash=bytes(16))
        case "misaligned":
            return replace(block, start=2)
        case "beyond the prompt":
            return replace(block, start=12)
        case "far beyond":
            return replace(block, start=(1 << 31) - 4)
        case "too few tokens":
            return replace(block, num_tokens=3)
        case "too many tokens":
            return replace(block, num_tokens=5)
        case _:
            return replace(block, ref=replace(block.ref, epoch=SOURCE.epoch + 1))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("hash", "chain hash 0000"),
        ("misaligned", "position 2, not a block of this prompt"),
        ("beyond the prompt", "position 12, not a block of this prompt"),
        ("far beyond", f"position {(1 << 31) - 4}, not a block of this prompt"),
        ("too few tokens", "announced with 3 tokens"),
        ("too many tokens", "announced with 5 tokens"),
        ("epoch", f"is of epoch {SOURCE.epoch + 1}, not {SOURCE.epoch}"),
    ],
)
def test_a_block_that_is_not_the_one_wanted_fails_the_leg_unread(what: str, named: str) -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=10)
    good, bad = bench.announced(spec, 0), wrong(bench.announced(spec, 1), what)
    bench.announce(spec, blocks=[good, bad])
    assert named in failed(bench, FailureCause.TRANSFER)
    assert bench.role.puller.blocks_moved == 0


def test_a_block_of_another_prompt_is_refused_though_its_shape_fits() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=10)
    other = stub_spec("r", range(1, 11), 5)
    bench.announce(spec, blocks=[bench.announced(other, 0)])
    assert "this worker computes" in failed(bench, FailureCause.TRANSFER)


@pytest.mark.parametrize("num_computed", [1, 9, 11])
def test_a_hand_off_of_another_length_never_starts_decode(num_computed: int) -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=10)
    announce = m.Announce(spec.request_id, ATTEMPT, (), m.HandOff((5,), num_computed))
    bench.prefill.send(announce, bench.clock.now)
    assert "the prompt has 10" in failed(bench, FailureCause.TRANSFER)
    assert not bench.tokens()


def tamper_first(bench: DecodeBench, count: int) -> None:
    """Flip a byte of the first ``count`` blocks copied."""
    left = [count]

    def flip(move: Move, target: object) -> None:
        if left[0]:
            left[0] -= 1
            target[0] ^= 1  # type: ignore[index]

    bench.made.connector.tamper = flip


@pytest.mark.parametrize("count", range(MAX_READS))
def test_a_corrupt_block_is_read_again_within_the_budget(count: int) -> None:
    bench = DecodeBench()
    tamper_first(bench, count)
    spec = bench.reserve(length=4, max_tokens=4)
    bench.announce(spec, 0, hand_off=True)
    bench.step(count + 6)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(4), 4)
    assert bench.leg().pull.stats().reads_failed == count


def test_a_block_that_stays_corrupt_fails_the_leg_and_is_never_sealed() -> None:
    bench = DecodeBench()
    tamper_first(bench, MAX_READS)
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    target = bench.leg().table
    assert target is not None
    block = bench.made.pool.blocks[target.block_ids[0]]
    for _ in range(MAX_READS - 1):
        bench.step()
        assert block.state is BlockState.OPEN
    assert bench.leg().pull.failures[0] == MAX_READS - 1
    bench.step()
    assert f"read corrupt {MAX_READS} times" in failed(bench, FailureCause.TRANSFER)


def test_a_stale_block_fails_the_leg_at_once() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    bench.source.memory.raise_generation(0, 7)
    bench.step()
    assert "read stale 1 times" in failed(bench, FailureCause.TRANSFER)


def test_reads_that_never_report_end_the_leg_once_whatever_else_it_wants() -> None:
    bench = DecodeBench()
    silent = FaultyConnector(bench.made.connector, FaultPlan(drop=1.0))
    bench.made.worker.reads._connector = silent
    spec = bench.reserve(length=12)
    for index in range(3):
        bench.announce(spec, index)  # a read each
    for _ in range(MAX_READS):
        bench.step(4)
        bench.wait(bench.made.worker.times.read_timeout + 1)
    assert f"read failed {MAX_READS} times" in failed(bench, FailureCause.TRANSFER)


def test_what_another_source_announces_is_read_after_the_first_is_fenced() -> None:
    """Two sources may cut a prompt into different blocks: never do two reads share slots."""
    bench = DecodeBench()
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    target = bench.made.pool.blocks[bench.leg().table.block_ids[0]]  # type: ignore[union-attr]
    assert target.num_transfers == 1
    blocks = []
    for index in range(2):
        block = bench.announced(spec, index)
        bench.other.memory.blocks[index] = bench.source.memory.blocks[index]
        ref = BlockRef(OTHER.epoch, index, int(bench.other.memory.generations[index]))
        blocks.append(replace(block, ref=ref))
    bench.source.memory.blocks[:] = 0x5A  # nothing of it is read any longer
    announce = m.Announce(spec.request_id, ATTEMPT, tuple(blocks), bench.hand_off(spec))
    Sender(bench.made.worker, OTHER).send(announce, bench.clock.now)
    assert target.num_transfers == 1
    bench.step(6)
    assert bench.leg().pull.stats().reads_failed == 0
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(8), 5)


def test_failures_of_an_old_copy_do_not_count_against_a_new_one() -> None:
    bench = DecodeBench()
    tamper_first(bench, MAX_READS)
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    bench.step(MAX_READS - 1)
    again = bench.announced(spec, 0)
    bench.source.memory.blocks[9] = bench.source.memory.blocks[0]
    bench.source.memory.raise_generation(9, 3)
    bench.announce(spec, blocks=[replace(again, ref=BlockRef(SOURCE.epoch, 9, 3))])
    bench.step(2)
    assert bench.leg().pull.verified_until == 4


def test_a_source_that_is_not_connected_yet_is_read_when_it_is() -> None:
    bench = DecodeBench()
    peer = bench.made.worker.peers.pop(SOURCE)
    spec = bench.reserve(length=4, max_tokens=3)
    bench.announce(spec, 0, hand_off=True)
    bench.step()
    assert not len(bench.made.worker.reads)
    bench.made.worker.peers[SOURCE] = peer
    bench.wait(1.0)
    bench.step(4)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(4), 3)


def test_a_broken_connection_is_opened_anew_and_the_read_repeated() -> None:
    bench = DecodeBench(blocks_per_poll=8)
    spec = bench.reserve(length=10, max_tokens=3)
    broken = bench.made.worker.peers[SOURCE]
    broken.close()
    bench.announce(spec, 0, 1, 2, hand_off=True)
    bench.step()
    assert SOURCE not in bench.made.worker.peers
    (state,) = [peer for peer in bench.made.worker.load().peers if peer.ref == SOURCE]
    assert not state.connected, "the router must not place on it meanwhile"
    bench.wait(1.0)
    assert bench.made.worker.peers[SOURCE] is not broken
    bench.step(5)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(10), 3)
    assert bench.leg().pull.stats().reads_failed == 3


def test_late_failures_of_a_broken_connection_do_not_close_its_successor() -> None:
    bench = DecodeBench(blocks_per_poll=1)
    spec = bench.reserve(length=10, max_tokens=3)
    bench.made.worker.peers[SOURCE].close()
    bench.announce(spec, 0, 1, 2, hand_off=True)
    bench.step()
    bench.wait(1.0)
    fresh = bench.made.worker.peers[SOURCE]
    bench.step(9)
    assert bench.made.worker.peers[SOURCE] is fresh
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(10), 3)


@pytest.mark.parametrize("seed", range(4))
def test_streams_survive_connections_that_break_again_and_again(seed: int) -> None:
    cluster = SimCluster(blocks_per_poll=1)
    cluster.run(1.5)
    decode = cluster.named("decode")
    faulty = FaultyConnector(decode.connector, FaultPlan(die=0.3), Random(seed))
    decode.worker.connector = decode.worker.reads._connector = faulty
    for ref, peer in list(decode.worker.peers.items()):
        peer.close()
        decode.worker.peers[ref] = faulty.connect(peer.info)
    for number in range(8):
        cluster.submit(stub_spec(f"r{number}", range(number, number + 9), 4))
        cluster.run(0.5)
    cluster.run_until_ended(60)
    cluster.assert_exact()
    assert faulty.injected["die"] > 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


def test_every_period_each_source_is_told_what_is_still_wanted_of_it() -> None:
    bench = DecodeBench()
    bench.wait(1.0)
    assert bench.sent(m.PullList) == [], "nothing is wanted"
    a = bench.reserve("a", 8)
    bench.reserve("b", 8)  # not announced by anybody yet: any of them may hold it
    bench.announce(a, 0)
    bench.step()
    bench.made.sent()
    bench.wait(1.0)
    lists = {e.receiver: e.body for e in bench.made.sent(m.PullList)}
    item_a = m.Acknowledge(RequestId("a"), ATTEMPT, 4, False)
    item_b = m.Acknowledge(RequestId("b"), ATTEMPT, 0, False)
    assert lists == {SOURCE: m.PullList((item_a, item_b)), OTHER: m.PullList((item_b,))}
    assert DECODE not in lists


def test_set_up_of_a_connection_is_told_by_its_first_request_only() -> None:
    bench = DecodeBench()
    first = bench.pulled("a", 4)
    bench.pulled("b", 4)
    assert first.request_id == "a"
    assert bench.leg("a").pull.stats().first_use_setup_s == 0.0
    assert bench.leg("b").pull.stats().first_use_setup_s is None


def test_transfer_time_runs_from_the_first_read_to_the_last_block_verified() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8)
    assert bench.leg().pull.stats().transfer_s is None
    bench.clock.now = 10.0
    bench.announce(spec, 0)
    bench.clock.now = 11.0
    bench.tell(m.RouterHeartbeat())
    bench.step()
    bench.clock.now = 12.0
    bench.tell(m.RouterHeartbeat())
    bench.announce(spec, 1, hand_off=True)
    bench.clock.now = 12.5
    bench.step()
    stats = bench.leg().pull.stats()
    assert (stats.connector, stats.transfer_s, stats.transfer_exposed_s) == ("local", 2.5, 0.5)
