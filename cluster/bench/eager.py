"""A step as plain torch computes it: dense KV gathered for the whole batch, SDPA per layer.

The yardstick of ``bench engine``. All sequences of the batch have one length and as many queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvferry.kernels import reference


class EagerKernels:
    """A kernel family: the reference's, but attention over the batch as a whole."""

    write_kv = staticmethod(reference.write_kv)
    copy_blocks = staticmethod(reference.copy_blocks)
    rms_norm = staticmethod(reference.rms_norm)
    rope_tables = staticmethod(reference.rope_tables)
    rope = staticmethod(reference.rope)
    rope_write_kv = staticmethod(reference.rope_write_kv)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    linear = staticmethod(reference.linear)
    silu_mul = staticmethod(reference.silu_mul)

    @staticmethod
    def paged_attention(
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See ``kernels.reference``; ``window`` must not be shorter than the sequences."""
        batch, context = len(seq_lens), int(seq_lens[0])
        query_len = len(q) // batch
        blocks = -(-context // pool.shape[4])
        ids = block_tables[:, :blocks].flatten()
        kv = pool[:, layer].index_select(0, ids)
        kv = kv.view(batch, blocks, *kv.shape[1:]).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        k, v = kv[..., :context, :].to(q.dtype)
        queries = q.view(batch, query_len, *q.shape[1:]).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            queries,
            k,
            v,
            is_causal=query_len == context and query_len > 1,
            scale=softmax_scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).reshape(q.shape)
