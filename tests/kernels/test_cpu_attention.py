from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.dense import LAYER, Batch, Case, build, dense_attention
from tests.kernels.families import ISAS, isa_in_force

# Of values of order one. float32: rounding of sums of up to 1500 terms; bfloat16: of the result.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
# amx rounds the weights that meet bfloat16 values: 2^-8 of each, but for the largest, which is 1.
ROUNDED_WEIGHTS = 8e-3
GUARD = 512  # elements around a buffer


@pytest.fixture(scope="module", params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    with isa_in_force(request.param) as kernels:
        yield kernels


@st.composite
def cpu_cases(draw: st.DrawFn) -> Case:
    """Chunks on both sides of a tile and a split, any block size, any head_dim."""
    start = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 511, 512, 513, 1100]))
    length = st.one_of(st.just(1), st.integers(2, 40), st.sampled_from([64, 65, 130]))
    return Case(
        chunks=tuple(draw(st.lists(st.tuples(start, length), min_size=1, max_size=4))),
        block_size=draw(st.one_of(st.integers(1, 64), st.sampled_from((16, 128)))),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])),
        head_dim=draw(st.sampled_from([2, 6, 8, 17, 24, 40, 64, 80, 96, 100, 128, 256])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
        window=draw(st.one_of(st.none(), st.integers(1, 80), st.sampled_from([500, 4000]))),
    )


