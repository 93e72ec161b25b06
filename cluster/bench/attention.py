"""Cases of paged attention, over a pool that no cache holds, and the ways plain torch has.

Each call takes another layer of the pool, as a model does, so that its keys and values come from
memory. Blocks lie scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.cluster.bench.families import Family
from kvferry.cluster.bench.machine import Call
from kvferry.cluster.bench.rows import Case, Shape
from kvferry.kernels import reference

GATHER, FOLDED, LOOP = "gather+sdpa", "folded-gqa", "per-sequence"


@dataclass(frozen=True, slots=True)
class Attention:
    """Sequences of one length with queries at their ends, and their KV in a pool.

    Attributes:
        q: ``[batch * query_len, q_heads, head_dim]``.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``.
        tables: ``[batch, blocks]`` int32.
    """

    shape: Shape
    q: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    scale: float

    @property
    def num_layers(self) -> int:
        """Layers of the pool."""
        return self.pool.shape[1]

    def gathered(self, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dense: ``[batch, kv_heads, context, head_dim]`` each."""
        batch, blocks = self.tables.shape
        ids = self.tables.flatten()
        kv = self.pool[:, layer].index_select(0, ids)  # [batch * blocks, 2, kv_heads, slots, dim]
        kv = kv.view(batch, blocks, *kv.shape[1:]).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        k, v = kv[..., : self.shape.context, :].to(dtype)
        return k, v

    def queries(self, dtype: torch.dtype) -> torch.Tensor:
        """``[batch, q_heads, query_len, head_dim]``"""
        shape = self.shape
        return (
            self.q.to(dtype).view(shape.batch, shape.query_len, *self.q.shape[1:]).transpose(1, 2)
        )

    def mask(self) -> torch.Tensor | None:
        """Which keys each query sees: ``[query_len, context]``; None for all."""
        context = self.shape.context or 0
        if self.shape.query_len == 1:
            return None
        whole = torch.ones(self.shape.query_len, context, dtype=torch.bool)
        return whole.tril(context - self.shape.query_len)

    def flat(self, attended: torch.Tensor) -> torch.Tensor:
        """From ``[batch, q_heads, query_len, head_dim]`` to the shape of ``q``."""
        return attended.transpose(1, 2).reshape(self.q.shape)


def make_attention(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, pool_bytes: int
) -> Attention:
    """Random queries, keys and values; the pool has layers enough to be ``pool_bytes``."""
    q_heads, kv_heads, head_dim = shape.q_heads or 1, shape.kv_heads or 1, shape.head_dim or 1
    block_size, context = shape.block_size or 1, shape.context or 1
    per_sequence = -(-context // block_size)
    num_blocks = shape.batch * per_sequence + 1
    block = (2, kv_heads, block_size, head_dim)
    layer_bytes = num_blocks * math.prod(block) * kv_dtype.itemsize
    num_layers = max(1, -(-pool_bytes // layer_bytes))
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(num_blocks, num_layers, *block, dtype=kv_dtype)
    for each in pool:
        each.copy_(torch.randn(each.shape, generator=generator))
    tables = torch.randperm(num_blocks, generator=generator)[: num_blocks - 1].to(torch.int32)
    num_tokens = shape.batch * shape.query_len
    return Attention(
        shape,
        torch.randn(num_tokens, q_heads, head_dim, generator=generator).to(dtype),
        pool,
        tables.view(shape.batch, per_sequence),
        torch.arange(0, num_tokens + 1, shape.query_len, dtype=torch.int32),
        torch.full((shape.batch,), context, dtype=torch.int32),
        head_dim**-0.5,
    )


def attention_case(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, pool_bytes: int
) -> Case:
    """Paged attention of a batch: ``paged_attention_decode`` or ``paged_attention_prefill``."""
    work = make_attention(shape, dtype, kv_dtype, pool_bytes)

    def way(attend: Callable[[Attention, int], torch.Tensor]) -> Call:
        return lambda turn: attend(work, turn % work.num_layers)

    def family_call(family: Family) -> Call:
        return lambda turn: paged(work, family, turn % work.num_layers)

    seen = _pairs(shape)
    q_heads, kv_heads, head_dim = shape.q_heads or 1, shape.kv_heads or 1, shape.head_dim or 1
    kv_bytes = 2 * shape.batch * (shape.context or 1) * kv_heads * head_dim * kv_dtype.itemsize
    return Case(
        kernel=f"paged_attention_{'decode' if shape.query_len == 1 else 'prefill'}",
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        call=family_call,
        baselines={
            GATHER: way(gather_sdpa),
            FOLDED: way(folded_gqa),
            LOOP: way(per_sequence),
        },
        error=lambda family: float(
            (paged(work, family, 0).double() - in_float64(work, 0)).abs().max()
        ),
        num_bytes=kv_bytes + 2 * work.q.nbytes,
        flops=4 * seen * q_heads * head_dim,
    )


def paged(work: Attention, family: Family, layer: int) -> torch.Tensor:
    """By a family's own kernel."""
    return family.kernels.paged_attention(
        work.q,
        work.pool,
        layer,
        work.tables,
        work.cu_seqlens_q,
        work.seq_lens,
        work.scale,
        None,
    )


def gather_sdpa(work: Attention, layer: int) -> torch.Tensor:
    """Gather the whole batch, then torch's attention, which repeats the KV heads."""
    k, v = work.gathered(layer, work.q.dtype)
    attended = F.scaled_dot_product_attention(
        work.queries(work.q.dtype), k, v, work.mask(), scale=work.scale, enable_gqa=True
    )
    return work.flat(attended)


def folded_gqa(work: Attention, layer: int) -> torch.Tensor:
    """Gather the whole batch; the queries that share a KV head become rows of one query."""
    k, v = work.gathered(layer, work.q.dtype)
    q, mask = work.queries(work.q.dtype), work.mask()
    batch, q_heads, query_len, head_dim = q.shape
    group = q_heads // k.shape[1]
    folded = q.reshape(batch, k.shape[1], group * query_len, head_dim)
    if mask is not None:
        mask = mask.repeat(group, 1)
    attended = F.scaled_dot_product_attention(folded, k, v, mask, scale=work.scale)
    return work.flat(attended.view(batch, q_heads, query_len, head_dim))


def per_sequence(work: Attention, layer: int) -> torch.Tensor:
    """One sequence after the other, gathered and attended: the reference kernel."""
    return reference.paged_attention(
        work.q, work.pool, layer, work.tables, work.cu_seqlens_q, work.seq_lens, work.scale
    )


def in_float64(work: Attention, layer: int) -> torch.Tensor:
    """The definition, in float64."""
    k, v = work.gathered(layer, torch.float64)
    q, mask = work.queries(torch.float64), work.mask()
    grouped = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])  # [.., kv_heads, group, ..]
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * work.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return work.flat((scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2))


def _pairs(shape: Shape) -> int:
    """Query and key pairs that the causal mask leaves, all sequences together."""
    before = (shape.context or 0) - shape.query_len
    return shape.batch * (shape.query_len * before + shape.query_len * (shape.query_len + 1) // 2)
