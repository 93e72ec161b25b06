"""Block tables: where a position lies, how tables grow, copy on write, and what sealing says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.block_table import BlockTable, KVCacheManager, SealedBlock
from kvferry.kv_cache.hashing import HashChain, block_hash, root_hash

ROOT = root_hash("m@1")
TOKENS = list(range(100, 120))


def manager(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size=4)


def grown(kv: KVCacheManager, num_tokens: int) -> BlockTable:
    """A table that holds ``num_tokens`` computed positions, sealed to the last."""
    table = BlockTable(kv.block_size)
    assert kv.allocate(table, 0, num_tokens) == []
    kv.seal(table, TOKENS, num_tokens, HashChain(ROOT, kv.block_size), include_partial=True)
    return table


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True),
    st.integers(1, 5),
    st.data(),
)
def test_a_position_lies_in_its_block_at_its_offset(
    block_ids: list[int], size: int, data: st.DataObject
) -> None:
    table = BlockTable(size, block_ids)
    places = [block_id * size + offset for block_id in block_ids for offset in range(size)]
    assert table.capacity == len(places)
    assert [table.slot(p) for p in range(table.capacity)] == places
    start = data.draw(st.integers(0, table.capacity))
    count = data.draw(st.integers(0, table.capacity - start))
    assert table.slot_mapping(start, count) == places[start : start + count]


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_a_table_holds_the_blocks_that_its_tokens_fill_and_no_more(
    tokens: int, blocks: int
) -> None:
    kv = manager()
    table = BlockTable(4)
    assert kv.blocks_for(tokens) == kv.blocks_needed(table, tokens) == blocks
    assert kv.allocate(table, 0, tokens) == []
    assert len(table.block_ids) == blocks
    assert kv.blocks_needed(table, tokens) == 0
    assert kv.blocks_needed(table, tokens + 4) == 1
    assert kv.pool.num_free == 8 - blocks


def test_a_table_that_cannot_grow_is_left_as_it_was() -> None:
    kv = manager(num_blocks=3)
    table = grown(kv, 6)
    kv.pool.pin(table.block_ids[1])
    before = repr(table), repr(kv.pool.blocks)
    assert kv.allocate(table, 6, 12) is None, "one block for growth and one for the copy"
    assert (repr(table), repr(kv.pool.blocks)) == before
    assert kv.pool.num_free == 1
    assert kv.allocate(table, 6, 8) is not None


def test_appending_to_a_block_of_ones_own_reopens_it_in_place() -> None:
    kv = manager()
    table = grown(kv, 6)
    tail = table.block_ids[1]
    assert kv.allocate(table, 6, 7) == []
    assert table.block_ids[1] == tail
    assert kv.pool.blocks[tail].state is BlockState.OPEN
    assert kv.pool.blocks[tail].generation == 2
    assert kv.pool.blocks[table.block_ids[0]].generation == 1
    assert table.num_sealed == 1


@pytest.mark.parametrize("owner", ["table", "lease"])
def test_appending_to_a_block_with_another_owner_copies_it(owner: str) -> None:
    kv = manager()
    table = grown(kv, 6)
    head, tail = table.block_ids
    (kv.pool.share if owner == "table" else kv.pool.pin)(tail)
    copies = kv.allocate(table, 6, 10)
    assert copies is not None
    ((source, target),) = copies
    assert source == tail
    assert table.block_ids[:2] == [head, target] and len(table.block_ids) == 3
    assert len({*table.block_ids, tail}) == 4
    assert table.num_sealed == 1
    assert kv.pool.blocks[target].state is BlockState.OPEN
    old = kv.pool.blocks[tail]
    assert (old.state, old.generation) == (BlockState.SEALED, 1)
    others = 1 if owner == "table" else 0
    assert old.ref_count == others + 1, "nobody may write the source before the copy is made"
    assert table.held_ids == [*table.block_ids, tail]
    kv.copies_made(table)
    assert old.ref_count == others
    kv.copies_made(table)
    assert old.ref_count == others
    assert kv.allocate(table, 6, 10) == [], "the copy is the table's own"


@pytest.mark.parametrize(("computed", "tokens"), [(4, 5), (8, 12), (6, 6)])
def test_what_ends_at_a_block_boundary_or_writes_nothing_is_neither_copied_nor_reopened(
    computed: int, tokens: int
) -> None:
    kv = manager()
    table = grown(kv, computed)
    held = list(table.block_ids)
    for block_id in held:
        kv.pool.share(block_id)
    assert kv.allocate(table, computed, tokens) == []
    assert table.block_ids[: len(held)] == held
    assert table.num_sealed == len(held)


def test_recomputing_the_last_token_of_a_shared_full_block_copies_it() -> None:
    kv = manager()
    table = grown(kv, 8)
    tail = table.block_ids[1]
    kv.pool.share(tail)
    copies = kv.allocate(table, 7, 8)
    assert copies is not None and [source for source, _ in copies] == [tail]
    assert table.num_sealed == 1


def test_sealing_names_each_full_block_once_with_the_chain_hash() -> None:
    kv = manager()
    chain = HashChain(ROOT, 4)
    table = BlockTable(4)
    kv.allocate(table, 0, 10)
    assert kv.seal(table, TOKENS, 3, chain) == []
    first, second = table.block_ids[:2]
    assert kv.seal(table, TOKENS, 9, chain) == [SealedBlock(0, first, 4), SealedBlock(4, second, 4)]
    assert kv.seal(table, TOKENS, 9, chain) == []
    assert table.num_sealed == 2
    one = block_hash(ROOT, TOKENS[:4])
    assert kv.pool.blocks[first].block_hash == one
    assert kv.pool.blocks[second].block_hash == block_hash(one, TOKENS[4:8])
    assert kv.pool.blocks[table.block_ids[2]].state is BlockState.OPEN


@pytest.mark.parametrize("computed", [1, 3, 5, 8])
def test_the_last_partial_block_is_sealed_when_asked_with_its_filled_count(computed: int) -> None:
    kv = manager()
    chain = HashChain(ROOT, 4)
    table = BlockTable(4)
    kv.allocate(table, 0, computed)
    sealed = kv.seal(table, TOKENS, computed, chain, include_partial=True)
    assert sum(block.num_tokens for block in sealed) == computed
    last = kv.pool.blocks[table.block_ids[-1]]
    assert last.state is BlockState.SEALED
    assert last.num_tokens == sealed[-1].num_tokens == (computed - 1) % 4 + 1
    assert last.block_hash == HashChain(ROOT, 4).at(len(sealed) - 1, TOKENS[:computed])


def test_sealing_reads_only_the_tokens_of_the_blocks_it_seals() -> None:
    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            reads.append(key)
            return super().__getitem__(key)

    reads: list[object] = []
    kv, table, chain = manager(), BlockTable(4), HashChain(ROOT, 4)
    kv.allocate(table, 0, 12)
    kv.seal(table, Watched(TOKENS), 8, chain)
    kv.seal(table, Watched(TOKENS), 11, chain)
    kv.seal(table, Watched(TOKENS), 12, chain)
    assert reads == [slice(0, 4), slice(4, 8), slice(8, 12)]


def test_who_has_seen_a_list_of_blocks_finds_it_grown_or_another_one() -> None:
    kv = manager()
    table = grown(kv, 6)
    seen, before = table.block_ids, list(table.block_ids)
    kv.allocate(table, 6, 13)
    assert table.block_ids is seen and seen[:2] == before
    shared = grown(kv, 6)
    seen, before = shared.block_ids, list(shared.block_ids)
    kv.pool.share(shared.block_ids[1])
    ((source, target),) = kv.allocate(shared, 6, 8) or []
    assert (source, shared.block_ids) == (before[1], [before[0], target])
    assert seen == before and shared.block_ids is not seen
    kv.free(shared)
    assert seen == before


def test_a_reopened_block_is_sealed_again_with_its_new_hash() -> None:
    kv = manager()
    chain = HashChain(ROOT, 4)
    table = grown(kv, 6)
    kv.allocate(table, 6, 8)
    assert kv.seal(table, TOKENS, 8, chain) == [SealedBlock(4, table.block_ids[1], 4)]
    assert kv.pool.blocks[table.block_ids[1]].block_hash == chain.at(1, TOKENS)


def test_freeing_twice_is_harmless() -> None:
    kv = manager()
    table = grown(kv, 6)
    kv.free(table)
    kv.free(table)
    assert (table.block_ids, table.num_sealed) == ([], 0)
    assert kv.pool.num_free == 8


def test_a_table_frees_something_when_one_block_has_no_other_owner() -> None:
    kv = manager()
    table = grown(kv, 8)
    first, second = table.block_ids
    kv.pool.pin(first)
    assert kv.has_freeable_block(table)
    kv.pool.share(second)
    assert not kv.has_freeable_block(table)
    kv.pool.release([second])
    kv.pool.unpin(first)
    assert kv.has_freeable_block(table)
    assert not kv.has_freeable_block(BlockTable(4))


def test_a_table_whose_blocks_are_being_read_into_frees_nothing() -> None:
    kv = manager()
    table = BlockTable(4)
    kv.allocate(table, 0, 4)
    kv.pool.begin_transfer(table.block_ids[0])
    assert not kv.has_freeable_block(table)


def test_a_quarantined_block_frees_nothing_and_is_never_written_again() -> None:
    kv = manager()
    table = grown(kv, 6)
    head, tail = table.block_ids
    kv.pool.quarantine(tail)
    copies = kv.allocate(table, 6, 7)
    assert copies is not None and [source for source, _ in copies] == [tail]
    kv.pool.quarantine(head)
    kv.pool.quarantine(table.block_ids[1])
    assert not kv.has_freeable_block(table)
