"""Writing KV into the pool, and copying whole blocks inside it, out of it and into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.reference.layers import rope
from kvferry.kernels.reference.scaled import has_scales, quantised, row_scales

K_PLANE, V_PLANE = 0, 1


def write_kv(
    pool: torch.Tensor,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the keys and values of one layer; touches no slot outside ``slot_mapping``.

    Args:
        pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, written in place.
        layer: layer index within the pool.
        k: ``[num_tokens, num_kv_heads, head_dim]``, converted to the pool's dtype; for int8
            and float8 with a scale per row, see ``kernels.reference.scaled``.
        v: the same shape.
        slot_mapping: ``[num_tokens]`` int64, distinct slots.
    """
    block_size = pool.shape[4]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    planes = pool[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    if has_scales(pool.dtype):
        scales, planes = row_scales(pool)[:, layer], planes.view(torch.int8)
        for plane, rows in ((K_PLANE, k), (V_PLANE, v)):
            elements, factors = quantised(rows, pool.dtype)
            planes[blocks, plane, :, offsets] = elements.view(torch.int8)
            scales[blocks, plane, :, offsets] = factors
        return
    planes[blocks, K_PLANE, :, offsets] = k.to(pool.dtype)
    planes[blocks, V_PLANE, :, offsets] = v.to(pool.dtype)


def rope_write_kv(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """``rope`` of queries and keys, then ``write_kv``; the turned queries.

    Args:
        qk: ``[num_tokens, num_heads + num_kv_heads, head_dim]``, queries first.
        v: ``[num_tokens, num_kv_heads, head_dim]``.
        cos: from ``rope_tables``.
        sin: from ``rope_tables``.
        pool: as in ``write_kv``, as are ``layer`` and ``slot_mapping``.
        layer: layer index within the pool.
        slot_mapping: ``[num_tokens]`` int64, distinct slots.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.
    """
    rotated = rope(qk, cos, sin)
    num_heads = qk.shape[1] - v.shape[1]
    write_kv(pool, layer, rotated[:, num_heads:], v, slot_mapping)
    return rotated[:, :num_heads]


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, all layers; ``pairs`` are (source block id, target block id).

    Targets are distinct. Every source is read before any target is written, so a block may be
    both source and target. ``pool`` is contiguous; of one with scales, which is not, the bytes
    are given: ``[num_blocks, block_bytes]`` uint8.

    Raises ValueError.
    """
    if not pairs:
        return
    _check_whole(pool)
    sources, targets = (torch.tensor(ids, device=pool.device) for ids in zip(*pairs, strict=True))
    pool.index_copy_(0, targets, pool.index_select(0, sources))


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = pool[block_ids[i]]``; ``out``: ``[num_ids, *a block's shape]``.

    ``pool`` as in ``copy_blocks``.
    """
    _check_whole(pool)
    torch.index_select(pool, 0, block_ids, out=out)


def scatter_blocks(blocks: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """``pool[block_ids[i]] = blocks[i]``; distinct ids; ``pool`` as in ``copy_blocks``."""
    _check_whole(pool)
    pool.index_copy_(0, block_ids, blocks)


def _check_whole(pool: torch.Tensor) -> None:
    if not pool.is_contiguous():
        raise ValueError(
            f"pool is of strides {pool.stride()}, wanted a contiguous tensor: a pool with scales "
            "is copied by its bytes"
        )