def attend(
    cpu: Any, batch: Batch, scale: float, window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    found: torch.Tensor = cpu.paged_attention(
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
    return found


def allowed(cpu: Any, dtype: torch.dtype) -> float:
    """The tolerance for queries of a dtype on the instruction set in force."""
    rounds = cpu.isa() == "amx" and dtype == torch.bfloat16
    return TOLERANCE[dtype] + (ROUNDED_WEIGHTS if rounds else 0)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; NaN where anything is."""
    return float((found.double() - expected).abs().max())


@settings(max_examples=60)
@given(cpu_cases())
def test_equals_dense_attention_and_reads_no_slot_behind_the_sequence(cpu: Any, case: Case) -> None:
    batch = build(case)
    scale = 0.8 * case.head_dim**-0.5
    found = attend(cpu, batch, scale, case.window)
    assert found.dtype == case.dtype and found.shape == batch.q.shape
    expected = dense_attention(batch, case.group, scale, case.window)
    assert error_of(found, expected) <= allowed(cpu, case.dtype)


@settings(max_examples=15)
@given(cpu_cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_pool_may_have_another_dtype_than_the_queries(
    cpu: Any, case: Case, dtype: torch.dtype
) -> None:
    batch = build(case)
    batch.pool = batch.pool.to(dtype)
    batch.k = [k.to(dtype) for k in batch.k]
    batch.v = [v.to(dtype) for v in batch.v]
    scale = case.head_dim**-0.5
    expected = dense_attention(batch, case.group, scale, case.window)
    found = attend(cpu, batch, scale, case.window)
    assert error_of(found, expected) <= allowed(cpu, case.dtype)


@settings(max_examples=15)
@given(cpu_cases(), st.integers(1, 3))
def test_a_sequence_gets_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    cpu: Any, case: Case, threads: int
) -> None:
    batch = build(case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = attend(cpu, batch, 0.3, case.window)
    torch.set_num_threads(1)
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
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("query_len", [1, 9])
def test_soft_cap_bounds_the_scores(cpu: Any, query_len: int, dtype: torch.dtype) -> None:
    batch = build(Case(((200, query_len),), 16, 1, 3, 64, dtype, seed=5))
    cap, scale = 3.0, 0.7
    keys, values = batch.k[0][:, 0].double(), batch.v[0][:, 0].double()
    expected = torch.zeros(batch.q.shape, dtype=torch.float64)
    for row in range(query_len):
        end = 200 + row + 1
        for head in range(3):
            scores = keys[:end] @ batch.q[row, head].double() * scale
            weights = (cap * torch.tanh(scores / cap)).softmax(0)
            expected[row, head] = weights @ values[:end]
    assert error_of(attend(cpu, batch, scale, cap=cap), expected) <= allowed(cpu, dtype)


def test_queries_may_be_a_strided_view_and_ids_64_bits_wide(cpu: Any) -> None:
    batch = build(Case(((40, 3), (9, 1)), 4, 2, 2, 64, torch.float32, seed=4))
    expected = attend(cpu, batch, 0.2)
    fused = torch.full((4, 7, 64), torch.nan)
    fused[:, 1:5] = batch.q
    batch.q = fused[:, 1:5]
    batch.block_tables = batch.block_tables.long()
    batch.block_tables[0, -1] = 2**40  # behind the last block: not read
    assert torch.equal(attend(cpu, batch, 0.2), expected)


def test_a_sequence_without_queries_is_skipped(cpu: Any) -> None:
    batch = build(Case(((5, 2), (0, 3)), 4, 2, 2, 8, torch.float32, seed=1))
    both = attend(cpu, batch, 1.0)
    batch.cu_seqlens_q = torch.tensor([0, 2, 2, 5])
    batch.block_tables = batch.block_tables[[0, 0, 1]]
    batch.seq_lens = torch.tensor([7, 0, 3])
    assert torch.equal(attend(cpu, batch, 1.0), both)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("query_len", [1, 3])
def test_blocks_behind_the_window_are_not_read(
    cpu: Any, query_len: int, dtype: torch.dtype
) -> None:
    batch = build(Case(((30 - query_len, query_len),), 4, 2, 1, 8, dtype, seed=3))
    before = attend(cpu, batch, 0.5, window=6)
    oldest = 30 - query_len - 6 + 1
    batch.block_tables[0, : oldest // 4] = 1_000_000  # no such block
    batch.pool[batch.block_tables[0, oldest // 4], LAYER, :, :, : oldest % 4] = torch.nan
    assert torch.equal(attend(cpu, batch, 0.5, window=6), before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("query_len", [1, 5])
def test_a_poisoned_key_poisons_those_who_see_it_and_nobody_else(
    cpu: Any, query_len: int, dtype: torch.dtype
) -> None:
    case = Case(((150, query_len), (77, query_len)), 16, 1, 2, 64, dtype, seed=8)
    batch = build(case)
    clean = attend(cpu, batch, 0.2)
    last = 150 + query_len - 1  # seen by the last query only
    block = batch.block_tables[0, last // 16]
    batch.pool[block, LAYER, 0, 0, last % 16, 5] = torch.nan
    found = attend(cpu, batch, 0.2)
    assert found[query_len - 1].isnan().all()
    others = [row for row in range(2 * query_len) if row != query_len - 1]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_winner(
    cpu: Any, size: float, dtype: torch.dtype
) -> None:
    batch = build(Case(((300, 1), (60, 8)), 16, 1, 2, 64, dtype, seed=6))
    batch.q = batch.q * size
    assert error_of(attend(cpu, batch, 1.0), dense_attention(batch, 2, 1.0, None)) <= 2e-2
    assert math.isfinite(float(attend(cpu, batch, 1.0).sum()))


@settings(max_examples=10)
@given(
    st.lists(st.one_of(st.integers(2, 40), st.just(130)), min_size=2, max_size=6),
    st.sampled_from([(3, 64), (4, 128), (1, 80), (8, 24)]),
    st.integers(0, 2**31),
)
def test_a_prompt_in_chunks_gets_the_bits_it_gets_at_once(
    cpu: Any, chunks: list[int], shape: tuple[int, int], seed: int
) -> None:
    group, head_dim = shape
    batch = build(Case(((0, sum(chunks)),), 7, 2, group, head_dim, torch.bfloat16, seed))
    at_once = attend(cpu, batch, head_dim**-0.5)
    end = 0
    for size in chunks:
        end += size
        chunk = replace(
            batch,
            q=batch.q[end - size : end],
            cu_seqlens_q=torch.tensor([0, size]),
            seq_lens=torch.tensor([end]),
        )
        assert torch.equal(attend(cpu, chunk, head_dim**-0.5), at_once[end - size : end])


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (4, 128), (7, 96), (2, 256)])
def test_many_queries_behind_a_context(
    cpu: Any, group: int, head_dim: int, window: int | None
) -> None:
    batch = build(Case(((333, 201),), 16, 1, group, head_dim, torch.bfloat16, seed=9))
    expected = dense_attention(batch, group, head_dim**-0.5, window)
    found = attend(cpu, batch, head_dim**-0.5, window)
    assert error_of(found, expected) <= allowed(cpu, torch.bfloat16)
