"""Attention over pools of int8, on every family and instruction set, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kvferry.kernels import reference
from kvferry.kernels.reference.scaled import row_scales
from tests.kernels.dense import LAYER, Batch, Case, build, cases, dense_attention
from tests.kernels.families import ISAS, isa_in_force
from tests.kernels.scaled_pools import in_scaled
from tests.kernels.test_cpu_attention import TOLERANCE, attend, cpu_cases, error_of

# (chunks behind what was computed before), one of them a decode step
BATCH = ((0, 1), (130, 1), (40, 9), (513, 1), (0, 70))


@pytest.fixture(scope="module", params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    with isa_in_force(request.param) as kernels:
        yield kernels


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_reference_equals_dense_attention_of_what_the_pool_holds(case: Case) -> None:
    batch = in_scaled(build(case), torch.int8)
    scale = 0.8 * case.head_dim**-0.5
    found = reference.paged_attention(
        batch.q,
        batch.pool,
        LAYER,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale,
        case.window,
    )
    assert found.dtype == case.dtype
    expected = dense_attention(batch, case.group, scale, case.window)
    assert error_of(found, expected) <= TOLERANCE[case.dtype]


@settings(max_examples=60)
@given(cpu_cases())
def test_equals_dense_attention_and_reads_no_slot_behind_the_sequence(cpu: Any, case: Case) -> None:
    batch = in_scaled(build(case), torch.int8)
    scale = 0.8 * case.head_dim**-0.5
    found = attend(cpu, batch, scale, case.window)
    assert found.dtype == case.dtype and found.shape == batch.q.shape
    expected = dense_attention(batch, case.group, scale, case.window)
    assert error_of(found, expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_heads_of_models(cpu: Any, head_dim: int, group: int, window: int | None) -> None:
    batch = in_scaled(
        build(Case(BATCH, 16, 2, group, head_dim, torch.float32, seed=head_dim)), torch.int8
    )
    expected = dense_attention(batch, group, head_dim**-0.5, window)
    found = attend(cpu, batch, head_dim**-0.5, window)
    assert error_of(found, expected) <= TOLERANCE[torch.float32]


@settings(max_examples=15)
@given(cpu_cases())
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(cpu: Any, case: Case) -> None:
    batch = in_scaled(build(case), torch.int8)
    together = attend(cpu, batch, 0.3, case.window)
    for seq in range(len(batch.seq_lens)):
        first, last = batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[first:last],
            block_tables=batch.block_tables[seq : seq + 1],
            cu_seqlens_q=torch.tensor([0, last - first]),
            seq_lens=batch.seq_lens[seq : seq + 1],
        )
        assert torch.equal(attend(cpu, alone, 0.3, case.window), together[first:last])


@pytest.mark.parametrize("query_len", [1, 9])
def test_soft_cap_bounds_scores_that_have_been_scaled(cpu: Any, query_len: int) -> None:
    batch = in_scaled(
        build(Case(((200, query_len),), 16, 1, 3, 64, torch.float32, seed=5)), torch.int8
    )
    cap, scale = 3.0, 0.7
    keys, values = batch.k[0][:, 0], batch.v[0][:, 0]
    expected = torch.zeros(batch.q.shape, dtype=torch.float64)
    for row in range(query_len):
        end = 200 + row + 1
        for head in range(3):
            scores = keys[:end] @ batch.q[row, head].double() * scale
            weights = (cap * torch.tanh(scores / cap)).softmax(0)
            expected[row, head] = weights @ values[:end]
    assert error_of(attend(cpu, batch, scale, cap=cap), expected) <= 4e-6


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e30])
def test_every_row_has_a_scale_of_its_own(cpu: Any, size: float) -> None:
    """Rows that are orders of magnitude apart, as keys of one head may be, keep their precision."""
    batch = build(Case(((90, 1), (31, 7)), 16, 1, 2, 64, torch.float32, seed=9))
    values = torch.tensor([1.0, size]).repeat(64)
    for seq, length in enumerate(batch.seq_lens.tolist()):
        batch.v[seq] *= values[:length, None, None]
        for at in range(length):
            block = batch.block_tables[seq, at // 16]
            batch.pool[block, LAYER, 1, :, at % 16] = batch.v[seq][at]
    batch = in_scaled(batch, torch.int8)
    expected = dense_attention(batch, 2, 0.1, None)
    found = attend(cpu, batch, 0.1)
    assert bool(((found - expected).abs() <= 4e-6 * max(size, 1.0)).all())


def written(cpu: Any, batch: Batch, rows: torch.Tensor, slot: int) -> None:
    """Write the first sequence's keys of one slot again."""
    place = int(batch.block_tables[0, slot // 16]) * 16 + slot % 16
    cpu.write_kv(batch.pool, LAYER, rows, rows, torch.tensor([place]))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("query_len", [1, 5])
def test_a_row_that_is_not_a_number_poisons_those_who_see_it_and_nobody_else(
    cpu: Any, query_len: int, poison: float
) -> None:
    case = Case(((150, query_len), (77, query_len)), 16, 1, 2, 64, torch.float32, seed=8)
    batch = in_scaled(build(case), torch.int8)
    clean = attend(cpu, batch, 0.2)
    last = 150 + query_len - 1  # seen by the last query only
    row = torch.ones(1, 1, 64)
    row[0, 0, 5] = poison
    values = row_scales(batch.pool)[:, LAYER, 1].clone()
    written(cpu, batch, row, last)
    row_scales(batch.pool)[:, LAYER, 1] = values  # of the key alone
    found = attend(cpu, batch, 0.2)
    assert found[query_len - 1].isnan().all()
    others = [row for row in range(2 * query_len) if row != query_len - 1]
    assert torch.equal(found[others], clean[others])
