"""Pools of int8 for tests, laid out as a worker's, with poison wherever nothing was written."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.engine.model_runner import pool_tensor
from kvferry.kernels.reference.int8 import quantised, row_scales
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup
from tests.kernels.dense import Batch

GUARD_BYTES = 512


def int8_layout(
    num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> KVCacheLayout:
    """As of a worker with ``cache.kv_dtype: int8``."""
    group = KVGroup(0, num_layers, num_kv_heads, head_dim, "int8", scales="float32")
    return KVCacheLayout(block_size, (group,))


def int8_pool(num_blocks: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 pool of blocks of ``shape``, ``[layers, 2, heads, slots, dim]``, and all its memory.

    Every byte is random, but for the scales, which are NaN. The memory has guards at both ends, and
    is uint8.
    """
    layers, _, heads, slots, dim = shape
    layout = int8_layout(layers, heads, slots, dim)
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


def in_int8(batch: Batch) -> Batch:
    """The batch over an int8 pool; its dense keys and values become those that the pool holds."""
    filled = ~batch.pool.isnan().any(-1)
    pool, _ = int8_pool(len(batch.pool), *batch.pool.shape[1:])
    integers, scales = quantised(batch.pool.nan_to_num(0.0))
    pool[filled] = integers[filled]
    row_scales(pool)[filled] = scales[filled]
    return replace(
        batch, pool=pool, k=[rounded(k) for k in batch.k], v=[rounded(v) for v in batch.v]
    )


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What is left of rows in int8, in float64."""
    integers, scales = quantised(rows)
    return integers.double() * scales.double()[..., None]
