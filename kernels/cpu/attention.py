"""Varlen paged attention: prefill chunks and decode steps in one call.

See ``kernels.reference.attention`` for what it computes, ``src/attention.h`` for how. A sequence
gets the same bits alone and in a batch, and on any number of threads.
"""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.arguments import (
    activation,
    heads_of,
    indices,
    pool_layer,
    raise_refusal,
    refuse,
)
from kvferry.kernels.cpu.extension import native


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
    """As the reference's, with ``soft_cap``: scores become ``cap * tanh(score / cap)``."""
    dtype = activation("q", q)
    strides = heads_of("q", q, None, None, None)
    num_tokens, num_heads, head_dim = q.shape
    place = pool_layer(pool, layer, None, head_dim)
    num_kv_heads = pool.shape[3]
    if num_heads % num_kv_heads:
        refuse("q", f"of {num_heads} heads", f"a multiple of the pool's {num_kv_heads}")
    lengths = indices("seq_lens", seq_lens, torch.int32, 1)
    bounds = indices("cu_seqlens_q", cu_seqlens_q, torch.int32, 1)
    tables = indices("block_tables", block_tables, torch.int32, 2)
    num_seqs = len(lengths)
    if len(bounds) != num_seqs + 1:
        refuse("cu_seqlens_q", f"of {len(bounds)} numbers", f"{num_seqs + 1}, as seq_lens + 1")
    if len(tables) != num_seqs:
        refuse("block_tables", f"of {len(tables)} rows", f"{num_seqs}, as seq_lens")
    if window is not None and window < 1:
        refuse("window", window, "at least 1, or None")
    if soft_cap is not None and not soft_cap > 0:
        refuse("soft_cap", soft_cap, "above 0, or None")
    out = torch.empty(q.shape, dtype=q.dtype)
    raise_refusal(
        native.paged_attention(
            out.data_ptr(),
            q.data_ptr(),
            tables.data_ptr(),
            bounds.data_ptr(),
            lengths.data_ptr(),
            num_tokens,
            num_seqs,
            tables.shape[1],
            num_heads,
            num_kv_heads,
            head_dim,
            *strides,
            window or 0,
            *place,
            softmax_scale,
            soft_cap or 0.0,
            dtype,
            torch.get_num_threads(),
        )
    )
    return out
