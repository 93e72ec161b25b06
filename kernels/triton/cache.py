"""Writing KV into the pool, and moving whole blocks, on a GPU; see ``kernels.reference.cache``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.triton.arguments import (
    PLAIN,
    activation,
    integers,
    like,
    pool_layer,
    refuse,
    same_device,
)
from kvferry.kernels.triton.cache_kernels import move_blocks, rope_and_store
from kvferry.kernels.triton.tuning import power_of_two

COPY_LANES = 1024
_WORD_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits


def write_kv(
    pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the keys and values of one layer; of a negative slot nothing is stored."""
    _store(pool, layer, k, v, slot_mapping, tables=None)


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
    return _store(pool, layer, qk, v, slot_mapping, tables=(cos, sin))


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension ``i`` of ``[num_tokens, num_heads, head_dim]`` against its counterpart."""
    activation("x", x, 3)
    num_tokens, num_heads, head_dim = x.shape
    _check_tables(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rope_and_store[(num_tokens, num_heads)](
            out, x, x, cos, sin, x, x, x,
            1,
            x.stride(0), x.stride(1), 0, 0,
            0, 0, 0, 0, 0, 0,
            num_heads, 0,
            HEAD_DIM=head_dim, PADDED=power_of_two(head_dim), FORMAT=PLAIN,
            TURNS=True, STORES=False, num_warps=1,
        )  # fmt: skip
    return out


def _store(
    pool: torch.Tensor,
    layer: int,
    qk: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    activation("q and k", qk, 3)
    activation("v", v, 3)
    if qk.dtype != v.dtype:
        refuse("q and k", qk.dtype, f"{v.dtype}, as v")
    same_device("v", v, qk)
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads = qk.shape[1] - num_kv_heads
    if qk.shape != (num_tokens, qk.shape[1], head_dim) or num_heads < 0:
        wanted = f"[{num_tokens}, at least {num_kv_heads}, {head_dim}]"
        refuse("q and k", f"of shape {list(qk.shape)}", wanted)
    slots = integers("slot_mapping", slot_mapping, 1, qk)
    if len(slots) != num_tokens:
        refuse("slot_mapping", f"of {len(slots)} slots", f"{num_tokens}, one per token")
    place = pool_layer(pool, layer, num_kv_heads, head_dim, qk)
    cos, sin = tables if tables is not None else (qk, qk)
    if tables is not None:
        _check_tables(qk, cos, sin)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qk.dtype, device=qk.device)
    if num_tokens:
        rope_and_store[(num_tokens, num_heads + 2 * num_kv_heads)](
            q,
            qk,
            v,
            cos,
            sin,
            place.rows,
            place.scales,
            slots,
            place.block_size,
            qk.stride(0),
            qk.stride(1),
            v.stride(0),
            v.stride(1),
            *place.row_strides,
            *place.scale_strides,
            num_heads,
            num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED=power_of_two(head_dim),
            FORMAT=place.pool_format,
            TURNS=tables is not None,
            STORES=True,
            num_warps=1,
        )
    return q


def _check_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    num_tokens, _, head_dim = x.shape
    if head_dim % 2:
        refuse("head_dim", head_dim, "an even number")
    like("cos", cos, x, num_tokens, 1, head_dim)
    like("sin", sin, x, num_tokens, 1, head_dim)


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, all layers; every source is read before any target is written.

    Of a pool with scales the bytes are given: ``[num_blocks, block_bytes]`` uint8.
    """
    if not pairs:
        return
    for block_id in (block_id for pair in pairs for block_id in pair):
        if not 0 <= block_id < len(pool):
            refuse("block id", block_id, f"0 to {len(pool) - 1}")
    sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(pool.device)
    if {source for source, _ in pairs} & {target for _, target in pairs}:
        held = torch.empty(len(pairs), *pool.shape[1:], dtype=pool.dtype, device=pool.device)
        _move(held, None, pool, sources, len(pairs))
        _move(pool, targets, held, None, len(pairs))
        return
    _move(pool, targets, pool, sources, len(pairs))


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = pool[block_ids[i]]``; ``out``: ``[num_ids, *a block's shape]``."""
    ids = integers("block_ids", block_ids, 1, pool)
    like("out", out, pool, len(ids), *pool.shape[1:])
    _move(out, None, pool, ids, len(ids))


def scatter_blocks(blocks: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """``pool[block_ids[i]] = blocks[i]``; distinct ids."""
    ids = integers("block_ids", block_ids, 1, pool)
    like("blocks", blocks, pool, len(ids), *pool.shape[1:])
    _move(pool, ids, blocks, None, len(ids))


def _move(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    count: int,
) -> None:
    like("pool", target, target, *target.shape)
    like("pool", source, source, *source.shape)
    block_bytes = target[:1].numel() * target.element_size() if len(target) else 0
    if not count or not block_bytes:
        return
    word = next(d for d in _WORD_DTYPES if block_bytes % d.itemsize == 0)
    words = block_bytes // word.itemsize
    lanes = min(COPY_LANES, power_of_two(words))
    move_blocks[(count, -(-words // lanes))](
        words_of(target, word),
        words_of(source, word),
        source if target_ids is None else target_ids,
        source if source_ids is None else source_ids,
        words,
        HAS_TARGET_IDS=target_ids is not None,
        HAS_SOURCE_IDS=source_ids is not None,
        LANES=lanes,
        num_warps=4,
    )


def words_of(blocks: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Contiguous blocks as words."""
    return blocks.reshape(-1).view(torch.uint8).view(word)
