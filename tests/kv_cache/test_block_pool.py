"""The block pool: owners, generations, the order of the free list, and misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.kv_cache.block_pool import (
    BlockAccountingError,
    BlockPool,
    BlockState,
    OutOfBlocks,
)
from kvferry.kv_cache.hashing import BlockHash

HASH = BlockHash(b"0123456789abcdef")


def sealed(pool: BlockPool, count: int = 1) -> list[int]:
    block_ids = pool.allocate(count)
    for block_id in block_ids:
        pool.seal(block_id, 4, HASH)
    return block_ids


def test_an_allocated_block_is_open_with_one_reference_and_a_new_generation() -> None:
    pool = BlockPool(2)
    (block_id,) = sealed(pool)
    before = pool.blocks[block_id].generation
    pool.release([block_id])
    pool.allocate(2)
    block = pool.blocks[block_id]
    assert block.generation == before + 1
    assert (block.state, block.ref_count) == (BlockState.OPEN, 1)
    assert (block.num_tokens, block.block_hash) == (0, None), "nothing of the old life is left"


def test_allocation_takes_all_or_nothing_and_names_both_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert [block.generation for block in pool.blocks] == [1, 1, 0, 0]
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(0) == []


def test_the_least_recently_freed_block_is_taken_first_and_of_a_table_its_tail() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [5, *reversed(second), *reversed(first)]


def test_a_block_is_freed_when_its_last_owner_leaves_whichever_that_is() -> None:
    pool = BlockPool(4)
    shared, pinned = sealed(pool, 2)
    (target,) = pool.allocate(1)
    pool.share(shared)
    pool.pin(pinned)
    pool.pin(pinned)
    pool.begin_transfer(target)
    pool.release([shared, pinned, target])
    assert [pool.is_free(block_id) for block_id in range(4)] == [False, False, False, True]
    pool.unpin(pinned)
    assert not pool.is_free(pinned)
    pool.end_transfer(target)
    pool.release([shared])
    pool.unpin(pinned)
    assert [pool.blocks[block_id].state for block_id in range(4)] == [BlockState.FREE] * 4
    assert pool.allocate(4) == [3, target, shared, pinned], "in the order in which they were freed"


def test_a_generation_is_published_before_the_block_may_be_written() -> None:
    published: list[tuple[int, int]] = []

    def publish(block_id: int, generation: int) -> None:
        assert pool.blocks[block_id].state is not BlockState.OPEN
        assert pool.blocks[block_id].generation == generation
        published.append((block_id, generation))

    pool = BlockPool(2, publish)
    block_id, other = pool.allocate(2)
    pool.seal(block_id, 3)
    assert published == [(block_id, 1), (other, 1)], "sealing begins no new life"
    pool.reopen(block_id)
    assert published[2:] == [(block_id, 2)]


def test_a_reopened_block_is_the_same_block_in_a_new_life() -> None:
    pool = BlockPool(1)
    (block_id,) = sealed(pool)
    pool.reopen(block_id)
    block = pool.blocks[block_id]
    assert (block.state, block.ref_count, block.generation) == (BlockState.OPEN, 1, 2)
    assert (block.num_tokens, block.block_hash) == (0, None)
    assert pool.num_free == 0


def test_sealing_keeps_the_generation_and_notes_tokens_and_hash() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.seal(block_id, 3, HASH)
    block = pool.blocks[block_id]
    assert (block.state, block.generation) == (BlockState.SEALED, 1)
    assert (block.num_tokens, block.block_hash) == (3, HASH)


def shared_block(pool: BlockPool, block_id: int) -> None:
    pool.seal(block_id, 4)
    pool.share(block_id)


def pinned_block(pool: BlockPool, block_id: int) -> None:
    pool.seal(block_id, 4)
    pool.pin(block_id)


def released_block(pool: BlockPool, block_id: int) -> None:
    pool.release([block_id])


def sealed_block(pool: BlockPool, block_id: int) -> None:
    pool.seal(block_id, 4)


def block_being_read(pool: BlockPool, block_id: int) -> None:
    pool.begin_transfer(block_id)


def open_block(pool: BlockPool, block_id: int) -> None:
    """As allocated."""


MISUSES: list[tuple[str, Callable[[BlockPool, int], None], str]] = [
    ("release", released_block, "block 1 is released but not referenced"),
    ("share", released_block, "block 1 is shared while free"),
    ("share", open_block, "block 1 is shared while open"),
    ("pin", open_block, "block 1 is pinned while open"),
    ("pin", released_block, "block 1 is pinned while free"),
    ("unpin", sealed_block, "block 1 is unpinned but not pinned"),
    ("begin_transfer", sealed_block, "block 1 is a read's target while not open"),
    ("begin_transfer", released_block, "block 1 is a read's target while not open"),
    ("end_transfer", open_block, "block 1 ends a transfer that never began"),
    ("seal", sealed_block, "block 1 is sealed while sealed"),
    ("seal", released_block, "block 1 is sealed while free"),
    ("seal", block_being_read, "block 1 is sealed while a read writes into it"),
    ("reopen", shared_block, "block 1 is reopened while shared or pinned"),
    ("reopen", pinned_block, "block 1 is reopened while shared or pinned"),
    ("reopen", released_block, "block 1 is reopened while free"),
    ("reopen", open_block, "block 1 is reopened while open"),
]


@pytest.mark.parametrize(("method", "prepare", "message"), MISUSES)
def test_misuse_is_refused_by_block_and_changes_nothing(
    method: str, prepare: Callable[[BlockPool, int], None], message: str
) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    prepare(pool, 1)
    before = repr(pool.blocks), pool.num_free
    with pytest.raises(BlockAccountingError, match=message):
        match method:
            case "release":
                pool.release([1])
            case "seal":
                pool.seal(1, 4)
            case _:
                getattr(pool, method)(1)
    assert (repr(pool.blocks), pool.num_free) == before


def test_a_quarantined_block_is_never_handed_out_again() -> None:
    pool = BlockPool(3)
    owned, _, never = pool.allocate(3)
    pool.release([never])
    pool.begin_transfer(owned)
    pool.quarantine(owned)
    pool.quarantine(never)
    pool.end_transfer(owned)
    pool.release([owned])
    assert pool.num_free == 0
    assert not pool.is_free(owned) and not pool.is_free(never)


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0, wanted at least 1"):
        BlockPool(0)


def test_classes_are_counted_under_the_strongest_owner() -> None:
    pool = BlockPool(6)

    def held() -> dict[str, int]:
        return {name: count for name, count in pool.count_classes().items() if count}

    assert held() == {"free": 6}
    shared, read_into, lost = pool.allocate(3)
    pool.begin_transfer(read_into)
    pool.begin_transfer(read_into)
    pool.seal(shared, 4, HASH)
    pool.pin(shared)
    pool.pin(shared)
    assert held() == {"referenced": 3, "free": 3}
    pool.release([shared, read_into])
    assert held() == {"referenced": 1, "in_transfer": 1, "pinned": 1, "free": 3}
    pool.unpin(shared)
    pool.end_transfer(read_into)
    assert held() == {"referenced": 1, "in_transfer": 1, "pinned": 1, "free": 3}
    pool.quarantine(read_into)
    pool.quarantine(lost)
    assert held() == {"quarantined": 2, "pinned": 1, "free": 3}
    pool.unpin(shared)
    pool.end_transfer(read_into)
    pool.release([lost])
    assert held() == {"quarantined": 2, "free": 4}
