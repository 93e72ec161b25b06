"""Reading into a device pool: OK means copied, cancel means fenced, and slots are never shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.kv_transfer.connector import (
    BlockResult,
    IncompatiblePeer,
    Move,
    Peer,
    ReadId,
    ReadStatus,
    SlotRun,
)
from kvferry.kv_transfer.local import LocalFabric
from tests.kv_transfer.helpers import layout_with
from tests.worker.staging.making import (
    NUM_BLOCKS,
    HostSource,
    Staged,
    content,
    make_source,
    make_staged,
)


class Bench:
    """A device worker that reads a host worker, whose device does nothing by itself."""

    def __init__(self, num_slots: int = 4, blocks_per_poll: int | None = None) -> None:
        self.fabric = LocalFabric()
        self.source = make_source(self.fabric)
        self.own = make_staged(
            self.fabric, "own", num_slots, epoch=2, blocks_per_poll=blocks_per_poll
        )
        self.connector = self.own.connector
        self.peer = self.connector.connect(self.source.connector.local_info())

    def start(self, *pairs: tuple[int, int]) -> ReadId:
        """Read (source block, own block) pairs."""
        return self.connector.start_read(self.peer, [self.source.move(*p) for p in pairs])

    def poll(self) -> list[BlockResult]:
        return self.connector.poll(0.0)

    def collect(self, polls: int = 40) -> list[BlockResult]:
        """Polls, with the device at work in between."""
        results = []
        for _ in range(polls):
            results += self.poll()
            self.own.device.run_all()
        return results

    def expect(self, block_id: int) -> bytes:
        return content(block_id, 3, self.own.memory.block_bytes)

    def slots_free(self) -> int:
        return self.connector._slots.num_free


def test_a_block_is_reported_when_it_is_on_the_device_and_not_before() -> None:
    bench = Bench()
    read_id = bench.start((3, 9))
    for _ in range(3):
        assert bench.poll() == [], "it has been read and verified, but not copied"
    assert bench.own.block(9) != bench.expect(3)
    bench.own.device.run_all()
    (result,) = bench.poll()
    assert (result.read_id, result.index, result.status) == (read_id, 0, ReadStatus.OK)
    assert result.move.target == 9 and result.num_bytes == bench.own.memory.block_bytes
    assert bench.own.block(9) == bench.expect(3)
    assert bench.slots_free() == 4


def test_more_blocks_than_slots_are_read_one_after_the_other() -> None:
    bench = Bench(num_slots=1)
    bench.start(*((b, 11 - b) for b in range(8)))
    results = bench.collect()
    assert [r.index for r in results] == list(range(8))
    assert all(bench.own.block(11 - b) == bench.expect(b) for b in range(8))


def test_a_source_that_stands_still_does_not_take_the_slots_of_another() -> None:
    bench = Bench(num_slots=4, blocks_per_poll=0)  # nothing is read at all
    bench.start(*((b, b) for b in range(6)))
    bench.collect(3)
    assert bench.slots_free() == 2, "half of them"
    other = make_source(bench.fabric, "other")
    peer = bench.connector.connect(other.connector.local_info())
    bench.connector.start_read(peer, [other.move(0, 8)])
    bench.collect(3)
    assert bench.slots_free() == 1


@pytest.mark.parametrize("status", [ReadStatus.STALE, ReadStatus.CORRUPT, ReadStatus.FAILED])
def test_a_block_that_was_not_read_well_never_reaches_the_device(status: ReadStatus) -> None:
    bench = Bench()
    before = bench.own.block(2)
    read_id = bench.start((1, 2))
    if status is ReadStatus.STALE:
        bench.source.memory.raise_generation(1, 9)
    elif status is ReadStatus.CORRUPT:
        bench.source.memory.blocks[1, 0] ^= 1
    else:
        bench.peer.close()
    (result,) = bench.poll()
    assert (result.read_id, result.status, result.num_bytes) == (read_id, status, 0)
    assert bench.own.device.num_copies == 0 and bench.own.block(2) == before
    assert bench.slots_free() == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda move: replace(move, target=NUM_BLOCKS),
        lambda move: replace(move, target=-1),
        lambda move: replace(move, runs=(SlotRun(0, 2, 0, 2),)),
    ],
)
def test_what_cannot_be_a_target_fails_and_the_others_are_read(
    change: Callable[[Move], Move],
) -> None:
    bench = Bench()
    good = bench.source.move(0, 1)
    bench.connector.start_read(bench.peer, [change(bench.source.move(1, 2)), good])
    assert [(r.index, r.status) for r in bench.collect()] == [
        (0, ReadStatus.FAILED),
        (1, ReadStatus.OK),
    ]


def test_blocks_of_another_size_are_refused_with_both_values() -> None:
    bench = Bench()
    other = make_staged(bench.fabric, "other", layout=layout_with(block_size=8))
    with pytest.raises(IncompatiblePeer, match="block_size is 8 there, 4 here"):
        bench.connector.connect(other.connector.local_info())


@pytest.mark.parametrize("polls", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_after_cancel_no_byte_arrives_and_the_slots_are_free(polls: int, steps: int) -> None:
    """Queued, being read, being copied, partly copied."""
    bench = Bench(num_slots=2, blocks_per_poll=1)
    read_id = bench.start(*((b, b) for b in range(5)))
    for _ in range(polls):
        bench.poll()
    inward = bench.own.device.streams[1]
    for _ in range(min(steps, len(inward.queue))):
        inward.step()
    bench.connector.cancel(read_id)
    assert bench.slots_free() == 2 and not inward.queue
    bench.own.pool.memory.fill_(0x5A)  # the targets have another owner now
    bench.own.memory.blocks[2:] = 0x77  # and the slots no block
    assert bench.collect() == []
    assert (bench.own.pool.memory == 0x5A).all()
    assert (bench.own.memory.blocks[2:] == 0x77).all()
    assert bench.start((7, 7)) != read_id
    assert [r.status for r in bench.collect()] == [ReadStatus.OK]


def test_after_cancel_the_inner_connector_reads_nothing_into_the_slots_that_came_back() -> None:
    bench = Bench(num_slots=4, blocks_per_poll=0)
    read_id = bench.start(*((b, b) for b in range(5)))
    bench.poll()
    assert bench.slots_free() == 2, "two are being read"
    bench.connector.cancel(read_id)
    assert bench.slots_free() == 4
    bench.own.memory.blocks[4:] = 0x77
    bench.own.inner._blocks_per_poll = 8
    assert bench.collect(3) == []
    assert (bench.own.memory.blocks[4:] == 0x77).all()


def test_cancelling_one_read_leaves_the_others() -> None:
    bench = Bench(num_slots=2)
    first, second = bench.start((0, 0), (1, 1)), bench.start((2, 2), (3, 3))
    bench.poll()
    bench.connector.cancel(first)
    bench.connector.cancel(first)
    assert [(r.read_id, r.index) for r in bench.collect()] == [(second, 0), (second, 1)]


def test_closing_waits_for_copies_and_is_quiet_afterwards() -> None:
    bench = Bench()
    bench.start((0, 0), (1, 1))
    bench.poll()
    assert bench.own.device.num_queued
    bench.connector.close()
    bench.connector.close()
    assert not bench.own.device.num_queued and bench.own.memory.closed


def test_a_read_published_by_a_device_pool_arrives_in_a_device_pool() -> None:
    fabric = LocalFabric()
    source, own = make_staged(fabric, "source", epoch=5), make_staged(fabric, "own")
    peer = own.connector.connect(source.connector.local_info())
    source.fill(7)
    source.publisher.offer(7)
    source.device.run_all()
    source.publisher.poll()
    published = source.publisher.published(7)
    assert published is not None
    own.connector.start_read(peer, [Move(published.ref, 4, 4, published.digest)])
    own.connector.poll(0.0)
    own.device.run_all()
    assert [r.status for r in own.connector.poll(0.0)] == [ReadStatus.OK]
    assert own.block(4) == source.block(7)
    source.publisher.withdraw([7])
    source.fill(8)
    source.publisher.offer(8)  # perhaps into the same slot
    source.fill(9)
    source.publisher.offer(9)
    own.connector.start_read(peer, [Move(published.ref, 5, 4, None)])
    assert [r.status for r in own.connector.poll(0.0)] == [ReadStatus.STALE]


def test_the_digest_of_an_own_block_is_that_of_its_bytes() -> None:
    bench = Bench()
    bench.start((3, 9))
    bench.collect()
    assert bench.connector.digest(9) == bench.source.connector.digest(3)


class ReadMachine(RuleBasedStateMachine):
    """Reads of two sources are started, polled and cancelled, sources rewrite blocks, and the
    device copies when it likes. The pool is a dictionary of who owns each block.
    """

    own: Staged

    @initialize(num_slots=st.integers(1, 3), per_poll=st.integers(0, 3))
    def begin(self, num_slots: int, per_poll: int) -> None:
        fabric = LocalFabric()
        self.sources = [make_source(fabric, name) for name in ("a", "b")]
        self.own = make_staged(fabric, "own", num_slots, epoch=2, blocks_per_poll=per_poll)
        self.num_slots = num_slots
        self.peers: list[Peer] = [
            self.own.connector.connect(source.connector.local_info()) for source in self.sources
        ]
        self.free = set(range(NUM_BLOCKS))
        self.running: dict[ReadId, dict[int, Move]] = {}
        self.held: dict[int, bytes] = {}
        self.own.pool.memory.fill_(1)
        self.held = {b: self.own.block(b) for b in range(NUM_BLOCKS)}

    @rule(which=st.integers(0, 1), blocks=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def start(self, which: int, blocks: list[int]) -> None:
        targets = sorted(self.free)[: len(blocks)]
        source: HostSource = self.sources[which]
        moves = [source.move(b, t) for b, t in zip(blocks, targets, strict=False)]
        if not moves:
            return
        self.free -= set(targets)
        read_id = self.own.connector.start_read(self.peers[which], moves)
        self.running[read_id] = dict(enumerate(moves))

    @rule()
    def poll(self) -> None:
        for result in self.own.connector.poll(0.0):
            move = self.running[result.read_id].pop(result.index)
            assert result.move == move
            if not self.running[result.read_id]:
                del self.running[result.read_id]
            found = self.own.block(move.target)
            if result.status is ReadStatus.OK:
                generation = move.source.generation
                assert found == content(move.source.block_id, generation, len(found))
                assert not self.own.device.is_pending(self.own.pool.memory[move.target].numpy())
            else:
                assert result.status is ReadStatus.STALE
                assert found == self.held[move.target], "bytes of a stale block arrived"
            self.give_back(move.target)

    def give_back(self, target: int) -> None:
        """A block has another owner, who writes to it at once."""
        self.own.pool.memory[target] = len(self.free) + 2
        self.held[target] = self.own.block(target)
        self.free.add(target)

    @rule(per_poll=st.integers(0, 3))
    def pace(self, per_poll: int) -> None:
        self.own.inner._blocks_per_poll = per_poll

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.running)))
        self.own.connector.cancel(read_id)
        for move in self.running.pop(read_id).values():
            self.give_back(move.target)

    @rule(which=st.integers(0, 1), block_id=st.integers(0, 7))
    def rewrite(self, which: int, block_id: int) -> None:
        memory = self.sources[which].memory
        generation = int(memory.generations[block_id]) + 1
        memory.raise_generation(block_id, generation)
        data = content(block_id, generation, memory.block_bytes)
        memory.blocks[block_id] = np.frombuffer(data, dtype=np.uint8)

    @rule()
    def progress(self) -> None:
        inward = self.own.device.streams[1]
        if inward.queue:
            inward.step()

    @invariant()
    def what_has_another_owner_stays(self) -> None:
        if hasattr(self, "free"):
            assert all(self.own.block(b) == self.held[b] for b in self.free)

    def teardown(self) -> None:
        """Every read ends, and every slot comes back."""
        if not hasattr(self, "free"):
            return
        self.own.inner._blocks_per_poll = 2
        for _ in range(200):
            self.poll()
            self.own.device.run_all()
        assert not self.running
        assert self.own.connector._slots.num_free == self.num_slots


ReadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReadMachine = ReadMachine.TestCase
