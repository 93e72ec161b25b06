"""Blocks of one size read into blocks of another, by every connector: whole ones are read and
verified, and then their slots go where a move says, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.kv_cache.layout import MAX_BLOCK_SIZE, KVCacheLayout, KVGroup
from kvferry.kv_transfer.connector import IncompatiblePeer, Move, ReadStatus, SlotRun
from kvferry.kv_transfer.memory import allocate_private
from kvferry.kv_transfer.targets import TargetBlocks
from tests.kv_transfer.helpers import (
    COPIED_IN_POLL,
    LAYOUT,
    SOURCE_EPOCH,
    Host,
    Pair,
    collect,
    layout_with,
    polls_until,
)

SIZES = (1, 4, 8, 16, 32, 64, 128)
OK, STALE, CORRUPT, FAILED = (
    ReadStatus.OK,
    ReadStatus.STALE,
    ReadStatus.CORRUPT,
    ReadStatus.FAILED,
)
GROUPS = {
    "float32": KVGroup(0, 2, 3, 8, "float32"),
    "bfloat16": KVGroup(0, 1, 2, 4, "bfloat16"),
    "int8 with scales": KVGroup(0, 2, 2, 5, "int8", scales="float32"),
    "one plane": KVGroup(0, 3, 1, 2, "float16", num_planes=1),
}


def slots_of(memory_row: NDArray[np.uint8], group: KVGroup, size: int) -> list[list[bytes]]:
    """A block's bytes by [slot][(layer, plane, head)], taken apart without the code under test."""
    layout = KVCacheLayout(size, (group,))
    layers, planes, heads, _, dim = layout.block_shape()
    width = layout.block_strides()[3]
    slots: list[list[bytes]] = [[] for _ in range(size)]
    for layer in range(layers):
        for plane in range(planes):
            for head in range(heads):
                begin = layout.byte_offset(layer, plane, head, 0)
                for slot in range(size):
                    at = layout.byte_offset(layer, plane, head, slot)
                    found = bytes(memory_row[at : at + width])
                    if group.scales:
                        scale = begin + group.scales_offset(size) + 4 * slot
                        found += bytes(memory_row[scale : scale + 4])
                    slots[slot].append(found)
    assert dim * len(slots[0][0]) > 0
    return slots


