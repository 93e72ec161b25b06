"""Injected faults: each does what its name says, from a seed, and none breaks the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kv_transfer.connector import BlockResult, ReadStatus
from kvferry.kv_transfer.faults import PROBABILITIES, FaultPlan, FaultyConnector, InvalidFaultPlan
from tests.kv_transfer.helpers import Host, Pair, Settled, make_pair

MakeFaulty = Callable[[FaultPlan], tuple[Pair, FaultyConnector]]


@pytest.fixture
def make_faulty(host: Host) -> MakeFaulty:
    def make(plan: FaultPlan) -> tuple[Pair, FaultyConnector]:
        pair = make_pair(host)
        faulty = FaultyConnector(Settled(pair.reader.connector), plan)
        pair.peer = faulty.connect(pair.source.connector.local_info())
        return pair, faulty

    return make


def statuses(results: list[BlockResult]) -> list[ReadStatus]:
    return [result.status for result in results]


def test_without_faults_nothing_changes(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan())
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    results = faulty.poll(0.0)
    assert [r.index for r in results] == list(range(8))
    assert statuses(results) == [ReadStatus.OK] * 8
    assert np.array_equal(pair.reader.memory.blocks, pair.source.memory.blocks)
    assert not faulty.injected
    assert faulty.local_info() == pair.reader.connector.local_info()
    assert faulty.digest(3) == pair.source.connector.digest(3)


def test_corrupt_next_strikes_the_next_blocks_only(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan())
    faulty.corrupt_next(2)
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(4)])
    assert statuses(faulty.poll(0.0)) == [ReadStatus.CORRUPT] * 2 + [ReadStatus.OK] * 2
    assert faulty.injected["corrupt"] == 2
    assert np.array_equal(pair.reader.memory.blocks[2:4], pair.source.memory.blocks[2:4])
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(2)])
    assert statuses(faulty.poll(0.0)) == [ReadStatus.OK] * 2


def test_a_corrupting_wire_never_yields_ok(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(corrupt=1.0))
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    assert statuses(faulty.poll(0.0)) == [ReadStatus.CORRUPT] * 8


def test_the_source_is_never_touched(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(corrupt=1.0))
    before = pair.source.memory.blocks.copy()
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    faulty.poll(0.0)
    assert np.array_equal(pair.source.memory.blocks, before)


def test_dropped_results_never_come(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(drop=1.0))
    read_id = faulty.start_read(pair.peer, [pair.source.move(0, 0)])
    assert [faulty.poll(float(t)) for t in range(3)] == [[], [], []]
    faulty.cancel(read_id)
    assert faulty.poll(9.0) == []
    assert faulty.injected["drop"] == 1


def test_duplicated_results_come_twice(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(duplicate=1.0))
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(2)])
    assert [r.index for r in faulty.poll(0.0)] == [0, 0, 1, 1]


def test_reordered_results_are_all_there(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(seed=1, reorder=1.0))
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    order = [r.index for r in faulty.poll(0.0)]
    assert order != list(range(8)) and sorted(order) == list(range(8))


def test_delayed_results_come_within_the_delay_and_not_at_once(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(seed=1, delay=10.0))
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(8)])
    early = faulty.poll(0.0) + faulty.poll(1.0)
    late = faulty.poll(10.0)
    assert len(early) < 8 and len(early + late) == 8


def test_a_cancelled_read_reports_none_of_its_delayed_results(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(delay=10.0, duplicate=1.0))
    read_id = faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(4)])
    faulty.poll(0.0)
    faulty.cancel(read_id)
    pair.reader.memory.blocks[:] = 0x5A
    assert faulty.poll(100.0) == []
    assert (pair.reader.memory.blocks == 0x5A).all()


def test_a_stalled_transport_moves_nothing_until_the_stall_is_over(
    make_faulty: MakeFaulty,
) -> None:
    pair, faulty = make_faulty(FaultPlan(stall=1.0, stall_s=2.0))
    before = pair.reader.memory.blocks.copy()
    faulty.start_read(pair.peer, [pair.source.move(0, 0)])
    assert faulty.poll(0.0) == [] and faulty.poll(1.9) == []
    assert np.array_equal(pair.reader.memory.blocks, before)
    assert faulty.injected["stall"] == 1


def test_a_stall_passes(host: Host) -> None:
    pair = make_pair(host)
    plan = FaultPlan(stall=0.5, stall_s=2.0)
    rng = Random(0)
    rng.random = iter([0.1, 0.9]).__next__  # type: ignore[method-assign]
    faulty = FaultyConnector(Settled(pair.reader.connector), plan, rng)
    faulty.start_read(pair.peer, [pair.source.move(0, 0)])
    assert faulty.poll(0.0) == []
    assert statuses(faulty.poll(2.0)) == [ReadStatus.OK]


def test_a_peer_that_dies_fails_its_reads(make_faulty: MakeFaulty) -> None:
    pair, faulty = make_faulty(FaultPlan(die=1.0))
    faulty.start_read(pair.peer, [pair.source.move(b, b) for b in range(2)])
    assert statuses(faulty.poll(0.0)) == [ReadStatus.FAILED] * 2


def test_an_idle_transport_draws_no_faults(make_faulty: MakeFaulty) -> None:
    _, faulty = make_faulty(FaultPlan(stall=1.0, die=1.0))
    assert faulty.poll(0.0) == []
    assert not faulty.injected


@pytest.mark.parametrize("name", [*PROBABILITIES, "delay", "stall_s"])
def test_a_setting_out_of_range_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidFaultPlan, match=rf"transfer\.faults\.{name}"):
        replace(FaultPlan(), **{name: -0.1})  # type: ignore[arg-type]
    with pytest.raises(InvalidFaultPlan, match=rf"transfer\.faults\.{name}"):
        replace(FaultPlan(), **{name: float("nan")})  # type: ignore[arg-type]


def run_schedule(seed: int) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Two reads through every fault at once; one is cancelled. What was seen, and injected."""
    host = Host("local")
    pair = make_pair(host, blocks_per_poll=2)
    plan = FaultPlan(
        seed=seed, delay=2.0, drop=0.1, duplicate=0.2, reorder=0.5, corrupt=0.3, stall=0.1, die=0.02
    )
    faulty = FaultyConnector(pair.reader.connector, plan)
    peer = faulty.connect(pair.source.connector.local_info())
    kept = faulty.start_read(peer, [pair.source.move(b, b) for b in range(4)])
    gone = faulty.start_read(peer, [pair.source.move(b, b) for b in range(4, 8)])
    seen = [r for t in range(2) for r in faulty.poll(float(t))]
    faulty.cancel(gone)
    pair.reader.memory.blocks[4:] = 0x5A
    late = [r for t in range(2, 40) for r in faulty.poll(float(t))]
    assert all(r.read_id == kept for r in late)
    assert (pair.reader.memory.blocks[4:] == 0x5A).all()
    for result in seen + late:
        move = result.move
        if result.status is ReadStatus.OK and result.read_id == kept:
            source = pair.source.memory.blocks[move.source.block_id]
            assert np.array_equal(pair.reader.memory.blocks[move.target], source)
    host.close()
    return [(r.index, r.status.value) for r in seen + late], dict(faulty.injected)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_mixture_of_faults_breaks_the_contract_and_a_seed_repeats_itself(seed: int) -> None:
    assert run_schedule(seed) == run_schedule(seed)
