"""Norms and the gated activation: a program per row, or per part of one. float32 inside, one
rounding at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvferry.kernels.triton.numerics import narrowed


@triton.jit
def rms_norm_rows(
    out,
    x,
    residual,
    weight,
    inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Row ``i`` of ``x`` begins at ``i // inner * outer_stride + i % inner * inner_stride``; rows
    of ``out`` and ``residual`` are contiguous. With ADD the row is added to that of ``residual``,
    which becomes the sum, and the sum is normalised. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PADDED)
    inside = lanes < SIZE
    begin = row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + begin + lanes, mask=inside, other=0.0)
    if ADD:
        place = residual + row * SIZE + lanes
        held = tl.load(place, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        values = narrowed(held, residual.dtype.element_ty)
        tl.store(place, values, mask=inside)
    wide = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scaled = wide * factor * tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + lanes, narrowed(scaled, out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_rows(out, gate_up, row_stride, SIZE: tl.constexpr, LANES: tl.constexpr):
    """``silu(gate) * up`` of rows of ``[gate, up]``. Grid: (rows, parts of LANES)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < SIZE
    place = gate_up + row * row_stride + lanes
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + lanes, narrowed(result, out.dtype.element_ty), mask=inside)
