"""Varlen paged attention on a GPU: prefill chunks and decode steps in one call.

See ``kernels.reference.attention`` for what it computes, ``attention_kernels`` for how. The last
bits of a sequence's result may depend on the batch, which decides on the number of splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.triton.arguments import activation, integers, pool_layer, refuse
from kvferry.kernels.triton.attention_kernels import attend, reduce_splits
from kvferry.kernels.triton.device import device_facts
from kvferry.kernels.triton.interpreter import INTERPRETED
from kvferry.kernels.triton.languages import TRITON_DTYPES
from kvferry.kernels.triton.tuning import (
    DECODE,
    PREFILL,
    PREFILL_SPLITS,
    Tile,
    Work,
    num_splits,
    power_of_two,
    tile_for,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is computed: known without looking at a device's memory.

    Attributes:
        tile: the sizes of a program.
        num_tiles: tiles of queries at most.
        splits: parts of every sequence's keys.
    """

    tile: Tile
    num_tiles: int
    splits: int


def plan(
    work: Work,
    tile: Tile,
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    max_context: int,
    num_processors: int,
) -> Plan:
    """The grid for a batch of ``num_tokens`` queries in ``num_seqs`` sequences."""
    num_tiles = num_tokens // (tile.rows // work.group) + num_seqs
    # A tile bound is loose by a tile per sequence; of decode steps there is one each.
    busy = (num_seqs if work.kind == DECODE else num_tiles) * num_kv_heads
    splits = num_splits(busy, max_context, tile.keys, num_processors)
    if work.kind == PREFILL:
        splits = PREFILL_SPLITS if splits >= PREFILL_SPLITS else 1
    return Plan(tile, num_tiles, splits)


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """As the reference's. Nothing waits for the device, so that a graph can capture it.

    A sequence of length 0 has zeros for results. ``tile`` and ``splits`` (a power of two) replace
    what ``tuning`` chooses.

    Raises InvalidKernelArgument.
    """
    activation("q", q, 3)
    num_tokens, num_heads, head_dim = q.shape
    place = pool_layer(pool, layer, None, head_dim, q)
    num_kv_heads = pool.shape[3]
    if num_heads % num_kv_heads:
        refuse("q", f"of {num_heads} heads", f"a multiple of the pool's {num_kv_heads}")
    lengths = integers("seq_lens", seq_lens, 1, q)
    bounds = integers("cu_seqlens_q", cu_seqlens_q, 1, q)
    tables = integers("block_tables", block_tables, 2, q)
    num_seqs = len(lengths)
    if len(bounds) != num_seqs + 1:
        refuse("cu_seqlens_q", f"of {len(bounds)} numbers", f"{num_seqs + 1}, as seq_lens + 1")
    if len(tables) != num_seqs:
        refuse("block_tables", f"of {len(tables)} rows", f"{num_seqs}, as seq_lens")
    if window is not None and window < 1:
        refuse("window", window, "at least 1, or None")
    if soft_cap is not None and not soft_cap > 0:
        refuse("soft_cap", soft_cap, "above 0, or None")
    if splits is not None and (splits < 1 or splits & (splits - 1)):
        refuse("splits", splits, "a power of two")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out

    facts = device_facts(q.device)
    group = num_heads // num_kv_heads
    work = Work(
        kind=DECODE if num_tokens == num_seqs else PREFILL,
        head_dim=head_dim,
        group=group,
        dtype=_name(q.dtype),
        kv_dtype=_name(pool.dtype),
    )
    chosen = plan(
        work,
        tile or tile_for(work, facts.architecture),
        num_tokens,
        num_seqs,
        num_kv_heads,
        tables.shape[1] * place.block_size,
        facts.num_processors,
    )
    if chosen.tile.rows < group:
        refuse("tile", f"of {chosen.tile.rows} rows", f"at least {group}, the heads of a group")
    num_parts = splits or chosen.splits
    padded = max(16, power_of_two(head_dim))
    partial, tops, sums = _workspace(q, num_parts)
    compute = torch.float32 if INTERPRETED else q.dtype
    attend[(chosen.num_tiles, num_kv_heads, num_parts)](
        out,
        partial,
        tops,
        sums,
        q,
        place.rows,
        place.scales,
        tables,
        bounds,
        lengths,
        num_seqs,
        softmax_scale,
        soft_cap or 0.0,
        window or 0,
        place.block_size,
        q.stride(0),
        q.stride(1),
        *place.row_strides,
        *place.scale_strides,
        tables.stride(0),
        num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        ROWS=chosen.tile.rows,
        KEYS=chosen.tile.keys,
        SPLITS=num_parts,
        FORMAT=place.pool_format,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        COMPUTE=TRITON_DTYPES[compute],
        PRECISION="ieee",
        num_warps=chosen.tile.num_warps,
        num_stages=chosen.tile.num_stages,
    )
    if num_parts > 1:
        reduce_splits[(num_tokens * num_heads,)](
            out,
            partial,
            tops,
            sums,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            SPLITS=num_parts,
            num_warps=4 if head_dim > 64 else 2,
        )
    return out


def _workspace(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the parts meet; without splits a place that nobody writes to."""
    num_tokens, num_heads, head_dim = q.shape
    if splits == 1:
        nothing = torch.empty(0, dtype=torch.float32, device=q.device)
        return nothing, nothing, nothing
    shape = (num_tokens, num_heads, splits)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    tops = torch.empty(shape, dtype=torch.float32, device=q.device)
    return partial, tops, torch.empty_like(tops)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
