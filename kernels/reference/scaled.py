"""Pools of one byte per element: rows of int8 or float8_e4m3fn, and one float32 scale per row.

A run, which is one (block, layer, plane, head), holds its rows one after the other, then, from the
next multiple of 4 bytes on, their scales. The tensor of such a pool shows the rows only: its stride
from head to head steps over the scales, and a copy of it leaves them behind. Who copies blocks
copies bytes.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude that an element of a pool with scales holds."""

SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of rows of zeros too


def has_scales(dtype: torch.dtype) -> bool:
    """Whether pools of this dtype have a scale per row."""
    return dtype in LARGEST


def scales_offset(block_size: int, head_dim: int) -> int:
    """Bytes from the first row of a run to its scales."""
    return -(-block_size * head_dim // SCALE_BYTES) * SCALE_BYTES


def run_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of a run: rows, and scales behind them."""
    return scales_offset(block_size, head_dim) + block_size * SCALE_BYTES


def row_scales(pool: torch.Tensor) -> torch.Tensor:
    """The scales of a pool that has them, a view: ``[num_blocks, layers, planes, heads, slots]``
    float32. Raises ValueError where the tensor leaves no room for them.
    """
    *outer, block_size, head_dim = pool.shape
    wanted = run_bytes(block_size, head_dim)
    if pool.stride(3) < wanted:
        raise ValueError(f"pool is of strides {pool.stride()}, wanted at least {wanted} per head")
    held = pool.view(torch.int8).as_strided(
        (*outer, block_size * SCALE_BYTES),
        (*pool.stride()[:4], 1),
        pool.storage_offset() + scales_offset(block_size, head_dim),
    )
    return held.view(torch.float32)


def quantised(
    rows: torch.Tensor, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of rows ``[..., dim]``: ``dtype`` of the same shape, float32 ``[...]``.

    The scale of a row is its largest magnitude / the largest that ``dtype`` holds, and an element
    times it is the nearest there is to the number: of int8 within half a scale. A row with a NaN or
    an infinity has a NaN for its scale, and zeros.
    """
    wide = rows.float()
    most = wide.abs().amax(-1)
    scales = (most / LARGEST[dtype]).clamp_min(_LEAST_SCALE)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    elements = (wide / scales[..., None]).nan_to_num(0.0)
    if dtype == torch.int8:
        return elements.round().to(dtype), scales
    largest = LARGEST[dtype]  # beyond it, by the division's rounding, there would be a NaN
    return elements.clamp(-largest, largest).to(dtype), scales
