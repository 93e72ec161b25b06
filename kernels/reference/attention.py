"""Varlen paged attention: prefill chunks and decode steps in one call.

One sequence at a time: its blocks are gathered with one ``index_select`` and cut at ``seq_len``,
so nothing behind the last valid slot, and no other sequence of the batch, can enter a result.
Blocks that lie wholly outside a sliding window are not gathered.
On a CPU this is as fast as one padded batch, whose gather costs more than the calls it saves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels.reference.scaled import has_scales, row_scales


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's queries over its KV, whose slots are already written.

    The queries of sequence ``s`` are rows ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]`` of ``q`` and
    stand at its last positions, ``seq_lens[s] - query_len : seq_lens[s]``. Query head ``h`` reads
    KV head ``h // (num_heads // num_kv_heads)``. Scores and sums are computed in float32.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``.
        pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; of int8
            and float8 with the scales of ``kernels.reference.scaled``, of which those of valid
            positions are read.
        layer: layer index within the pool.
        block_tables: ``[num_seqs, max_blocks]`` int32 or int64; entries behind the block of
            position ``seq_len - 1`` are not read and may hold anything.
        cu_seqlens_q: ``[num_seqs + 1]``, cumulative query lengths from 0.
        seq_lens: ``[num_seqs]``, valid positions, queries included.
        softmax_scale: factor of the scores, usually ``head_dim ** -0.5``.
        window: the query at position ``p`` sees ``p - window + 1 .. p``; None for all up to ``p``.
        soft_cap: scores become ``cap * tanh(score / cap)``; None leaves them.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the dtype of ``q``.
    """
    out = torch.empty_like(q)
    block_size = pool.shape[4]
    held = pool  # gathered as it lies: torch gathers no float8
    scales_last = None
    if has_scales(pool.dtype):
        held = pool.view(torch.int8)
        scales_last = row_scales(pool)[:, layer].permute(1, 2, 0, 3)
    blocks_last = held[:, layer].permute(1, 2, 0, 3, 4)  # [2, kv_heads, num_blocks, slots, dim]
    bounds = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, last = bounds[seq], bounds[seq + 1]
        if first == last:
            continue
        oldest = 0 if window is None else max(0, seq_len - (last - first) - window + 1)
        first_block = oldest // block_size
        table = block_tables[seq, first_block : -(-seq_len // block_size)]
        seen = slice(oldest - first_block * block_size, seq_len - first_block * block_size)
        kv = blocks_last.index_select(2, table).view(pool.dtype).flatten(2, 3)[:, :, seen].float()
        if scales_last is not None:
            kv *= scales_last.index_select(2, table).flatten(2, 3)[:, :, seen, None]
        out[first:last] = _attend(q[first:last].float(), kv, softmax_scale, window, soft_cap)
    return out


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    softmax_scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """One sequence: q ``[query_len, heads, dim]`` over kv ``[2, kv_heads, kv_len, dim]``, float32.

    The last query stands at the last of the keys; the first of them is the oldest any query sees.
    """
    query_len, num_heads, head_dim = q.shape
    _, num_kv_heads, kv_len, _ = kv.shape
    group = num_heads // num_kv_heads
    grouped = q.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = kv.unsqueeze(2).expand(-1, -1, group, -1, -1)  # [kv_heads, group, kv_len, dim], shared
    slides = window is not None and window < kv_len
    is_causal = query_len == kv_len and not slides
    mask = None
    if query_len > 1 and not is_causal:
        mask = torch.ones(query_len, kv_len, dtype=torch.bool, device=q.device)
        mask = mask.tril(kv_len - query_len)
        if window is not None:
            mask = mask.triu(kv_len - query_len - window + 1)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(grouped @ k.mT * (softmax_scale / soft_cap))
        visible = torch.ones(query_len, kv_len, dtype=torch.bool, device=q.device).tril(
            kv_len - query_len
        )
        scores.masked_fill_(~(visible if mask is None else mask), -torch.inf)
        attended: torch.Tensor = scores.softmax(-1) @ v
    else:
        attended = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, is_causal=is_causal, scale=softmax_scale
        )
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
