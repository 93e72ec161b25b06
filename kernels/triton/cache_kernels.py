"""Rotary embedding with the write into the pool, and copies of whole blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from kvferry.kernels.triton.numerics import PLAIN, narrowed, quantised


@triton.jit
def _store_row(
    row,
    lanes,
    inside,
    pool,
    scales,
    slot,
    block_size,
    block_stride,
    scales_block_stride,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """A row of float32 into its slot; ``pool`` and ``scales`` begin at the plane and head."""
    block = slot // block_size
    offset = slot % block_size
    place = pool + block * block_stride + offset * HEAD_DIM + lanes
    if FORMAT == PLAIN:
        tl.store(place, narrowed(row, pool.dtype.element_ty), mask=inside)
    else:
        stored, scale = quantised(row, FORMAT)
        tl.store(place, stored, mask=inside)
        tl.store(scales + block * scales_block_stride + offset, scale)


@triton.jit
def rope_and_store(
    out,
    qk,
    v,
    cos,
    sin,
    pool,
    scales,
    slot_mapping,
    block_size,
    qk_token_stride,
    qk_head_stride,
    v_token_stride,
    v_head_stride,
    pool_block_stride,
    pool_plane_stride,
    pool_head_stride,
    scales_block_stride,
    scales_plane_stride,
    scales_head_stride,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    TURNS: tl.constexpr,
    STORES: tl.constexpr,
):
    """A program per token and head: queries go to ``out``, keys and values to the pool.

    Grid: (num_tokens, num_heads + 2 * num_kv_heads); of these the last ``num_kv_heads`` are values.
    A negative slot is not written. Without TURNS queries and keys are left as they are; without
    STORES there is no pool, and all heads are queries.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lanes = tl.arange(0, PADDED)
    inside = lanes < HEAD_DIM
    is_value = head >= num_heads + num_kv_heads
    if is_value:
        value_head = head - num_heads - num_kv_heads
        place = v + token * v_token_stride + value_head * v_head_stride
        row = tl.load(place + lanes, mask=inside, other=0.0).to(tl.float32)
    else:
        place = qk + token * qk_token_stride + head * qk_head_stride
        row = tl.load(place + lanes, mask=inside, other=0.0).to(tl.float32)
        if TURNS:
            HALF: tl.constexpr = HEAD_DIM // 2
            # What dimension i is turned against: i + half, negative, or i - half.
            against = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
            other = tl.load(place + against, mask=inside, other=0.0).to(tl.float32)
            angle = token * HEAD_DIM + lanes
            turned_by = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            row = (
                row * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
                + tl.where(lanes < HALF, -other, other) * turned_by
            )
    row = narrowed(row, qk.dtype.element_ty).to(tl.float32)
    if head < num_heads:
        result = out + (token * num_heads + head) * HEAD_DIM + lanes
        tl.store(result, narrowed(row, out.dtype.element_ty), mask=inside)
    elif STORES:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            plane = is_value.to(tl.int64)
            kv_head = tl.where(is_value, head - num_heads - num_kv_heads, head - num_heads)
            _store_row(
                row,
                lanes,
                inside,
                pool + plane * pool_plane_stride + kv_head * pool_head_stride,
                scales + plane * scales_plane_stride + kv_head * scales_head_stride,
                slot,
                block_size,
                pool_block_stride,
                scales_block_stride,
                HEAD_DIM,
                FORMAT,
            )


@triton.jit
def move_blocks(
    target,
    source,
    target_ids,
    source_ids,
    words,
    HAS_TARGET_IDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The block of the source's id ``i`` to that of the target's; without ids it is block ``i``.

    Blocks are ``words`` elements each. Grid: (ids, parts of LANES).
    """
    place = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < words
    to, origin = place, place
    if HAS_TARGET_IDS:
        to = tl.load(target_ids + place).to(tl.int64)
    if HAS_SOURCE_IDS:
        origin = tl.load(source_ids + place).to(tl.int64)
    tl.store(
        target + to * words + lanes,
        tl.load(source + origin * words + lanes, mask=inside),
        mask=inside,
    )
