"""Writing KV into the pool, and moving whole blocks; see ``kernels.reference.cache``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.cpu.arguments import (
    POOLS,
    activation,
    heads_of,
    indices,
    like,
    pool_layer,
    raise_refusal,
    refuse,
)
from kvferry.kernels.cpu.extension import native
from kvferry.kernels.cpu.layers import check_tables


def write_kv(
    pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the keys and values of one layer; touches no slot outside ``slot_mapping``."""
    _store(pool, layer, k, v, slot_mapping, num_heads=0, tables=None)


def rope_write_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """``rope`` of queries and keys, then ``write_kv``, in one pass; the turned queries."""
    num_heads = qk.shape[1] - v.shape[1]
    return _store(pool, layer, qk, v, slot_mapping, num_heads=num_heads, tables=(cos, sin))


def _store(
    pool: torch.Tensor,
    layer: int,
    qk: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    dtype = activation("v", v)
    v_strides = heads_of("v", v, None, None, None)
    num_tokens, num_kv_heads, head_dim = v.shape
    if activation("q and k", qk) != dtype:
        refuse("q and k", qk.dtype, f"{v.dtype}, as v")
    if num_heads < 0:
        refuse("q and k", f"of {qk.shape[1]} heads", f"at least {num_kv_heads}, as v")
    strides = heads_of("q and k", qk, num_tokens, num_heads + num_kv_heads, head_dim)
    slots = indices("slot_mapping", slot_mapping, torch.int64, 1)
    if len(slots) != num_tokens:
        refuse("slot_mapping", f"of {len(slots)} slots", f"{num_tokens}, one per token")
    place = pool_layer(pool, layer, num_kv_heads, head_dim)
    if tables is not None:
        check_tables(qk, num_tokens, head_dim, *tables)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qk.dtype)
    raise_refusal(
        native.rope(
            q.data_ptr(),
            qk.data_ptr(),
            v.data_ptr(),
            *((0, 0) if tables is None else (tables[0].data_ptr(), tables[1].data_ptr())),
            slots.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            *strides,
            *v_strides,
            head_dim,
            *place,
            dtype,
            torch.get_num_threads(),
        )
    )
    return q


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, all layers; every source is read before any target is written.

    Of int8 the bytes are given: ``[num_blocks, block_bytes]`` uint8.
    """
    if not pairs:
        return
    ids = torch.tensor(pairs, dtype=torch.int64).t().contiguous()
    sources, targets = ids.unbind()
    if set(targets.tolist()) & set(sources.tolist()):
        held = torch.empty(len(pairs), *pool.shape[1:], dtype=pool.dtype)
        _check_ids(targets, pool)
        gather_blocks(pool, sources, held)
        scatter_blocks(held, pool, targets)
        return
    _move(pool, targets, pool, sources, len(pairs))


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = pool[block_ids[i]]``; ``out``: ``[num_ids, *a block's shape]``."""
    ids = indices("block_ids", block_ids, torch.int64, 1)
    like("out", out, pool.dtype, len(ids), *pool.shape[1:])
    _move(out, None, pool, ids, len(ids))


def scatter_blocks(blocks: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """``pool[block_ids[i]] = blocks[i]``; distinct ids."""
    ids = indices("block_ids", block_ids, torch.int64, 1)
    like("blocks", blocks, pool.dtype, len(ids), *pool.shape[1:])
    _move(pool, ids, blocks, None, len(ids))


def _check_ids(ids: torch.Tensor, pool: torch.Tensor) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= len(pool):
        refuse("block id", low if low < 0 else high, f"0 to {len(pool) - 1}")


def _move(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    count: int,
) -> None:
    pool = target if source_ids is None else source
    if pool.dtype not in (*POOLS, torch.uint8):
        refuse("pool", pool.dtype, ", ".join(map(str, (*POOLS, torch.uint8))))
    like("pool", pool, pool.dtype, *pool.shape)
    raise_refusal(
        native.move_blocks(
            target.data_ptr(),
            source.data_ptr(),
            0 if target_ids is None else target_ids.data_ptr(),
            0 if source_ids is None else source_ids.data_ptr(),
            count,
            pool.stride(0) * pool.element_size(),
            len(pool),
            torch.get_num_threads(),
        )
    )
