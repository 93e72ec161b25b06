"""The reference kernel family in plain torch: the oracle for every other family.

The pool is one tensor ``[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]``
with K in plane 0 and V in plane 1; a slot number is ``block_id * block_size + offset``. One of int8
has scales beside its rows, see ``int8``. Knows tensors and slots; does not know who owns a block,
requests, or model configurations.
"""

from __future__ import annotations

from kvferry.kernels.reference.attention import paged_attention
from kvferry.kernels.reference.cache import (
    copy_blocks,
    gather_blocks,
    rope_write_kv,
    scatter_blocks,
    write_kv,
)
from kvferry.kernels.reference.layers import add_rms_norm, rms_norm, rope, rope_tables, silu_mul
from kvferry.kernels.reference.linear import DenseLinear, QuantisedLinear, linear

__all__ = [
    "DenseLinear",
    "QuantisedLinear",
    "add_rms_norm",
    "copy_blocks",
    "gather_blocks",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "rope_write_kv",
    "scatter_blocks",
    "silu_mul",
    "write_kv",
]
