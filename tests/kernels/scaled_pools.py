"""Pools with scales for tests, laid out as a worker's, with poison wherever nothing was written."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.engine.model_runner import pool_tensor
from kvferry.kernels.reference.scaled import LARGEST, quantised, row_scales
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup
from tests.kernels.dense import Batch

GUARD_BYTES = 512
SCALED = tuple(LARGEST)
"""The dtypes of pools with scales."""


def scaled_layout(
    dtype: torch.dtype, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> KVCacheLayout:
    """As of a worker with this ``cache.kv_dtype``."""
    name = str(dtype).removeprefix("torch.")
    group = KVGroup(0, num_layers, num_kv_heads, head_dim, name, scales="float32")
    return KVCacheLayout(block_size, (group,))


def scaled_pool(
    dtype: torch.dtype, num_blocks: int, *shape: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of blocks of ``shape``, ``[layers, 2, heads, slots, dim]``, and all its memory.

    Every byte is random, but for the scales, which are NaN. The memory has guards at both ends, and
    is uint8.
    """
    layers, _, heads, slots, dim = shape
    layout = scaled_layout(dtype, layers, heads, slots, dim)
    size = num_blocks * layout.block_bytes()
    generator = torch.Generator().manual_seed(size)
    memory = torch.randint(256, (size + 2 * GUARD_BYTES,), generator=generator, dtype=torch.uint8)
    pool = pool_tensor(memory[GUARD_BYTES:-GUARD_BYTES], layout, num_blocks)
    row_scales(pool).fill_(torch.nan)
    return pool, memory


def bytes_of(pool: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A copy of a pool's memory; every NaN among its scales gets the same bits, here and there."""
    scales = row_scales(pool)
    scales[scales.isnan()] = torch.nan
    return memory.clone()


def in_scaled(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch over a pool of ``dtype``; its dense keys and values become those that it holds."""
    filled = ~batch.pool.isnan().any(-1)
    pool, _ = scaled_pool(dtype, len(batch.pool), *batch.pool.shape[1:])
    elements, scales = quantised(batch.pool.nan_to_num(0.0), dtype)
    pool.view(torch.int8)[filled] = elements.view(torch.int8)[filled]
    row_scales(pool)[filled] = scales[filled]
    k, v = ([rounded(rows, dtype) for rows in held] for held in (batch.k, batch.v))
    return replace(batch, pool=pool, k=k, v=v)


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of rows in ``dtype``, in float64."""
    elements, scales = quantised(rows, dtype)
    return elements.double() * scales.double()[..., None]
