"""Device functions that several kernels share: rounding, and the byte formats of a pool.

float8_e4m3fn is read and written by its bits, for not every architecture converts it. A value of it
is the float16 with the same bits behind the sign, shifted to the left by 7, times 2^8: both have
the exponent at the same end, with biases of 7 and 15, and subnormals come out right.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvferry.kernels.triton.interpreter import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

PLAIN: tl.constexpr = tl.constexpr(0)
"""A pool of floats, converted on the way."""
INT8: tl.constexpr = tl.constexpr(1)
"""int8 and a scale per row."""
FP8: tl.constexpr = tl.constexpr(2)
"""float8_e4m3fn, as bytes, and a scale per row."""

_MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to whole numbers
_LEAST_SCALE: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # as the reference's
_LEAST_EXPONENT: tl.constexpr = tl.constexpr(121)  # of a normal float8_e4m3fn, 2^-6, biased
_MANTISSA_BITS: tl.constexpr = tl.constexpr(3)


@triton.jit
def nearest(x):
    """The nearest whole number, ties to even; for magnitudes below 2^22."""
    return (x + _MAGIC) - _MAGIC


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """float32 in ``DTYPE``, to the nearest, ties to even: the interpreter would cut it off."""
    if _INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def fp8_to_float(stored):
    """Bytes of float8_e4m3fn, int8, to float32. NaN does not occur: a scale carries it."""
    bits = stored.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def float_to_fp8(x):
    """float32 of magnitude up to 448 to the nearest float8_e4m3fn, ties to even, as int8."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, _LEAST_EXPONENT)
    quantum = ((exponent - _MANTISSA_BITS) << 23).to(tl.float32, bitcast=True)
    rounded = nearest(tl.div_rn(tl.abs(x), quantum)) * quantum
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)  # 2^-8: exact
    sign = (bits >> 24) & 0x80
    return ((half >> 7).to(tl.int32) | sign).to(tl.int8)


@triton.jit
def widened(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What a pool holds, less its scale, in ``DTYPE``; exact for int8 and float8."""
    if FORMAT == FP8:
        return fp8_to_float(stored).to(DTYPE)
    else:
        return stored.to(DTYPE)


@triton.jit
def quantised(row, FORMAT: tl.constexpr):
    """A row of float32 as bytes, and its scale; see ``kernels.reference.scaled.quantised``."""
    most = tl.max(tl.abs(row), 0)
    finite = tl.max(tl.where(tl.abs(row) < float("inf"), 0, 1), 0) == 0  # a NaN compares as false
    largest = 127.0 if FORMAT == INT8 else 448.0
    scale = tl.maximum(tl.div_rn(most, largest), _LEAST_SCALE)
    elements = tl.where(finite, tl.div_rn(row, tl.where(finite, scale, 1.0)), 0.0)
    elements = tl.where(tl.abs(row) < float("inf"), elements, 0.0)
    if FORMAT == INT8:
        stored = nearest(elements).to(tl.int8)
    else:
        stored = float_to_fp8(tl.minimum(tl.maximum(elements, -largest), largest))
    return stored, tl.where(finite, scale, float("nan"))
