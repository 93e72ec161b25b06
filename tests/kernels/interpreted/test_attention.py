from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.triton.tuning import Tile
from tests.kernels.dense import LAYER, Case, build, dense_attention, soft_capped_attention
from tests.kernels.interpreted.batches import TOLERANCE, attend, cases, error_of
from tests.kernels.scaled_pools import SCALED, in_scaled

SPLITS = st.sampled_from([1, 2, 4])


@settings(max_examples=40, deadline=None)
@given(cases(), SPLITS)
def test_equals_dense_attention_and_reads_no_slot_behind_the_sequence(
    case: Case, splits: int
) -> None:
    batch = build(case)
    scale = 0.8 * case.head_dim**-0.5
    found = attend(batch, scale, case.window, splits=splits)
    assert found.dtype == case.dtype and found.shape == batch.q.shape
    expected = dense_attention(batch, case.group, scale, case.window)
    assert error_of(found, expected) <= TOLERANCE[case.dtype]


@settings(max_examples=12, deadline=None)
@given(cases(), st.sampled_from(SCALED), SPLITS)
def test_pools_with_scales(case: Case, kv_dtype: torch.dtype, splits: int) -> None:
    batch = in_scaled(build(case), kv_dtype)
    scale = case.head_dim**-0.5
    found = attend(batch, scale, case.window, splits=splits)
    expected = dense_attention(batch, case.group, scale, case.window)
    assert error_of(found, expected) <= TOLERANCE[case.dtype]


@settings(max_examples=8, deadline=None)
@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_pool_may_have_another_dtype_than_the_queries(case: Case, dtype: torch.dtype) -> None:
    batch = build(case)
    batch.pool = batch.pool.to(dtype)
    batch.k = [k.to(dtype) for k in batch.k]
    batch.v = [v.to(dtype) for v in batch.v]
    expected = dense_attention(batch, case.group, 0.3, case.window)
    # A device multiplies in the dtype of the queries; the interpreter in float32.
    assert error_of(attend(batch, 0.3, case.window), expected) <= TOLERANCE[case.dtype]


@settings(max_examples=10, deadline=None)
@given(cases((torch.float32,)), st.sampled_from([0.5, 3.0, 30.0]), SPLITS)
def test_soft_cap(case: Case, cap: float, splits: int) -> None:
    batch = build(case)
    found = attend(batch, 0.7, case.window, soft_cap=cap, splits=splits)
    expected = soft_capped_attention(batch, case.group, 0.7, case.window, cap)
    assert error_of(found, expected) <= 1e-5


@pytest.mark.parametrize("query_len", [1, 6])
def test_tiles_and_splits_as_the_rules_choose_them(query_len: int) -> None:
    case = Case(((180, query_len), (3, query_len)), 16, 1, 3, 64, torch.float32, seed=2)
    batch = build(case)
    expected = dense_attention(batch, 3, 0.125, None)
    assert error_of(attend(batch, 0.125, tile=None), expected) <= 4e-6


def test_a_group_wider_than_a_matrix_unit() -> None:
    batch = build(Case(((20, 3),), 8, 1, 20, 16, torch.float32, seed=2))
    expected = dense_attention(batch, 20, 0.25, None)
    assert error_of(attend(batch, 0.25, tile=Tile(32, 16, 4, 1)), expected) <= 4e-6


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sequence_without_keys_has_zeros_and_one_without_queries_nothing(splits: int) -> None:
    batch = build(Case(((5, 2), (0, 3)), 4, 2, 2, 8, torch.float32, seed=1))
    both = attend(batch, 1.0, splits=splits)
    batch.q = torch.cat((batch.q, torch.full_like(batch.q[:1], 7.0)))
    batch.cu_seqlens_q = torch.tensor([0, 2, 2, 5, 6])
    batch.block_tables = batch.block_tables[[0, 0, 1, 0]]
    batch.seq_lens = torch.tensor([7, 0, 3, 0])
    found = attend(batch, 1.0, splits=splits)
    assert torch.equal(found[:5], both)
    assert torch.equal(found[5], torch.zeros_like(found[5]))


def test_queries_may_be_a_strided_view_and_ids_64_bits_wide() -> None:
    batch = build(Case(((40, 3), (9, 1)), 4, 2, 2, 16, torch.float32, seed=4))
    expected = attend(batch, 0.2)
    fused = torch.full((4, 7, 16), torch.nan)
    fused[:, 1:5] = batch.q
    batch.q = fused[:, 1:5]
    batch.block_tables = batch.block_tables.long()
    batch.block_tables[0, -1] = 2**40  # behind the last block: not read
    assert torch.equal(attend(batch, 0.2), expected)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_behind_the_window_are_not_read(query_len: int, splits: int) -> None:
    case = Case(((60 - query_len, query_len),), 4, 2, 1, 8, torch.float32, seed=3)
    batch = build(case)
    before = attend(batch, 0.5, window=6, splits=splits)
    oldest = (60 - query_len - 6 + 1) // 16 * 16  # the tile that the window begins in
    batch.block_tables[0, : oldest // 4] = 1_000_000  # no such block
    assert torch.equal(attend(batch, 0.5, window=6, splits=splits), before)


@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_poisoned_key_poisons_those_who_see_it_and_nobody_else(
    query_len: int, splits: int
) -> None:
    case = Case(((50, query_len), (27, query_len)), 16, 1, 2, 8, torch.float32, seed=8)
    batch = build(case)
    clean = attend(batch, 0.2, splits=splits)
    last = 50 + query_len - 1  # seen by the last query only
    block = batch.block_tables[0, last // 16]
    batch.pool[block, LAYER, 0, 0, last % 16, 5] = torch.nan
    found = attend(batch, 0.2, splits=splits)
    assert found[query_len - 1].isnan().all()
    others = [row for row in range(2 * query_len) if row != query_len - 1]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("plane", [0, 1])
def test_what_lies_before_the_window_is_not_loaded(query_len: int, plane: int) -> None:
    batch = build(Case(((60 - query_len, query_len),), 4, 2, 1, 8, torch.float32, seed=3))
    before = attend(batch, 0.5, window=6)
    for position in range(60 - query_len - 6 + 1):
        block = batch.block_tables[0, position // 4]
        batch.pool[block, LAYER, plane, :, position % 4] = torch.nan
    assert torch.equal(attend(batch, 0.5, window=6), before)


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_small_values_of_a_pool_with_scales_are_not_lost_in_float16(kv_dtype: torch.dtype) -> None:
    batch = build(Case(((60, 1),), 16, 1, 2, 16, torch.float16, seed=3))
    batch.pool[:, LAYER, 1] *= 1e-4
    batch.v = [v * 1e-4 for v in batch.v]
    batch = in_scaled(batch, kv_dtype)
    expected = dense_attention(batch, 2, 3.0, None)
    assert error_of(attend(batch, 3.0), expected) <= 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_winner(size: float) -> None:
    batch = build(Case(((70, 1), (20, 8)), 16, 1, 2, 16, torch.float32, seed=6))
    batch.q = batch.q * size
    found = attend(batch, 1.0, splits=2)
    assert error_of(found, dense_attention(batch, 2, 1.0, None)) <= 2e-2
    assert math.isfinite(float(found.sum()))
