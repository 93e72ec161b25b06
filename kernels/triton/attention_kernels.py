"""The two attention kernels: tiles of queries over tiles of keys, and the reduction of splits.

One kernel for prefill chunks and decode steps. A program takes a tile of rows of one KV head: the
queries of a few consecutive tokens of one sequence with all heads that read this KV head, packed,
so that a single token of grouped-query attention fills the rows of a matrix unit as well as it can.
It goes over a span of the keys with a running maximum and sum. With more than one split the spans
of a sequence are cut evenly by its own length, and the parts meet in ``reduce_splits``.

No program reads lengths on the host: the grid is an upper bound, and a program beyond the last tile
returns. Keys and values behind the last valid position are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvferry.kernels.triton.numerics import PLAIN, narrowed, widened

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence that a tile belongs to. Sequence ``s`` begins at tile ``cu[s] // TOKENS + s``,
    so that each has at least as many tiles as it needs and nobody has to count them.
    """
    low = tile * 0
    high = low + num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_q + middle) // TOKENS + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # they differ from step to step
def attend(
    out,
    partial,
    partial_max,
    partial_sum,
    q,
    pool,
    scales,
    block_tables,
    cu_seqlens_q,
    seq_lens,
    num_seqs,
    scale,
    soft_cap,
    window,
    block_size,
    q_token_stride,
    q_head_stride,
    pool_block_stride,
    pool_plane_stride,
    pool_head_stride,
    scales_block_stride,
    scales_plane_stride,
    scales_head_stride,
    table_stride,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (tiles, KV heads, SPLITS). ``pool`` and ``scales`` begin at the layer.

    out: [num_tokens, num_heads, HEAD_DIM], contiguous; written where SPLITS is 1.
    partial: [num_tokens, num_heads, SPLITS, HEAD_DIM] float32, the weighted sums of the splits, of
        which partial_max and partial_sum, [num_tokens, num_heads, SPLITS], are the largest score
        (in powers of 2) and the sum of weights.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = sequence_of(cu_seqlens_q, tile, num_seqs, TOKENS)
    first = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first
    first_query = (tile - (first // TOKENS + seq)) * TOKENS
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    queries = first_query + rows // GROUP
    row_ok = (rows < TOKENS * GROUP) & (queries < query_len)
    dim_ok = dims < HEAD_DIM
    heads = kv_head * GROUP + rows % GROUP
    tokens = (first + queries).to(tl.int64)
    positions = seq_len - query_len + queries
    q_tile = tl.load(
        q + (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :],
        mask=row_ok[:, None] & dim_ok[None, :],
        other=0.0,
    ).to(COMPUTE)

    # The keys that any query of the tile sees, cut among the splits in whole tiles.
    end = tl.minimum(seq_len, seq_len - query_len + first_query + TOKENS)
    begin = end * 0
    oldest = begin
    if HAS_WINDOW:
        oldest = tl.maximum(seq_len - query_len + first_query - window + 1, 0)
        begin = oldest // KEYS * KEYS
    if SPLITS > 1:
        per_split = (seq_len - begin + SPLITS * KEYS - 1) // (SPLITS * KEYS) * KEYS
        begin += split * per_split
        end = tl.minimum(end, begin + per_split)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    head_base = pool + kv_head * pool_head_stride
    scales_base = scales + kv_head * scales_head_stride
    lanes = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        places = start + lanes
        key_ok = (places < end) & (places >= oldest)
        blocks = tl.load(table + places // block_size, mask=key_ok, other=0).to(tl.int64)
        slots = places % block_size
        starts = blocks * pool_block_stride + slots * HEAD_DIM
        tile_ok = key_ok[:, None] & dim_ok[None, :]
        keys = tl.load(head_base + starts[:, None] + dims[None, :], mask=tile_ok, other=0)
        scores = tl.dot(q_tile, tl.trans(widened(keys, FORMAT, COMPUTE)), input_precision=PRECISION)
        scores *= scale
        if FORMAT != PLAIN:
            scale_places = blocks * scales_block_stride + slots
            scores *= tl.load(scales_base + scale_places, mask=key_ok, other=0.0)[None, :]
        if HAS_CAP:
            # cap * tanh(s / cap)
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        seen = key_ok[None, :] & (places[None, :] <= positions[:, None]) & row_ok[:, None]
        if HAS_WINDOW:
            seen = seen & (places[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        weight = weight * shrink + tl.sum(weights, 1)
        largest = new_largest
        value_base = head_base + pool_plane_stride
        values = tl.load(value_base + starts[:, None] + dims[None, :], mask=tile_ok, other=0)
        if FORMAT == PLAIN:
            wide = widened(values, FORMAT, COMPUTE)
        else:
            value_scales = scales_base + scales_plane_stride + scale_places
            factors = tl.load(value_scales, mask=key_ok, other=0.0)
            if q.dtype.element_ty == tl.float16:  # in which small weights times scales are nothing
                wide = (widened(values, FORMAT, tl.float32) * factors[:, None]).to(COMPUTE)
            else:
                weights *= factors[None, :]
                wide = widened(values, FORMAT, COMPUTE)
        total = total * shrink[:, None] + tl.dot(
            weights.to(COMPUTE), wide, input_precision=PRECISION
        )

    rows_out = tokens * num_heads + heads
    out_ok = row_ok[:, None] & dim_ok[None, :]
    if SPLITS == 1:
        # A sequence without keys has no weight: zeros.
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(
            out + rows_out[:, None] * HEAD_DIM + dims[None, :],
            narrowed(result, out.dtype.element_ty),
            mask=out_ok,
        )
    else:
        parts = rows_out * SPLITS + split
        tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], total, mask=out_ok)
        tl.store(partial_max + parts, largest, mask=row_ok)
        tl.store(partial_sum + parts, weight, mask=row_ok)


@triton.jit
def reduce_splits(
    out,
    partial,
    partial_max,
    partial_sum,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Puts the splits of one row of ``out`` together. Grid: (num_tokens * num_heads,).

    SPLITS is a power of two. Shapes as in ``attend``.
    """
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    dim_ok = dims < HEAD_DIM
    parts = row * SPLITS + splits
    tops = tl.load(partial_max + parts)
    largest = tl.max(tops, 0)
    shares = tl.exp2(tops - tl.where(largest == float("-inf"), 0.0, largest))
    weight = tl.sum(tl.load(partial_sum + parts) * shares, 0)
    sums = tl.load(
        partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=dim_ok[None, :], other=0.0
    )
    # A split without keys holds zeros, and has no share.
    total = tl.sum(sums * shares[:, None], 0)
    result = total / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + row * HEAD_DIM + dims, narrowed(result, out.dtype.element_ty), mask=dim_ok)
