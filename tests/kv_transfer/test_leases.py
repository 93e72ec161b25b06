"""Leases: a block is held until it is verified, its lease ends, or its reader stalls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.kv_transfer.leases import LeaseConflict, LeaseKey, LeaseTable, Reader

LIMIT = 30.0
READER = ("decode-1", 4)
KEY = LeaseKey("r1", (1, 1), READER)


def table_with(*block_ids: int, key: LeaseKey = KEY, now: float = 0.0) -> LeaseTable:
    table = LeaseTable(LIMIT)
    table.open(key, now)
    for position, block_id in enumerate(block_ids):
        assert table.add(key, position, block_id, now)
    return table


def test_acknowledgement_releases_leading_positions_once() -> None:
    table = table_with(10, 11, 12)
    assert table.acknowledge(KEY, 2, 1.0) == [10, 11]
    assert table.acknowledge(KEY, 2, 1.0) == []
    assert table.acknowledge(KEY, 1, 1.0) == [], "an older count arriving late"
    assert table.pinned_blocks() == Counter({12: 1})
    assert table.acknowledge(KEY, 3, 1.0) == [12]
    assert table.stale_refused == 0


def test_blocks_are_released_by_position_not_by_count() -> None:
    """The reader has positions 0 and 1 already: they are never leased."""
    table = LeaseTable(LIMIT)
    table.open(KEY, 0.0)
    table.add(KEY, 3, 13, 0.0)
    table.add(KEY, 2, 12, 0.0)
    assert table.acknowledge(KEY, 2, 1.0) == []
    assert table.acknowledge(KEY, 3, 1.0) == [12]


def test_a_block_that_the_reader_has_verified_is_not_held_again() -> None:
    table = table_with(10, 11)
    table.acknowledge(KEY, 2, 1.0)
    assert not table.add(KEY, 1, 11, 2.0)
    assert table.add(KEY, 2, 12, 2.0)
    assert not table.add(KEY, 2, 12, 2.0), "adding twice pins once"
    assert table.pinned_blocks() == Counter({12: 1})


def test_one_position_cannot_hold_two_blocks() -> None:
    table = table_with(10)
    with pytest.raises(LeaseConflict, match="position 0 is leased as block 10, got block 11"):
        table.add(KEY, 0, 11, 1.0)


def test_a_block_shared_by_two_leases_is_pinned_twice() -> None:
    other = LeaseKey("r2", (1, 1), READER)
    table = table_with(10, 11)
    table.open(other, 0.0)
    table.add(other, 0, 10, 0.0)
    assert table.pinned_blocks() == Counter({10: 2, 11: 1})
    assert table.end(KEY) == [10, 11]
    assert table.pinned_blocks() == Counter({10: 1})
    assert list(table) == [(other, 0, 10)]


def test_what_comes_late_for_an_ended_lease_is_refused_counted_and_leaves_no_state() -> None:
    table = table_with(10)
    assert table.end(KEY) == [10]
    assert table.end(KEY) == []
    assert table.acknowledge(KEY, 1, 1.0) == []
    assert not table.add(KEY, 1, 11, 1.0)
    assert table.stale_refused == 2
    assert len(table) == 0 and table.sweep(1e9) == []


def test_opening_twice_changes_nothing() -> None:
    table = table_with(10)
    assert not table.open(KEY, 5.0)
    assert table.pinned_blocks() == Counter({10: 1})


def test_a_silent_reader_loses_its_lease_within_the_limit() -> None:
    table = table_with(10, 11)
    assert table.remaining(KEY, 0.0) == LIMIT
    assert table.sweep(LIMIT) == []
    assert table.sweep(LIMIT + 0.001) == [(KEY, [10, 11])]
    assert KEY not in table and not table.pinned_blocks()


def test_progress_of_any_read_of_the_same_reader_keeps_all_its_leases() -> None:
    other = LeaseKey("r2", (1, 1), READER)
    stranger = LeaseKey("r3", (1, 1), ("decode-2", 1))
    table = table_with(10)
    for key, block in ((other, 20), (stranger, 30)):
        table.open(key, 0.0)
        table.add(key, 0, block, 0.0)
    table.acknowledge(other, 1, 25.0)
    assert table.sweep(40.0) == [(stranger, [30])]
    assert table.sweep(55.1) == [(KEY, [10])], "the lease that holds nothing cannot stall"
    assert other in table


def test_a_repeated_acknowledgement_is_no_progress() -> None:
    table = table_with(10, 11)
    table.acknowledge(KEY, 1, 1.0)
    table.acknowledge(KEY, 1, 30.0)
    assert table.sweep(31.5) == [(KEY, [11])]


def test_new_blocks_do_not_keep_a_dead_reader_alive() -> None:
    table = table_with(10)
    for position in range(1, 40):
        table.add(KEY, position, 10 + position, float(position))
        if KEY not in table or table.sweep(float(position)):
            break
    assert position == LIMIT + 1


def test_a_lease_that_waited_without_blocks_gets_the_whole_limit_for_its_next() -> None:
    table = table_with(10)
    table.acknowledge(KEY, 1, 1.0)
    table.add(KEY, 1, 11, 100.0)
    assert table.sweep(129.0) == []
    assert table.sweep(130.5) == [(KEY, [11])]


def test_a_reader_that_is_gone_loses_everything_and_only_its_own() -> None:
    successor = LeaseKey("r1", (1, 2), ("decode-1", 5))
    table = table_with(10, 11)
    table.open(successor, 0.0)
    table.add(successor, 0, 10, 0.0)
    assert table.end_reader(READER) == [(KEY, [10, 11])]
    assert table.end_reader(READER) == []
    assert table.pinned_blocks() == Counter({10: 1})


@dataclass
class ModelLease:
    blocks: dict[int, int] = field(default_factory=dict)
    verified: int = 0
    alive_at: float = 0.0


READERS: list[Reader] = [("d1", 1), ("d1", 2), ("d2", 1)]
keys = st.builds(
    LeaseKey,
    request_id=st.sampled_from(["a", "b"]),
    attempt=st.sampled_from([(1, 1), (1, 2)]),
    reader=st.sampled_from(READERS),
)


class LeaseMachine(RuleBasedStateMachine):
    """The table against a dictionary: pins made and released must balance to what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LIMIT)
        self.model: dict[LeaseKey, ModelLease] = {}
        self.pins: Counter[int] = Counter()
        self.refused = 0
        self.now = 0.0

    def unpin(self, released: list[int]) -> None:
        self.pins -= Counter(released)

    @rule(key=keys)
    def open(self, key: LeaseKey) -> None:
        assert self.table.open(key, self.now) == (key not in self.model)
        self.model.setdefault(key, ModelLease(alive_at=self.now))

    @rule(key=keys, position=st.integers(0, 6))
    def add(self, key: LeaseKey, position: int) -> None:
        block_id = 10 * position + len(key.request_id)
        added = self.table.add(key, position, block_id, self.now)
        lease = self.model.get(key)
        if lease is None:
            self.refused += 1
            assert not added
            return
        wanted = position not in lease.blocks and position >= lease.verified
        assert added == wanted
        if wanted:
            if not lease.blocks:
                lease.alive_at = max(lease.alive_at, self.now)
            lease.blocks[position] = block_id
            self.pins[block_id] += 1

    @rule(key=keys, count=st.integers(0, 7))
    def acknowledge(self, key: LeaseKey, count: int) -> None:
        released = self.table.acknowledge(key, count, self.now)
        self.unpin(released)
        lease = self.model.get(key)
        if lease is None:
            self.refused += 1
            assert released == []
            return
        assert released == [lease.blocks[p] for p in sorted(lease.blocks) if p < count]
        if count > lease.verified:
            lease.verified = count
            self.touch(key.reader)
        lease.blocks = {p: b for p, b in lease.blocks.items() if p >= count}

    def touch(self, reader: Reader) -> None:
        for key, lease in self.model.items():
            if key.reader == reader:
                lease.alive_at = self.now

    @rule(reader=st.sampled_from(READERS))
    def progress(self, reader: Reader) -> None:
        self.table.progress(reader, self.now)
        self.touch(reader)

    @rule(key=keys)
    def end(self, key: LeaseKey) -> None:
        released = self.table.end(key)
        lease = self.model.pop(key, ModelLease())
        assert released == [lease.blocks[p] for p in sorted(lease.blocks)]
        self.unpin(released)

    @rule(reader=st.sampled_from(READERS))
    def end_reader(self, reader: Reader) -> None:
        ended = self.table.end_reader(reader)
        assert {key for key, _ in ended} == {key for key in self.model if key.reader == reader}
        for key, released in ended:
            assert sorted(released) == sorted(self.model.pop(key).blocks.values())
            self.unpin(released)

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model)
    @rule()
    def sweep(self) -> None:
        expired = dict(self.table.sweep(self.now))
        stalled = {
            key
            for key, lease in self.model.items()
            if lease.blocks and self.now - lease.alive_at > LIMIT
        }
        assert set(expired) == stalled
        for key, released in expired.items():
            assert sorted(released) == sorted(self.model.pop(key).blocks.values())
            self.unpin(released)

    @invariant()
    def what_is_pinned_is_what_is_held(self) -> None:
        held = Counter(b for lease in self.model.values() for b in lease.blocks.values())
        assert self.table.pinned_blocks() == held == self.pins
        assert len(self.table) == len(self.model)
        assert self.table.stale_refused == self.refused


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
