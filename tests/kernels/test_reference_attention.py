from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvferry.kernels import reference
from tests.kernels.dense import LAYER, Batch, Case, build, cases, dense_attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def attend(batch: Batch, scale: float, window: int | None = None) -> torch.Tensor:
    return reference.paged_attention(
        batch.q,
        batch.pool,
        LAYER,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale,
        window,
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_dense_attention_and_reads_no_slot_behind_the_sequence(case: Case) -> None:
    batch = build(case)
    scale = 0.8 * case.head_dim**-0.5
    found = attend(batch, scale, case.window)
    assert found.dtype == case.dtype and found.shape == batch.q.shape
    error = (found.double() - dense_attention(batch, case.group, scale, case.window)).abs().max()
    assert error <= TOLERANCE[case.dtype]


@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(case: Case) -> None:
    batch = build(case)
    together = attend(batch, 0.3, case.window)
    for seq in range(len(batch.seq_lens)):
        first, last = batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = reference.paged_attention(
            batch.q[first:last],
            batch.pool,
            LAYER,
            batch.block_tables[seq : seq + 1],
            torch.tensor([0, last - first]),
            batch.seq_lens[seq : seq + 1],
            0.3,
            case.window,
        )
        assert torch.equal(alone, together[first:last])


def test_a_sequence_without_queries_is_skipped() -> None:
    batch = build(Case(((5, 2), (0, 3)), 4, 2, 2, 8, torch.float32, seed=1))
    both = attend(batch, 1.0)
    batch.cu_seqlens_q = torch.tensor([0, 2, 2, 5])
    batch.block_tables = batch.block_tables[[0, 0, 1]]
    batch.seq_lens = torch.tensor([7, 0, 3])
    assert torch.equal(attend(batch, 1.0), both)


@pytest.mark.parametrize("query_len", [1, 3])
def test_blocks_behind_the_window_are_not_read(query_len: int) -> None:
    batch = build(Case(((30 - query_len, query_len),), 4, 2, 1, 8, torch.float32, seed=3))
    before = attend(batch, 0.5, window=6)
    oldest = 30 - query_len - 6 + 1
    batch.block_tables[0, : oldest // 4] = 1_000_000  # no such block
    batch.pool[batch.block_tables[0, oldest // 4], LAYER, :, :, : oldest % 4] = torch.nan
    assert torch.equal(attend(batch, 0.5, window=6), before)


def test_only_the_named_layer_is_read() -> None:
    batch = build(Case(((9, 4),), 8, 1, 3, 8, torch.float32, seed=2))
    before = attend(batch, 0.5)
    others = [layer for layer in range(batch.pool.shape[1]) if layer != LAYER]
    assert batch.pool[:, others].isnan().all()
    batch.pool[:, others] = 7.0
    assert torch.equal(attend(batch, 0.5), before)
