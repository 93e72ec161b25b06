"""Dense float64 attention and random paged batches, for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of chunks: per sequence (positions computed before, query length)."""

    chunks: tuple[tuple[int, int], ...]
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int
    window: int | None = None


@dataclass(slots=True)
class Batch:
    """Tensors of a case; ``k`` and ``v`` hold each sequence's dense keys and values."""

    q: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]


LAYER, NUM_LAYERS = 1, 3


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunk = st.tuples(st.integers(0, 50), st.one_of(st.just(1), st.integers(1, 40)))
    return Case(
        chunks=tuple(draw(st.lists(chunk, min_size=1, max_size=5))),
        block_size=draw(st.one_of(st.integers(1, 32), st.just(128))),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        head_dim=draw(st.sampled_from([2, 8, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
        window=draw(st.one_of(st.none(), st.integers(1, 40), st.just(1000))),
    )


def build(case: Case) -> Batch:
    """Scatter random K and V into permuted blocks of a pool that is NaN everywhere else."""
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    seq_lens = [start + length for start, length in case.chunks]
    needed = [-(-n // case.block_size) for n in seq_lens]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, NUM_LAYERS, 2, case.num_kv_heads, case.block_size, case.head_dim)
    pool = torch.full(shape, torch.nan, dtype=case.dtype)
    tables = torch.full((len(needed), max(needed) + 2), 1_000_000, dtype=torch.int32)
    dense: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seq, seq_len in enumerate(seq_lens):
        blocks = [ids.pop() for _ in range(needed[seq])]
        tables[seq, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for plane in (0, 1):
            values = randn(seq_len, case.num_kv_heads, case.head_dim)
            dense[plane].append(values)
            for position in range(seq_len):
                block, slot = divmod(position, case.block_size)
                pool[blocks[block], LAYER, plane, :, slot] = values[position]
    lengths = torch.tensor([0] + [length for _, length in case.chunks])
    num_heads = case.num_kv_heads * case.group
    return Batch(
        q=randn(int(lengths.sum()), num_heads, case.head_dim),
        pool=pool,
        block_tables=tables,
        cu_seqlens_q=lengths.cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        k=dense[0],
        v=dense[1],
    )


def dense_attention(
    batch: Batch, group: int, softmax_scale: float, window: int | None
) -> torch.Tensor:
    """The definition, one query and one head at a time, in float64."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    bounds = batch.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        first, last = bounds[seq], bounds[seq + 1]
        for row in range(first, last):
            end = seq_len - (last - row) + 1
            visible = slice(0 if window is None else max(0, end - window), end)
            for head in range(batch.q.shape[1]):
                keys = batch.k[seq][visible, head // group].double()
                values = batch.v[seq][visible, head // group].double()
                scores = keys @ batch.q[row, head].double() * softmax_scale
                out[row, head] = scores.softmax(0) @ values
    return out


def soft_capped_attention(
    batch: Batch, group: int, softmax_scale: float, window: int | None, cap: float
) -> torch.Tensor:
    """``dense_attention`` with scores of ``cap * tanh(score / cap)``."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    bounds = batch.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        first, last = bounds[seq], bounds[seq + 1]
        for row in range(first, last):
            end = seq_len - (last - row) + 1
            visible = slice(0 if window is None else max(0, end - window), end)
            for head in range(batch.q.shape[1]):
                keys = batch.k[seq][visible, head // group].double()
                scores = keys @ batch.q[row, head].double() * softmax_scale
                weights = (cap * torch.tanh(scores / cap)).softmax(0)
                out[row, head] = weights @ batch.v[seq][visible, head // group].double()
    return out
