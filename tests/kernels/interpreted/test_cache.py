from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import triton as kernels
from kvferry.kernels.reference.scaled import quantised, row_scales
from tests.kernels.interpreted.batches import TOLERANCE
from tests.kernels.scaled_pools import SCALED, bytes_of, scaled_pool

LAYER = 1


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float64."""
    first, second = x.double().chunk(2, -1)
    return x.double() * cos.double() + torch.cat((-second, first), -1) * sin.double()


def heads(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([(1, 1), (6, 2), (3, 3), (2, 0)]),
    st.sampled_from([2, 6, 16, 80]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([1, 5, 16]),
    st.integers(0, 2**31),
)
def test_rope_write_kv(
    num_tokens: int,
    counts: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    seed: int,
) -> None:
    num_kv_heads, num_heads = counts[0], counts[0] * counts[1]
    fused = heads(seed, num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qk, v = fused[:, : num_heads + num_kv_heads], fused[:, num_heads + num_kv_heads :]
    cos, sin = (heads(seed + i, num_tokens, 1, head_dim, dtype=dtype) for i in (1, 2))
    pool = torch.full((4, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(4 * block_size, generator=generator)[:num_tokens]
    expected_pool = pool.clone()
    q = kernels.rope_write_kv(qk, v, cos, sin, pool, LAYER, slots)
    expected = turned(qk, cos, sin)
    assert q.shape == (num_tokens, num_heads, head_dim)
    assert torch.allclose(q.double(), expected[:, :num_heads], atol=3 * TOLERANCE[dtype])
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        stored = pool[block, LAYER, :, :, offset]
        assert torch.allclose(
            stored[0].double(), expected[token, num_heads:], atol=3 * TOLERANCE[dtype]
        )
        assert torch.equal(stored[1], v[token])
        expected_pool[block, LAYER, :, :, offset] = stored
    assert torch.equal(pool.nan_to_num(99.0), expected_pool.nan_to_num(99.0))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(SCALED),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([1.0, 1e-30, 1e4, 0.0]),
    st.integers(0, 2**31),
)
def test_rows_with_scales_have_the_bits_of_the_reference(
    kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, size: float, seed: int
) -> None:
    k, v = (heads(seed + i, 3, 2, head_dim, dtype=dtype) * size for i in (0, 1))
    pool, memory = scaled_pool(kv_dtype, 2, 3, 2, 2, 5, head_dim)
    wanted, wanted_memory = scaled_pool(kv_dtype, 2, 3, 2, 2, 5, head_dim)
    slots = torch.tensor([7, 0, 4])
    kernels.write_kv(pool, LAYER, k, v, slots)
    for plane, rows in ((0, k), (1, v)):
        elements, scales = quantised(rows, kv_dtype)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, 5)
            held = wanted.view(torch.int8)[block, LAYER, plane, :, offset]
            held.copy_(elements[token].view(torch.int8))
            row_scales(wanted)[block, LAYER, plane, :, offset] = scales[token]
    assert torch.equal(bytes_of(pool, memory), bytes_of(wanted, wanted_memory))


@pytest.mark.parametrize("kv_dtype", SCALED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_row_has_a_poisoned_scale(kv_dtype: torch.dtype, poison: float) -> None:
    k, v = heads(1, 1, 1, 8), heads(2, 1, 1, 8)
    k[0, 0, 3] = poison
    pool, _ = scaled_pool(kv_dtype, 1, 3, 2, 1, 4, 8)
    kernels.write_kv(pool, LAYER, k, v, torch.tensor([2]))
    assert row_scales(pool)[0, LAYER, 0, 0, 2].isnan()
    assert not pool.view(torch.int8)[0, LAYER, 0, 0, 2].any()
    assert row_scales(pool)[0, LAYER, 1, 0, 2].isfinite()


def test_a_negative_slot_is_not_written() -> None:
    k, v = heads(1, 3, 1, 8), heads(2, 3, 1, 8)
    pool = torch.full((2, 3, 2, 1, 4, 8), torch.nan)
    kernels.write_kv(pool, LAYER, k, v, torch.tensor([-1, 5, -1]))
    assert torch.equal(pool[1, LAYER, 0, 0, 1], k[1, 0])
    assert int(pool.isfinite().sum()) == 2 * 8


def test_rope() -> None:
    fused = heads(3, 4, 5, 16)
    x = fused[:, 1:4]
    cos, sin = heads(4, 4, 1, 16), heads(5, 4, 1, 16)
    assert torch.allclose(kernels.rope(x, cos, sin).double(), turned(x, cos, sin), atol=4e-6)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int8]),
    st.integers(1, 70),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_blocks_are_copied_gathered_and_scattered(
    dtype: torch.dtype, size: int, sources: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(100, (7, size), generator=generator).to(dtype)
    targets = torch.randperm(7, generator=generator)[: len(sources)]
    ids = torch.tensor(sources)
    before = pool.clone()

    out = torch.empty(len(sources), size, dtype=dtype)
    kernels.gather_blocks(pool, ids, out)
    assert torch.equal(out, before[ids])

    scattered = pool.clone()
    kernels.scatter_blocks(out, scattered, targets)
    expected = before.clone()
    expected[targets] = before[ids]
    assert torch.equal(scattered, expected)

    kernels.copy_blocks(pool, list(zip(sources, targets.tolist(), strict=True)))
    assert torch.equal(pool, expected)
