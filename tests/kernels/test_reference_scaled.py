"""The reference's pools with scales and its soft cap, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.reference.scaled import LARGEST, quantised, row_scales
from tests.kernels.dense import (
    LAYER,
    Batch,
    Case,
    build,
    cases,
    dense_attention,
    soft_capped_attention,
)
from tests.kernels.scaled_pools import SCALED, bytes_of, in_scaled, scaled_pool

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}


def attend(
    batch: Batch, scale: float, window: int | None, cap: float | None = None
) -> torch.Tensor:
    return reference.paged_attention(
        batch.q,
        batch.pool,
        LAYER,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale,
        window,
        cap,
    )


@settings(max_examples=25)
@given(cases(), st.sampled_from(SCALED))
def test_attention_over_a_pool_with_scales(case: Case, kv_dtype: torch.dtype) -> None:
    batch = in_scaled(build(case), kv_dtype)
    found = attend(batch, 0.3, case.window)
    expected = dense_attention(batch, case.group, 0.3, case.window)
    assert float((found.double() - expected).abs().max()) <= TOLERANCE[case.dtype]


@settings(max_examples=25)
@given(cases(), st.sampled_from([0.5, 3.0, 30.0]))
def test_soft_cap(case: Case, cap: float) -> None:
    batch = build(case)
    found = attend(batch, 0.7, case.window, cap)
    expected = soft_capped_attention(batch, case.group, 0.7, case.window, cap)
    assert float((found.double() - expected).abs().max()) <= 3 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("kv_dtype", SCALED)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1.0, 1e30]))
def test_an_element_times_its_scale_is_the_nearest_there_is(
    kv_dtype: torch.dtype, seed: int, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, 33, generator=generator) * size
    elements, scales = quantised(rows, kv_dtype)
    held = torch.arange(256, dtype=torch.uint8).view(kv_dtype).double()
    held = held[held.abs() <= LARGEST[kv_dtype]]
    wanted = rows.double() / scales.double()[:, None]
    distances = (wanted[..., None] - held).abs().amin(-1)
    found = (wanted - elements.double()).abs()
    assert bool((found <= distances + 1e-4).all())  # the quotient is rounded to float32 first


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_writing_touches_no_other_byte(kv_dtype: torch.dtype) -> None:
    pool, memory = scaled_pool(kv_dtype, 3, 2, 2, 2, 4, 6)
    before = bytes_of(pool, memory)
    k, v = torch.randn(2, 2, 6), torch.randn(2, 2, 6)
    slots = torch.tensor([9, 2])
    reference.write_kv(pool, 1, k, v, slots)
    for plane, rows in ((0, k), (1, v)):
        elements, scales = quantised(rows, kv_dtype)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, 4)
            at = (block, 1, plane, slice(None), offset)
            assert torch.equal(pool.view(torch.int8)[at], elements[token].view(torch.int8))
            assert torch.equal(row_scales(pool)[at], scales[token])
    assert int((bytes_of(pool, memory) != before).sum()) <= 2 * 2 * 2 * (6 + 4)
