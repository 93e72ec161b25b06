"""The conversions of float8 as kernels of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.triton.numerics import float_to_fp8, fp8_to_float


@triton.jit
def decode(out, stored, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, fp8_to_float(tl.load(stored + lanes)))


@triton.jit
def encode(out, numbers, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, float_to_fp8(tl.load(numbers + lanes)))
