from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import triton as kernels
from tests.kernels.interpreted.batches import TOLERANCE
from tests.kernels.interpreted.float8_kernels import decode, encode

DTYPES = st.sampled_from(list(TOLERANCE))
SIZES = st.sampled_from([1, 3, 16, 100, 576])


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@settings(max_examples=15, deadline=None)
@given(DTYPES, SIZES, st.integers(1, 4), st.integers(0, 2**31))
def test_rms_norm(dtype: torch.dtype, size: int, rows: int, seed: int) -> None:
    x = drawn(seed, rows, size, dtype=dtype) * 3
    weight = drawn(seed + 1, size, dtype=dtype)
    found = kernels.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    expected = normed(x, weight, 1e-5)
    assert float((found.double() - expected).abs().max()) <= 5 * TOLERANCE[dtype]


def test_rms_norm_of_heads_in_a_strided_view() -> None:
    fused = drawn(1, 3, 7, 16, dtype=torch.float32)
    weight = drawn(2, 16, dtype=torch.float32)
    x = fused[:, 2:6]
    found = kernels.rms_norm(x, weight, 1e-6)
    assert float((found.double() - normed(x, weight, 1e-6)).abs().max()) <= 1e-5


@settings(max_examples=15, deadline=None)
@given(DTYPES, SIZES, st.integers(1, 4), st.integers(0, 2**31))
def test_add_rms_norm(dtype: torch.dtype, size: int, rows: int, seed: int) -> None:
    x, residual = (drawn(seed + i, rows, size, dtype=dtype) for i in (0, 1))
    weight = drawn(seed + 2, size, dtype=dtype)
    total = x + residual
    found = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    expected = normed(total, weight, 1e-5)
    assert float((found.double() - expected).abs().max()) <= 5 * TOLERANCE[dtype]


@settings(max_examples=15, deadline=None)
@given(DTYPES, SIZES, st.integers(1, 4), st.integers(0, 2**31))
def test_silu_mul(dtype: torch.dtype, size: int, rows: int, seed: int) -> None:
    fused = drawn(seed, rows, 2 * size + 3, dtype=dtype) * 4
    gate_up = fused[:, : 2 * size]
    found = kernels.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    error = (found.double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) <= TOLERANCE[dtype]


def test_every_float8_is_read_as_what_it_is() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    wanted = stored.view(torch.float8_e4m3fn).float()
    out = torch.empty(256)
    decode[(1,)](out, stored.view(torch.int8), SIZE=256)
    known = ~wanted.isnan()
    assert int(known.sum()) == 254
    assert torch.equal(out[known], wanted[known])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-4, 1e-2, 1.0, 60.0, 448.0]))
def test_float8_is_rounded_as_torch_rounds_it(seed: int, size: float) -> None:
    numbers = ((drawn(seed, 1024, dtype=torch.float32)) * size).clamp(-448, 448)
    out = torch.empty(1024, dtype=torch.int8)
    encode[(1,)](out, numbers, SIZE=1024)
    assert torch.equal(out, numbers.to(torch.float8_e4m3fn).view(torch.int8))


def test_halfway_between_two_float8_the_even_one_is_taken() -> None:
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = torch.zeros(256)
    halfway[:126] = (finite[1:] + finite[:-1]) / 2
    halfway[128:254] = -halfway[:126]
    out = torch.empty(256, dtype=torch.int8)
    encode[(1,)](out, halfway, SIZE=256)
    wanted = halfway.to(torch.float8_e4m3fn).view(torch.int8)
    assert torch.equal(out[:126], wanted[:126]) and torch.equal(out[128:254], wanted[128:254])


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda x: kernels.rms_norm(x[0], x[0], 1e-5), "dimensions"),
        (lambda x: kernels.rms_norm(x, x[0, :3], 1e-5), r"weight is of shape \[3\]"),
        (lambda x: kernels.rms_norm(x.long(), x[0], 1e-5), "torch.int64"),
        (lambda x: kernels.rms_norm(x.T, x.T[0], 1e-5), "strides"),
        (lambda x: kernels.add_rms_norm(x, x[:1], x[0], 1e-5), "residual"),
        (lambda x: kernels.silu_mul(x[:, :3].contiguous()), "gate_up"),
    ],
)
def test_refusals_name_the_argument(call: object, wanted: str) -> None:
    with pytest.raises(kernels.InvalidKernelArgument, match=wanted):
        call(torch.ones(2, 4))  # type: ignore[operator]
