"""The audit: each block once under its strongest owner, and what disagrees is named by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_cache.audit import BlockClass, Owner, OwnerKind, PoolAudit, audit
from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.block_table import BlockTable, KVCacheManager
from kvferry.kv_cache.hashing import HashChain, root_hash


class House:
    """A pool with two requests, a lease on one block and a running read, all in order."""

    def __init__(self) -> None:
        self.pool = BlockPool(10)
        self.kv = KVCacheManager(self.pool, 4)
        self.tables = {"a": BlockTable(4), "b": BlockTable(4)}
        chain = HashChain(root_hash("m@1"), 4)
        for table in self.tables.values():
            self.kv.allocate(table, 0, 8)
            self.kv.seal(table, list(range(8)), 8, chain)
        self.leases = [("a", self.tables["a"].block_ids[0]), ("gone", self.pool.allocate(1)[0])]
        self.pool.seal(self.leases[1][1], 4)
        for _, block_id in self.leases:
            self.pool.pin(block_id)
        self.pool.release([self.leases[1][1]])
        self.reads = [self.pool.allocate(1)[0]]
        self.pool.begin_transfer(self.reads[0])
        self.pool.release(self.reads)

    def owners(self) -> list[Owner]:
        return [
            *(Owner(OwnerKind.REQUEST, b, n) for n, t in self.tables.items() for b in t.block_ids),
            *(Owner(OwnerKind.READER, b, n, 1, "decode-0", 3.0) for n, b in self.leases),
            *(Owner(OwnerKind.WRITER, b, "c", 2, "prefill-0") for b in self.reads),
        ]

    def audit(self) -> PoolAudit:
        return audit(self.pool, self.owners())


COUNTS = {
    BlockClass.REFERENCED: 4,
    BlockClass.IN_TRANSFER: 1,
    BlockClass.PINNED: 1,
    BlockClass.CACHED: 0,
    BlockClass.FREE: 4,
    BlockClass.QUARANTINED: 0,
}


def test_a_house_in_order_is_consistent_and_its_classes_sum_to_the_pool() -> None:
    found = House().audit()
    assert found.consistent and found.problems == ()
    assert found.counts == COUNTS
    assert sum(found.counts.values()) == 10


def test_a_planted_leak_is_named() -> None:
    """A table is dropped and its blocks are not given back."""
    house = House()
    leaked = house.tables.pop("b").block_ids
    found = house.audit()
    assert not found.consistent
    assert len(found.problems) == 2
    for block_id, problem in zip(leaked, found.problems, strict=True):
        assert f"block {block_id} leaked" in problem
        assert "1 references, 0 pins, 0 transfers" in problem
    assert found.counts[BlockClass.REFERENCED] == 2, "the classes come from the owners"


def test_a_leak_is_named_even_where_the_counts_were_wiped() -> None:
    """Not free, yet owned by nobody: a block that fell out of the free list."""
    house = House()
    block_id = house.pool.allocate(1)[0]
    house.pool.blocks[block_id].ref_count = 0
    house.pool.blocks[block_id].state = BlockState.FREE
    (problem,) = house.audit().problems
    assert f"block {block_id} leaked" in problem


def test_a_double_free_is_named() -> None:
    """A block is given back twice: it is on the free list while a table still lists it."""
    house = House()
    block_id = house.tables["a"].block_ids[1]
    house.pool.release([block_id])
    (problem,) = house.audit().problems
    assert f"block {block_id} freed too often" in problem
    assert "request a#0" in problem
    assert house.audit().counts == COUNTS


def test_a_double_free_is_named_after_the_block_has_gone_to_another() -> None:
    house = House()
    block_id = house.tables["a"].block_ids[1]
    house.pool.release([block_id])
    house.tables["d"] = BlockTable(4)
    while block_id not in house.tables["d"].block_ids:
        house.tables["d"].block_ids.extend(house.pool.allocate(1))
    (problem,) = house.audit().problems
    assert problem == f"block {block_id}: the pool counts 1 references, its owners are 2"


def test_a_dropped_lease_is_named() -> None:
    """A lease is forgotten and its pin stays: on a block without and with another owner."""
    house = House()
    (_, referenced), (_, alone) = house.leases
    house.leases.clear()
    found = house.audit()
    assert sorted(found.problems) == sorted(
        [
            f"block {referenced}: the pool counts 1 pins, its owners are 0",
            f"block {alone} leaked: no owner, yet not free "
            "(0 references, 1 pins, 0 transfers counted)",
        ]
    )
    assert found.counts[BlockClass.PINNED] == 0


def test_a_lease_whose_pin_was_lost_is_named() -> None:
    house = House()
    for _, block_id in house.leases:
        house.pool.unpin(block_id)
    (_, referenced), (_, alone) = house.leases
    found = house.audit()
    assert len(found.problems) == 2
    assert f"block {referenced}: the pool counts 0 pins, its owners are 1" in found.problems
    assert any(
        f"block {alone} freed too often" in problem and "reader gone#1 for decode-0" in problem
        for problem in found.problems
    )


def test_a_read_that_the_pool_does_not_know_is_named() -> None:
    house = House()
    block_id = house.tables["a"].block_ids[1]
    house.reads.append(block_id)
    (problem,) = house.audit().problems
    assert problem == f"block {block_id}: the pool counts 0 transfers, its owners are 1"


def test_an_owner_of_a_block_that_does_not_exist_is_named() -> None:
    house = House()
    house.tables["a"].block_ids.extend([10, -1])
    found = house.audit()
    assert found.counts == COUNTS
    assert len(found.problems) == 2
    assert "request a#0 holds block 10, which does not exist" in found.problems[0]
    assert "block -1" in found.problems[1]


@given(st.data())
def test_the_classes_come_from_the_owners_and_no_count_of_the_pool(data: st.DataObject) -> None:
    house = House()
    few = st.integers(0, 3)
    for block in house.pool.blocks:
        block.ref_count, block.num_pins, block.num_transfers = data.draw(st.tuples(few, few, few))
        block.state = data.draw(st.sampled_from(BlockState))
    house.pool._free.clear()
    found = house.audit()
    assert found.counts == COUNTS
    assert not found.consistent, "four blocks are no longer free"
    for audited in found.blocks:
        tables = [t for t in house.tables.values() if audited.block_id in t.block_ids]
        assert audited.ref_count == len(tables)


STRONGEST_FIRST = [
    (OwnerKind.REQUEST, BlockClass.REFERENCED),
    (OwnerKind.WRITER, BlockClass.IN_TRANSFER),
    (OwnerKind.READER, BlockClass.PINNED),
    (OwnerKind.INDEX, BlockClass.CACHED),
]


@pytest.mark.parametrize("strongest", range(5))
def test_a_block_counts_once_under_its_strongest_owner(strongest: int) -> None:
    pool = BlockPool(1)
    owners = [Owner(kind, 0, "r") for kind, _ in reversed(STRONGEST_FIRST[strongest:])]
    found = audit(pool, owners)
    wanted = STRONGEST_FIRST[strongest][1] if owners else BlockClass.FREE
    assert {name for name, count in found.counts.items() if count} == {wanted}
    pool.quarantine(0)
    assert audit(pool, owners).counts[BlockClass.QUARANTINED] == 1


def test_a_quarantined_block_without_owners_is_no_leak() -> None:
    house = House()
    house.pool.quarantine(house.reads[0])
    house.pool.end_transfer(house.reads.pop())
    found = house.audit()
    assert found.consistent
    assert found.counts[BlockClass.QUARANTINED] == 1
    assert sum(found.counts.values()) == 10


def test_a_quarantined_block_that_could_be_handed_out_is_named() -> None:
    house = House()
    house.pool.blocks[9].quarantined = True
    (problem,) = house.audit().problems
    assert problem == "block 9 is quarantined, yet on the free list"


def test_the_blocks_that_are_not_free_are_listed_with_their_owners() -> None:
    house = House()
    house.pool.share(house.tables["b"].block_ids[0])
    house.tables["c"] = BlockTable(4, [house.tables["b"].block_ids[0]])
    found = {block.block_id: block for block in house.audit().blocks}
    assert len(found) == 6
    shared = found[house.tables["c"].block_ids[0]]
    assert (shared.ref_count, shared.num_tokens, shared.generation) == (2, 4, 1)
    assert [owner.request_id for owner in shared.owners] == ["b", "c"]
    leased = found[house.leases[0][1]]
    assert leased.block_class is BlockClass.REFERENCED
    assert {owner.kind for owner in leased.owners} == {OwnerKind.REQUEST, OwnerKind.READER}
    assert leased.block_hash == house.pool.blocks[leased.block_id].block_hash is not None