def runs_between(start: int, end: int, first: int, size: int) -> tuple[SlotRun, ...]:
    """Positions from ``start`` of a block that begins at ``first``, block i of the own table i."""
    return tuple(SlotRun(p - first, p // size, p % size, 1) for p in range(start, end))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*GROUPS]),
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.integers(1, 140),
    st.data(),
)
def test_filled_slots_equal_the_source_s_byte_for_byte_by_position(
    group_name: str, there: int, here: int, length: int, data: st.DataObject
) -> None:
    """And slots that were here already, or belong to nobody, keep their bytes."""
    group = GROUPS[group_name]
    begin = data.draw(st.integers(0, length - 1), "positions here already")
    source, own = (KVCacheLayout(size, (group,)) for size in (there, here))
    rng = np.random.default_rng(length)
    blocks = rng.integers(
        0, 256, (source.num_blocks_for(length), source.block_bytes()), dtype=np.uint8
    )
    memory = allocate_private(own.num_blocks_for(length), own.block_bytes())
    memory.blocks[:] = rng.integers(0, 256, memory.blocks.shape, dtype=np.uint8)
    before = [slot for row in memory.blocks for slot in slots_of(row, group, here)]
    targets = TargetBlocks(memory, own)
    for index, block in enumerate(blocks):
        first, end = index * there, min((index + 1) * there, length)
        runs = runs_between(max(first, begin), end, first, here)
        move = Move(None, 0, end - first, None, runs=runs)  # type: ignore[arg-type]
        if runs:
            assert targets.accepts(move, source)
            targets.place(move, block, source)
    wanted = [slot for row in blocks for slot in slots_of(row, group, there)]
    found = [slot for row in memory.blocks for slot in slots_of(row, group, here)]
    assert found[begin:length] == wanted[begin:length]
    assert found[:begin] == before[:begin] and found[length:] == before[length:]


def pair_of(host: Host, there: int, here: int, *, budget: int = 1000, blocks: int = 8) -> Pair:
    """A source and a reader with blocks of these sizes."""
    source = host.worker(
        "source",
        epoch=SOURCE_EPOCH,
        num_blocks=blocks,
        seed=1,
        layout=layout_with(block_size=there),
        match_unit=1,
    )
    reader = host.worker(
        "reader",
        num_blocks=blocks,
        seed=2,
        layout=layout_with(block_size=here),
        blocks_per_poll=budget,
        match_unit=1,
    )
    return Pair(source, reader, reader.connector.connect(source.connector.local_info()))


def moved(pair: Pair, block_id: int, runs: Sequence[SlotRun], *, digest: bool = True) -> Move:
    move = pair.source.move(block_id, runs[0].target, digest=digest)
    return replace(move, runs=tuple(runs))


def rows(pair: Pair, side: str, block_id: int) -> NDArray[np.float32]:
    """A block as [layer, plane, head, slot, dim]."""
    worker = pair.source if side == "source" else pair.reader
    shape = worker.connector.local_info().layout.block_shape()
    found: NDArray[np.float32] = worker.memory.blocks[block_id].view(np.float32).reshape(shape)
    return found


LARGE = [SlotRun(0, 5, 0, 2), SlotRun(2, 1, 0, 2), SlotRun(4, 7, 0, 2), SlotRun(6, 0, 0, 2)]
SMALL = [SlotRun(0, 3, 2, 2)]


def test_one_large_block_fills_several(host: Host) -> None:
    pair = pair_of(host, 8, 2)
    (result,) = pair.read([moved(pair, 6, LARGE)])
    assert (result.status, result.num_bytes) == (OK, pair.source.memory.block_bytes)
    source = rows(pair, "source", 6)
    for run in LARGE:
        wanted = source[:, :, :, run.first : run.first + 2]
        assert np.array_equal(rows(pair, "reader", run.target), wanted, equal_nan=True)


def test_several_small_blocks_fill_one(host: Host) -> None:
    pair = pair_of(host, 2, 8)
    order = [4, 0, 7, 2]
    moves = [moved(pair, block, [SlotRun(0, 3, 2 * i, 2)]) for i, block in enumerate(order)]
    results = pair.read(moves)
    assert [(r.status, r.num_bytes) for r in results] == [(OK, pair.source.memory.block_bytes)] * 4
    wanted = np.concatenate([rows(pair, "source", block) for block in order], axis=3)
    assert np.array_equal(rows(pair, "reader", 3), wanted, equal_nan=True)


@pytest.mark.parametrize("sizes", [(8, 2), (2, 8)])
def test_blocks_and_slots_that_were_not_named_stay_as_they_were(
    host: Host, sizes: tuple[int, int]
) -> None:
    pair = pair_of(host, *sizes)
    before = pair.reader.memory.blocks.copy()
    run = SlotRun(3, 4, 1, 1) if sizes[0] == 8 else SlotRun(1, 4, 5, 1)
    assert pair.read([moved(pair, 2, [run])])[0].status is OK
    changed = np.argwhere(pair.reader.memory.blocks != before)
    assert set(changed[:, 0].tolist()) == {4}
    rows(pair, "reader", 4)[:, :, :, run.target_first] = 0
    pair.reader.memory.blocks[:] ^= before
    shape = pair.reader.connector.local_info().layout.block_shape()
    left = pair.reader.memory.blocks[4].view(np.uint32).reshape(shape)
    others = [slot for slot in range(sizes[1]) if slot != run.target_first]
    assert not left[:, :, :, others].any()


@pytest.mark.parametrize("fault", ["stale", "corrupt", "cancelled"])
def test_a_block_that_does_not_end_ok_writes_no_slot(host: Host, fault: str) -> None:
    """Not even of those that would come before the fault is found."""
    pair = pair_of(host, 8, 2)
    connector = pair.reader.connector
    before = pair.reader.memory.blocks.copy()
    move = moved(pair, 2, LARGE)

    def flip(_move: Move, received: NDArray[np.uint8]) -> None:
        assert received.size == pair.source.memory.block_bytes
        received[-1] ^= 1

    if fault == "corrupt":
        connector.tamper = flip
    read_id = connector.start_read(pair.peer, [move, moved(pair, 3, [SlotRun(0, 6, 0, 2)])])
    if fault == "stale":
        pair.source.memory.raise_generation(2, 9)
        pair.source.memory.raise_generation(3, 9)
    if fault == "cancelled":
        connector.cancel(read_id)
        connector.start_read(pair.peer, [moved(pair, 7, [SlotRun(0, 4, 0, 2)])])
        assert [r.status for r in collect(connector, 1)] == [OK]
        before[4] = pair.reader.memory.blocks[4]
    else:
        wanted = STALE if fault == "stale" else CORRUPT
        assert [r.status for r in collect(connector, 2)] == [wanted] * 2
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_a_block_whose_life_ends_during_the_copy_writes_no_slot(copying_host: Host) -> None:
    pair = pair_of(copying_host, 8, 2)
    before = pair.reader.memory.blocks.copy()

    def rewrite(move: Move, _received: NDArray[np.uint8]) -> None:
        pair.source.memory.raise_generation(move.source.block_id, 4)

    pair.reader.connector.tamper = rewrite
    assert pair.read([moved(pair, 2, LARGE, digest=False)])[0].status is STALE
    assert np.array_equal(pair.reader.memory.blocks, before)


@pytest.mark.parametrize(
    "run",
    [
        SlotRun(7, 0, 0, 2),
        SlotRun(-1, 0, 0, 1),
        SlotRun(0, 0, 1, 2),
        SlotRun(0, 0, -1, 1),
        SlotRun(0, 8, 0, 1),
        SlotRun(0, -1, 0, 1),
        SlotRun(0, 0, 0, 0),
        SlotRun(0, 0, 0, 3),
    ],
)
def test_slots_outside_either_block_fail_and_write_nothing(host: Host, run: SlotRun) -> None:
    pair = pair_of(host, 8, 2)
    before = pair.reader.memory.blocks.copy()
    assert pair.read([moved(pair, 2, [LARGE[0], run])])[0].status is FAILED
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_a_whole_block_of_another_size_fails_and_writes_nothing(host: Host) -> None:
    pair = pair_of(host, 8, 2)
    before = pair.reader.memory.blocks.copy()
    assert pair.read([pair.source.move(2, 1)])[0].status is FAILED
    assert np.array_equal(pair.reader.memory.blocks, before)


def test_blocks_of_one_size_can_be_read_by_slots_too(host: Host) -> None:
    pair = pair_of(host, 4, 4)
    assert pair.read([moved(pair, 2, [SlotRun(1, 3, 1, 3)])])[0].status is OK
    wanted = rows(pair, "source", 2)[:, :, :, 1:]
    assert np.array_equal(rows(pair, "reader", 3)[:, :, :, 1:], wanted, equal_nan=True)


def test_sources_of_several_sizes_are_read_side_by_side(host: Host) -> None:
    pair = pair_of(host, 8, 2)
    other = host.worker("other", epoch=2, seed=3, layout=layout_with(block_size=2), match_unit=1)
    third = host.worker("third", epoch=3, seed=4, layout=layout_with(block_size=1), match_unit=1)
    connector = pair.reader.connector
    small = connector.connect(other.connector.local_info())
    least = connector.connect(third.connector.local_info())
    connector.start_read(pair.peer, [moved(pair, b, [SlotRun(b, 0, b % 2, 1)]) for b in range(2)])
    connector.start_read(small, [replace(other.move(5, 4), num_slots=2)])
    connector.start_read(
        least, [replace(third.move(b, 6), runs=(SlotRun(0, 6, b, 1),)) for b in range(2)]
    )
    assert [r.status for r in collect(connector, 5)] == [OK] * 5
    assert np.array_equal(pair.reader.memory.blocks[4], other.memory.blocks[5])
    for slot in range(2):
        wanted = rows(pair, "source", slot)[:, :, :, slot]
        assert np.array_equal(rows(pair, "reader", 0)[:, :, :, slot], wanted, equal_nan=True)
        one = third.memory.blocks[slot].view(np.float32).reshape(2, 2, 2, 8)
        assert np.array_equal(rows(pair, "reader", 6)[:, :, :, slot], one, equal_nan=True)


def test_a_poll_s_budget_is_in_bytes_whatever_the_blocks(host: Host) -> None:
    """Two own blocks of eight slots are as much as four source blocks of four."""
    pair = pair_of(host, 4, 8, budget=2)
    connector = pair.reader.connector
    connector.start_read(pair.peer, [moved(pair, b, [SlotRun(0, b, 0, 4)]) for b in range(8)])
    polls = [len(results) for results in polls_until(connector, 8)]
    assert max(polls) <= 4 and sum(polls) == 8
    if host.kind in (*COPIED_IN_POLL,) and host.kind != "local":
        assert polls == [4, 4, 0]


def test_a_block_larger_than_the_budget_is_read_all_the_same(host: Host) -> None:
    pair = pair_of(host, 128, 1, budget=1, blocks=128)
    moves = [moved(pair, b, [SlotRun(b, b, 0, 1)]) for b in range(2)]
    assert [r.status for r in pair.read(moves)] == [OK, OK]


# --- what is refused ------------------------------------------------------------------------------


def refusal(host: Host, source: KVCacheLayout, unit: int, own_unit: int) -> str:
    reader = host.worker("reader", match_unit=own_unit)
    other = host.worker("source", layout=source, match_unit=unit)
    with pytest.raises(IncompatiblePeer) as error:
        reader.connector.connect(other.connector.local_info())
    return str(error.value)


def test_another_match_unit_is_refused_with_both_values(host: Host) -> None:
    """No chain value of the one would ever be one of the other."""
    message = refusal(host, layout_with(block_size=8), 8, 4)
    assert "match_unit is 8 there, 4 here" in message and "block_size" not in message
    assert "match_unit is 2 there, 4 here" in refusal(Host("local"), LAYOUT, 2, 0)


def test_another_block_size_is_refused_with_both_values_where_pools_have_several_groups(
    host: Host,
) -> None:
    message = refusal(host, KVCacheLayout(8, LAYOUT.groups * 2), 4, 4)
    assert "block_size is 8 there, 4 here" in message


def test_a_block_size_beyond_the_largest_is_refused_with_both_values(host: Host) -> None:
    """What a peer says of itself decides how much memory its blocks take here."""
    message = refusal(host, layout_with(block_size=2 * MAX_BLOCK_SIZE), 4, 4)
    assert f"block_size is {2 * MAX_BLOCK_SIZE} there, 4 here" in message


def test_with_another_block_size_every_other_difference_is_still_refused(host: Host) -> None:
    message = refusal(host, layout_with(block_size=8, dtype="int8", scales="float32"), 4, 4)
    assert "dtype is 'int8' there, 'float32' here" in message
    assert "scales is 'float32' there, '' here" in message
