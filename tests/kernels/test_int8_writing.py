"""Writing to pools of int8: what is left of a row, and that nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.reference.scaled import quantised, row_scales, run_bytes, scales_offset
from tests.kernels.families import ISAS, compiled, isa_in_force
from tests.kernels.scaled_pools import GUARD_BYTES, bytes_of, scaled_layout, scaled_pool
from tests.kernels.test_cpu_layers import turned64

TINY = torch.finfo(torch.float32).tiny


@pytest.fixture(scope="module", params=["reference", *ISAS])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "reference":
        yield reference
        return
    with isa_in_force(request.param) as cpu:
        yield cpu


def rows_of(*shape: int, seed: int, exponent: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0**exponent


def assert_half_a_step(rows: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor) -> None:
    """Every number lies within half a scale, and the scale is as small as can be."""
    most = rows.abs().amax(-1).double()
    least = (most / 127).float().clamp_min(TINY)
    assert torch.allclose(scales, least, rtol=2**-22, atol=0)
    assert int(integers.abs().max()) <= 127
    error = (integers.double() * scales.double()[..., None] - rows.double()).abs()
    # the quotient is rounded to float32 before it is rounded to an integer
    assert bool((error <= scales.double()[..., None] * (0.5 + 127 * 2**-24)).all())


@settings(max_examples=50)
@given(
    tokens=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    dim=st.one_of(st.integers(1, 140), st.sampled_from([64, 80, 96, 128, 256])),
    block_size=st.one_of(st.integers(1, 40), st.just(16)),
    exponent=st.integers(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_write_kv_leaves_half_a_step_and_touches_no_other_byte(
    kernels: Any,
    tokens: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    exponent: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    layer = data.draw(st.integers(0, 2))
    k = rows_of(tokens, kv_heads, dim, seed=dim, exponent=exponent).to(dtype)
    v = rows_of(tokens, kv_heads, dim, seed=dim + 1).to(dtype)
    pool, memory = scaled_pool(torch.int8, num_blocks, 3, 2, kv_heads, block_size, dim)
    wanted, wanted_memory = scaled_pool(torch.int8, num_blocks, 3, 2, kv_heads, block_size, dim)
    assert torch.equal(memory, wanted_memory)
    kernels.write_kv(pool, layer, k, v, slots)
    blocks, offsets = slots // block_size, slots % block_size
    for plane, rows in enumerate((k, v)):
        if tokens:
            assert_half_a_step(
                rows.float(),
                pool[blocks, layer, plane, :, offsets],
                row_scales(pool)[blocks, layer, plane, :, offsets],
            )
        integers, scales = quantised(rows)
        wanted[blocks, layer, plane, :, offsets] = integers
        row_scales(wanted)[blocks, layer, plane, :, offsets] = scales
    assert torch.equal(bytes_of(pool, memory), bytes_of(wanted, wanted_memory))


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.one_of(st.integers(1, 70), st.sampled_from([32, 40, 48, 64])),
    block_size=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rope_write_kv_quantises_the_turned_keys(
    kernels: Any,
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    fused = rows_of(tokens, heads + 2 * kv_heads, 2 * half, seed=half).to(dtype)
    qk, v = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
    tables = reference.rope_tables(torch.arange(tokens), torch.rand(half), 1.0, dtype)
    pool, memory = scaled_pool(torch.int8, num_blocks, 3, 2, kv_heads, block_size, 2 * half)
    q = kernels.rope_write_kv(qk, v, *tables, pool, 1, slots)
    turned = kernels.rope(qk, *tables)
    assert torch.equal(q, turned[:, :heads])
    blocks, offsets = slots // block_size, slots % block_size
    k, scales = (each[blocks, 1, 0, :, offsets].double() for each in (pool, row_scales(pool)))
    error = (k * scales[..., None] - turned64(qk[:, heads:], *tables)).abs()
    # bfloat16: the reference rounds the products and the sum, the others nothing
    rounding = {torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    assert bool((error <= scales[..., None] * 0.50001 + rounding).all())
    written = torch.zeros(pool.shape[:5], dtype=torch.bool)
    written[blocks, 1, :, :, offsets] = True
    assert torch.equal(~row_scales(pool).isnan(), written)
    untouched, untouched_memory = scaled_pool(
        torch.int8, num_blocks, 3, 2, kv_heads, block_size, 2 * half
    )
    pool[written] = untouched[written]
    row_scales(pool)[written] = torch.nan
    assert torch.equal(bytes_of(pool, memory), bytes_of(untouched, untouched_memory))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 5, 63, 70, 79])
def test_a_row_that_is_not_a_number_has_no_scale_and_the_rows_beside_it_do(
    kernels: Any, poison: float, place: int
) -> None:
    k = rows_of(3, 1, 80, seed=1)
    k[1, 0, place] = poison
    pool, _ = scaled_pool(torch.int8, 1, 1, 2, 1, 16, 80)
    kernels.write_kv(pool, 0, k, k, torch.tensor([4, 5, 6]))
    scales = row_scales(pool)[0, 0, :, 0, 4:7]
    assert scales.isnan().tolist() == [[False, True, False]] * 2
    assert not pool[0, 0, :, 0, 5].any()


def test_zeros_stay_zeros_and_the_largest_numbers_finite(kernels: Any) -> None:
    k = torch.stack((torch.zeros(1, 64), torch.full((1, 64), -torch.finfo(torch.float32).max)))
    pool, _ = scaled_pool(torch.int8, 1, 1, 2, 1, 16, 64)
    kernels.write_kv(pool, 0, k, k, torch.tensor([0, 1]))
    scales = row_scales(pool)[0, 0, 0, 0, :2]
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    assert not pool[0, 0, 0, 0, 0].any()
    assert bool((pool[0, 0, 0, 0, 1] == -127).all())


def test_blocks_are_copied_by_their_bytes_with_their_scales(kernels: Any) -> None:
    pool, memory = scaled_pool(torch.int8, 4, 2, 2, 2, 16, 24)
    row_scales(pool).copy_(torch.rand(4, 2, 2, 2, 16))
    before = pool.clone(), row_scales(pool).clone()
    guards = memory[:GUARD_BYTES].clone(), memory[-GUARD_BYTES:].clone()
    whole = memory[GUARD_BYTES:-GUARD_BYTES].view(4, -1)
    kernels.copy_blocks(whole, [(0, 3), (3, 1)])
    assert torch.equal(pool, before[0][[0, 3, 2, 0]])
    assert torch.equal(row_scales(pool), before[1][[0, 3, 2, 0]])
    held = torch.empty(2, whole.shape[1], dtype=torch.uint8)
    kernels.gather_blocks(whole, torch.tensor([1, 2]), held)
    assert torch.equal(held, whole[1:3])
    kernels.scatter_blocks(held, whole, torch.tensor([0, 3]))
    assert torch.equal(whole[[0, 3]], held)
    assert torch.equal(memory[:GUARD_BYTES], guards[0])
    assert torch.equal(memory[-GUARD_BYTES:], guards[1])


def test_a_pool_with_scales_is_not_copied_without_them(kernels: Any) -> None:
    pool, _ = scaled_pool(torch.int8, 3, 1, 2, 1, 4, 8)
    ids, blocks = torch.tensor([0]), torch.zeros(1, *pool.shape[1:], dtype=torch.int8)
    before = pool.clone()
    with pytest.raises(ValueError, match=r"pool is of strides"):
        kernels.copy_blocks(pool, [(0, 1)])
    with pytest.raises(ValueError, match=r"pool is of strides"):
        kernels.gather_blocks(pool, ids, blocks)
    with pytest.raises(ValueError, match=r"pool is of strides"):
        kernels.scatter_blocks(blocks, pool, ids)
    assert torch.equal(pool, before)


def test_a_pool_without_room_for_scales_is_refused() -> None:
    cpu = compiled()
    row = torch.ones(1, 1, 8)
    dense = torch.zeros(3, 1, 2, 1, 4, 8, dtype=torch.int8)
    whole, _ = scaled_pool(torch.int8, 3, 1, 2, 1, 4, 8)
    # the same strides, in memory that ends with the last row
    short = torch.zeros(6 * 48 - 16, dtype=torch.int8).as_strided(whole.shape, whole.stride())
    for pool, wanted in ((dense, "at least 48"), (short, "in 272 bytes, wanted at least 288")):
        with pytest.raises(cpu.InvalidKernelArgument, match=wanted):
            cpu.write_kv(pool, 0, row, row, torch.tensor([0]))
    with pytest.raises(ValueError, match="at least 48"):
        reference.write_kv(dense, 0, row, row, torch.tensor([0]))
    assert not dense.any() and not short.any()


@pytest.mark.parametrize("block_size", [1, 3, 16, 17])
@pytest.mark.parametrize("head_dim", [1, 6, 17, 64, 80])
def test_the_layout_and_the_kernels_agree_on_where_scales_lie(
    block_size: int, head_dim: int
) -> None:
    group = scaled_layout(torch.int8, 1, 1, block_size, head_dim).groups[0]
    assert group.scales_offset(block_size) == scales_offset(block_size, head_dim)
    assert group.run_bytes(block_size) == run_bytes(block_size, head_dim)
