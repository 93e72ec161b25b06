"""Pools of int8: rows of integers, and one float32 scale per row.

A run, which is one (block, layer, plane, head), holds its rows one after the other, then, from the
next multiple of 4 bytes on, their scales. The tensor of such a pool shows the rows only: its stride
from head to head steps over the scales, and a copy of it leaves them behind. Who copies blocks
copies bytes.
"""

from __future__ import annotations

import torch

LARGEST = 127.0
SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of rows of zeros too


def scales_offset(block_size: int, head_dim: int) -> int:
    """Bytes from the first row of a run to its scales."""
    return -(-block_size * head_dim // SCALE_BYTES) * SCALE_BYTES


def run_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of a run: rows, and scales behind them."""
    return scales_offset(block_size, head_dim) + block_size * SCALE_BYTES


def row_scales(pool: torch.Tensor) -> torch.Tensor:
    """The scales of an int8 pool, a view: ``[num_blocks, layers, planes, heads, slots]`` float32.

    Raises ValueError where the tensor leaves no room for them.
    """
    *outer, block_size, head_dim = pool.shape
    wanted = run_bytes(block_size, head_dim)
    if pool.stride(3) < wanted:
        raise ValueError(f"pool is of strides {pool.stride()}, wanted at least {wanted} per head")
    held = pool.as_strided(
        (*outer, block_size * SCALE_BYTES),
        (*pool.stride()[:4], 1),
        pool.storage_offset() + scales_offset(block_size, head_dim),
    )
    return held.view(torch.float32)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and scales of rows ``[..., dim]``: int8 of the same shape, and float32 ``[...]``.

    The scale of a row is its largest magnitude / 127, and an integer times it within half a scale
    of the number. A row with a NaN or an infinity has a NaN for its scale, and zeros.
    """
    wide = rows.float()
    most = wide.abs().amax(-1)
    scales = (most / LARGEST).clamp_min(_LEAST_SCALE)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    integers = (wide / scales[..., None]).nan_to_num(0.0).round()
    return integers.to(torch.int8), scales
