from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from tests.kernels.families import ISAS, isa_in_force

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
POOL_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# Relative to the size of the values: a few roundings of float32, or one of bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module", params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    with isa_in_force(request.param) as kernels:
        yield kernels


def close(found: torch.Tensor, expected: torch.Tensor, floor: float = 1.0) -> bool:
    """Within the tolerance of ``found``'s dtype, relative to each value or to ``floor``."""
    error = (found.double() - expected).abs() / expected.abs().clamp_min(floor)
    return bool((error <= TOLERANCE[found.dtype]).all())  # False for NaN


def rows_between_guards(*shape: int, dtype: torch.dtype, seed: int, margin: int) -> torch.Tensor:
    """Normal values, a view into a wider tensor that is NaN everywhere else."""
    wide = torch.full((*shape[:-1], shape[-1] + margin), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    wide[..., : shape[-1]] = torch.randn(shape, generator=generator).to(dtype) * 3
    return wide[..., : shape[-1]]


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


sizes = st.one_of(st.integers(1, 200), st.sampled_from([256, 576, 2048]))


@settings(max_examples=40)
@given(rows=st.integers(0, 9), heads=st.integers(1, 4), size=sizes, dtype=DTYPES,
       margin=st.sampled_from([0, 5]))  # fmt: skip
def test_rms_norm(
    cpu: Any, rows: int, heads: int, size: int, dtype: torch.dtype, margin: int
) -> None:
    weight = rows_between_guards(size, dtype=dtype, seed=1, margin=0)
    flat = rows_between_guards(rows, size, dtype=dtype, seed=size, margin=margin)
    assert close(cpu.rms_norm(flat, weight, 1e-5), norm64(flat, weight, 1e-5))
    many = rows_between_guards(rows, heads, size, dtype=dtype, seed=size, margin=margin)
    some = many[:, : max(1, heads - 1)]
    assert close(cpu.rms_norm(some, weight, 1e-5), norm64(some, weight, 1e-5))


@settings(max_examples=40)
@given(rows=st.integers(0, 9), size=sizes, dtype=DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual(
    cpu: Any, rows: int, size: int, dtype: torch.dtype
) -> None:
    weight = rows_between_guards(size, dtype=dtype, seed=1, margin=0)
    x = rows_between_guards(rows, size, dtype=dtype, seed=2, margin=3)
    guarded = rows_between_guards(rows + 2, size, dtype=dtype, seed=3, margin=0)
    before = guarded.clone()
    found = cpu.add_rms_norm(x, guarded[1:-1], weight, 1e-5)
    assert torch.equal(guarded[1:-1], before[1:-1] + x)
    assert torch.equal(guarded[[0, -1]], before[[0, -1]])
    assert close(found, norm64(guarded[1:-1], weight, 1e-5))


@settings(max_examples=40)
@given(rows=st.integers(0, 9), size=sizes, dtype=DTYPES, scale=st.sampled_from([1.0, 100.0]))
def test_silu_mul(cpu: Any, rows: int, size: int, dtype: torch.dtype, scale: float) -> None:
    both = rows_between_guards(rows, 2 * size, dtype=dtype, seed=size, margin=7) * scale
    gate, up = both.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    assert close(cpu.silu_mul(both), expected)


@settings(max_examples=40)
@given(tokens=st.integers(0, 9), half=st.integers(1, 130), dtype=DTYPES,
       factor=st.sampled_from([1.0, 1.25]), top=st.sampled_from([100, 2**20]))  # fmt: skip
def test_rope_tables(
    cpu: Any, tokens: int, half: int, dtype: torch.dtype, factor: float, top: int
) -> None:
    positions = torch.randint(0, top, (tokens,))
    inv_freq = 1.0 / (1e4 ** (torch.arange(0, 2 * half, 2).float() / (2 * half)))
    cos, sin = cpu.rope_tables(positions, inv_freq, factor, dtype)
    angles = (positions[:, None].float() * inv_freq).double().repeat(1, 2)[:, None]
    assert close(cos, angles.cos() * factor) and close(sin, angles.sin() * factor)


def turned64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return reference.rope(x.double(), cos.double(), sin.double())


heads_strategy = {
    "tokens": st.integers(0, 9),
    "heads": st.integers(1, 5),
    "half": st.one_of(st.integers(1, 70), st.sampled_from([32, 64])),
    "dtype": DTYPES,
}


@settings(max_examples=40)
@given(**heads_strategy)
def test_rope(cpu: Any, tokens: int, heads: int, half: int, dtype: torch.dtype) -> None:
    x = rows_between_guards(tokens, heads + 2, 2 * half, dtype=dtype, seed=3, margin=4)
    inv_freq = torch.rand(half)
    tables = reference.rope_tables(torch.randint(0, 99, (tokens,)), inv_freq, 1.0, dtype)
    view = x[:, 1 : heads + 1]
    assert close(cpu.rope(view, *tables), turned64(view, *tables), floor=8.0)


@settings(max_examples=40)
@given(
    **heads_strategy,
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 64),
    pool_dtype=POOL_DTYPES,
    data=st.data(),
)
def test_rope_write_kv_is_rope_then_write_kv_and_touches_no_other_slot(
    cpu: Any,
    tokens: int,
    heads: int,
    half: int,
    dtype: torch.dtype,
    kv_heads: int,
    block_size: int,
    pool_dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    layer = data.draw(st.integers(0, 2))
    fused = rows_between_guards(
        tokens, heads + 2 * kv_heads, 2 * half, dtype=dtype, seed=half, margin=0
    )
    qk, v = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
    tables = reference.rope_tables(torch.arange(tokens), torch.rand(half), 1.0, dtype)
    shape = (num_blocks, 3, 2, kv_heads, block_size, 2 * half)
    pools = [torch.full(shape, torch.nan, dtype=pool_dtype) for _ in range(2)]
    q = cpu.rope_write_kv(qk, v, *tables, pools[0], layer, slots)
    turned = cpu.rope(qk, *tables)
    assert torch.equal(q, turned[:, :heads])
    # write_kv by itself rounds twice where the activations are narrow, the fused one once
    reference.write_kv(pools[1], layer, turned[:, heads:], v, slots)
    written = ~pools[1].isnan()
    assert torch.equal(~pools[0].isnan(), written)
    tolerance = 2**-7 if dtype is torch.bfloat16 else 0.0
    error = (pools[0].double() - pools[1].double())[written].abs()
    assert bool((error <= tolerance * pools[1].double()[written].abs()).all())
    again = torch.full(shape, torch.nan, dtype=pool_dtype)
    cpu.write_kv(again, layer, turned[:, heads:], v, slots)
    assert torch.equal(again.nan_to_num(), pools[1].nan_to_num())
    assert torch.equal(again.isnan(), pools[1].isnan())


def test_half_precision_is_rounded_as_torch_rounds_it(cpu: Any) -> None:
    values = torch.cat(
        (
            torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e6, -1e6, 2**-24, 2**-25, 3e-8]),
            torch.tensor([torch.inf, -torch.inf, torch.nan, 2**-14, 6.1e-5, 1 + 2**-11]),
            torch.randn(1008) * torch.logspace(-9, 5, 1008),
        )
    )
    k = values.view(1, 1, -1)
    pool = torch.zeros(1, 1, 2, 1, 1, 1024, dtype=torch.float16)
    cpu.write_kv(pool, 0, k, k, torch.tensor([0]))
    wanted = values.half()
    for plane in (0, 1):
        found = pool[0, 0, plane, 0, 0]
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(
            found.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16)
        )


@settings(max_examples=30)
@given(
    num_blocks=st.integers(1, 6),
    block_bytes=st.integers(1, 40),
    dtype=POOL_DTYPES,
    data=st.data(),
)
def test_blocks_are_copied_gathered_and_scattered(
    cpu: Any, num_blocks: int, block_bytes: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    pool = torch.randn(num_blocks, 2, 2, 1, block_bytes, 3).to(dtype)
    ids = st.integers(0, num_blocks - 1)
    pairs = data.draw(st.lists(st.tuples(ids, ids), unique_by=lambda pair: pair[1]))
    expected = pool.clone()
    reference.copy_blocks(expected, pairs)
    cpu.copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)
    chosen = torch.tensor(data.draw(st.lists(ids, unique=True)), dtype=torch.int64)
    out = torch.full((len(chosen), *pool.shape[1:]), torch.nan, dtype=dtype)
    cpu.gather_blocks(pool, chosen, out)
    assert torch.equal(out, expected[chosen])
    cpu.scatter_blocks(out + 1, pool, chosen)
    reference.scatter_blocks(out + 1, expected, chosen)
    assert torch.equal(pool, expected)
