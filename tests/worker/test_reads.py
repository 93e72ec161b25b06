"""A read's targets stay the transfer's until the read has ended or is fenced, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.kv_cache.audit import Owner, OwnerKind, audit
from kvferry.kv_cache.block_pool import BlockPool, OutOfBlocks
from kvferry.kv_transfer.connector import BlockRef, BlockResult, Move, Peer, ReadId, ReadStatus
from kvferry.kv_transfer.faults import FaultPlan, FaultyConnector
from kvferry.kv_transfer.local import LocalFabric
from kvferry.worker.messages import NodeRef, Role
from kvferry.worker.reads import Reads
from tests.worker.making import MadeWorker, make_worker

SOURCE, READER = NodeRef("prefill-0", 2), NodeRef("decode-0", 3)
NUM_BLOCKS = 6
SENTINEL = 0xA5


def at(now: float) -> Callable[[], float]:
    """A clock that stands at ``now``."""
    return lambda: now


@dataclass
class Bench:
    """A source whose block b holds b + 1 in every byte, and a reader's ``Reads`` over faults."""

    plan: FaultPlan = field(default_factory=FaultPlan)
    blocks_per_poll: int = 1
    seed: int = 0
    ended: list[BlockResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        fabric = LocalFabric()
        self.source: MadeWorker = make_worker(
            fabric, SOURCE, (Role.PREFILL,), num_blocks=NUM_BLOCKS
        )
        self.reader: MadeWorker = make_worker(
            fabric, READER, num_blocks=NUM_BLOCKS, blocks_per_poll=self.blocks_per_poll
        )
        for block in range(NUM_BLOCKS):
            self.source.memory.blocks[block] = block + 1
        self.connector = FaultyConnector(self.reader.connector, self.plan, Random(self.seed))
        self.peer: Peer = self.connector.connect(self.source.connector.local_info())
        self.pool: BlockPool = self.reader.pool
        self.reads = Reads(self.connector, self.pool)

    def moves(self, targets: Sequence[int]) -> list[Move]:
        """Whole blocks of the source, the n-th into the n-th target."""
        digest = self.source.connector.digest
        return [Move(BlockRef(SOURCE.epoch, n, 0), t, 4, digest(n)) for n, t in enumerate(targets)]

    def start(self, targets: Sequence[int]) -> ReadId:
        """Begin a read; its ends are kept in ``ended``."""
        return self.reads.start(
            self.peer, self.moves(targets), "r", 1, lambda result, now: self.ended.append(result)
        )


def test_targets_of_an_aborted_request_go_to_nobody_while_the_read_runs() -> None:
    bench = Bench()
    targets = bench.pool.allocate(NUM_BLOCKS)
    bench.start(targets)
    bench.pool.release(targets)  # the request is gone; the sender is slow
    for num_ended in range(NUM_BLOCKS):
        with pytest.raises(OutOfBlocks):
            bench.pool.allocate(num_ended + 1)
        assert bench.reads.poll(at(float(num_ended))) == 1
    assert sorted(bench.pool.allocate(NUM_BLOCKS)) == sorted(targets)
    assert len(bench.reads) == 0


def test_after_a_cancel_the_targets_are_free_at_once_and_never_written_again() -> None:
    bench = Bench()
    targets = bench.pool.allocate(NUM_BLOCKS)
    read_id = bench.start(targets)
    bench.reads.poll(at(0.0))
    bench.pool.release(targets)
    bench.reads.cancel(read_id)
    assert len(bench.reads) == 0
    for block in bench.pool.allocate(NUM_BLOCKS):
        bench.reader.memory.blocks[block] = SENTINEL
    for now in range(NUM_BLOCKS + 1):
        assert bench.reads.poll(at(float(now))) == 0
        bench.connector.poll(float(now))
    assert (bench.reader.memory.blocks == SENTINEL).all()
    assert len(bench.ended) == 1


def test_a_lost_result_keeps_its_target_until_the_fence() -> None:
    bench = Bench(FaultPlan(drop=1.0), blocks_per_poll=8)
    targets = bench.pool.allocate(2)
    read_id = bench.start(targets)
    bench.pool.release(targets)
    for now in range(100):
        assert bench.reads.poll(at(float(now))) == 0
    assert bench.pool.num_free == NUM_BLOCKS - 2
    bench.reads.cancel(read_id)
    assert bench.pool.num_free == NUM_BLOCKS


def test_a_result_that_comes_twice_ends_its_block_once() -> None:
    bench = Bench(FaultPlan(duplicate=1.0, reorder=1.0, delay=2.0), blocks_per_poll=8)
    targets = bench.pool.allocate(3)
    bench.start(targets)
    bench.pool.release(targets)
    total = sum(bench.reads.poll(at(now / 4)) for now in range(40))
    assert total == len(bench.ended) == 3
    assert sorted(result.index for result in bench.ended) == [0, 1, 2]
    assert bench.connector.injected["duplicate"] == 3
    assert bench.pool.num_free == NUM_BLOCKS


def test_a_late_second_result_does_not_end_the_next_read_into_the_same_block() -> None:
    bench = Bench(FaultPlan(duplicate=1.0), blocks_per_poll=1)
    (target,) = bench.pool.allocate(1)
    bench.start([target])
    bench.reads.poll(at(0.0))
    bench.pool.release([target])
    held = bench.pool.allocate(NUM_BLOCKS)
    bench.start([held[-1]])
    bench.pool.release(held)
    assert bench.pool.num_free == NUM_BLOCKS - 1
    bench.reads.poll(at(1.0))
    assert bench.pool.num_free == NUM_BLOCKS
    assert len(bench.ended) == 2


def test_cancelling_twice_or_an_unknown_or_ended_read_changes_nothing() -> None:
    bench = Bench(blocks_per_poll=8)
    targets = bench.pool.allocate(2)
    read_id = bench.start(targets)
    bench.reads.cancel(ReadId(read_id + 1))
    bench.reads.poll(at(0.0))
    bench.reads.cancel(read_id)
    second = bench.start([bench.pool.allocate(1)[0]])
    bench.reads.cancel(second)
    bench.reads.cancel(second)
    assert bench.pool.num_free == NUM_BLOCKS - 3, "the request still refers to them"
    assert not any(block.num_transfers for block in bench.pool.blocks)


def test_a_block_s_end_may_cancel_reads_whose_results_come_in_the_same_poll() -> None:
    bench = Bench(blocks_per_poll=8)
    targets = bench.pool.allocate(4)
    heard: list[int] = []
    ids: list[ReadId] = []

    def drop_everything(result: BlockResult, now: float) -> None:
        heard.append(result.move.target)
        for read_id in ids:
            bench.reads.cancel(read_id)
        bench.pool.release(targets)

    for pair in (targets[:2], targets[2:]):
        ids.append(bench.reads.start(bench.peer, bench.moves(pair), "r", 1, drop_everything))
    assert bench.reads.poll(at(0.0)) == 1
    assert heard == targets[:1]
    assert bench.pool.num_free == NUM_BLOCKS
    assert len(bench.reads) == 0


def test_the_targets_are_the_pool_s_before_the_listener_hears_of_the_end() -> None:
    """So that the listener may seal or free the block."""
    bench = Bench()
    (target,) = bench.pool.allocate(1)
    seen: list[int] = []
    bench.reads.start(
        bench.peer,
        bench.moves([target]),
        "r",
        1,
        lambda result, now: seen.append(bench.pool.blocks[target].num_transfers),
    )
    bench.reads.poll(at(0.0))
    assert seen == [0]


def test_running_targets_are_named_to_the_audit_and_ended_ones_are_not() -> None:
    bench = Bench()
    targets = bench.pool.allocate(2)
    bench.start(targets)
    assert [
        (o.kind, o.block_id, o.request_id, o.attempt, o.peer) for o in bench.reads.owners()
    ] == [(OwnerKind.WRITER, target, "r", 1, SOURCE.node_id) for target in targets]
    bench.reads.poll(at(0.0))
    assert [o.block_id for o in bench.reads.owners()] == targets[1:]
    bench.reads.poll(at(0.0))
    assert list(bench.reads.owners()) == []


# --- the machine -------------------------------------------------------------------------------


@dataclass
class _Try:
    """One read: which targets its results have not been heard of, and which are referenced."""

    read_id: ReadId
    pending: set[int]
    referenced: list[int]
    heard: list[int] = field(default_factory=list)


class ReadsMachine(RuleBasedStateMachine):
    """Reads start, end, are lost, doubled, late, cancelled; requests come and go at any time."""

    @initialize(
        seed=st.integers(0, 2**16),
        drop=st.sampled_from([0.0, 0.3]),
        duplicate=st.sampled_from([0.0, 0.5]),
        reorder=st.sampled_from([0.0, 1.0]),
        stall=st.sampled_from([0.0, 0.3]),
        die=st.sampled_from([0.0, 0.1]),
        delay=st.sampled_from([0.0, 3.0]),
        per_poll=st.integers(1, 4),
    )
    def begin(
        self,
        seed: int,
        drop: float,
        duplicate: float,
        reorder: float,
        stall: float,
        die: float,
        delay: float,
        per_poll: int,
    ) -> None:
        plan = FaultPlan(0, delay, drop, duplicate, reorder, 0.2, stall, die, stall_s=2.0)
        self.bench = Bench(plan, per_poll, seed)
        self.now = 0.0
        self.tries: list[_Try] = []
        self.strangers: list[int] = []

    @precondition(lambda self: self.bench.pool.num_free)
    @rule(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        bench = self.bench
        targets = bench.pool.allocate(min(count, bench.pool.num_free))
        attempt = _Try(ReadId(0), set(targets), list(targets))

        def ended(result: BlockResult, now: float) -> None:
            assert result.move.target in attempt.pending, "heard of twice, or after the fence"
            attempt.pending.discard(result.move.target)
            attempt.heard.append(result.move.target)
            if result.status is ReadStatus.OK:
                wanted = result.move.source.block_id + 1
                assert (bench.reader.memory.blocks[result.move.target] == wanted).all()

        attempt.read_id = bench.reads.start(bench.peer, bench.moves(targets), "r", 1, ended)
        self.tries.append(attempt)

    @rule(after=st.sampled_from([0.0, 0.5, 2.0]))
    def poll(self, after: float) -> None:
        self.now += after
        before = sum(len(t.heard) for t in self.tries)
        ended = self.bench.reads.poll(at(self.now))
        assert ended == sum(len(t.heard) for t in self.tries) - before

    @precondition(lambda self: self.tries)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.tries))
        self.bench.reads.cancel(attempt.read_id)
        attempt.pending.clear()

    @precondition(lambda self: any(t.referenced for t in self.tries))
    @rule(data=st.data())
    def abort_request(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from([t for t in self.tries if t.referenced]))
        self.bench.pool.release(attempt.referenced)
        attempt.referenced.clear()

    @precondition(lambda self: self.bench.pool.num_free)
    @rule()
    def another_request_takes_a_block(self) -> None:
        (block,) = self.bench.pool.allocate(1)
        self.bench.reader.memory.blocks[block] = SENTINEL
        self.strangers.append(block)

    @precondition(lambda self: self.strangers)
    @rule()
    def another_request_ends(self) -> None:
        self.bench.pool.release([self.strangers.pop()])

    @invariant()
    def pending_targets_are_not_free(self) -> None:
        for attempt in self._tries():
            assert not any(self.bench.pool.is_free(target) for target in attempt.pending)

    @invariant()
    def no_byte_arrives_in_a_block_of_another(self) -> None:
        for block in getattr(self, "strangers", []):
            assert (self.bench.reader.memory.blocks[block] == SENTINEL).all()

    @invariant()
    def the_audit_agrees(self) -> None:
        if hasattr(self, "bench"):
            held = [b for t in self.tries for b in t.referenced] + self.strangers
            owners = [Owner(OwnerKind.REQUEST, block, "r") for block in held]
            found = audit(self.bench.pool, [*owners, *self.bench.reads.owners()])
            assert found.problems == ()
            assert len(self.bench.reads) == sum(bool(t.pending) for t in self.tries)

    def teardown(self) -> None:
        for attempt in self._tries():
            self.bench.reads.cancel(attempt.read_id)
            self.bench.pool.release(attempt.referenced)
        if hasattr(self, "bench"):
            self.bench.pool.release(self.strangers)
            assert self.bench.pool.num_free == NUM_BLOCKS

    def _tries(self) -> Iterator[_Try]:
        return iter(getattr(self, "tries", []))


TestReadsMachine = ReadsMachine.TestCase
TestReadsMachine.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
