"""The GPU kernel family, in Triton: one source for NVIDIA's and AMD's.

The same functions as ``kvferry.kernels.reference``, which says what each does. They launch and
return: nothing here waits for the device, so that a step can be captured in a graph, and a block
id, a slot or a length that is wrong is not noticed. They raise InvalidKernelArgument for what can
be seen without looking into tensors, before anything is launched.

Importing this package needs triton, which torch's builds for GPUs bring along.
"""

from __future__ import annotations

from kvferry.kernels.errors import InvalidKernelArgument
from kvferry.kernels.reference.layers import rope_tables
from kvferry.kernels.reference.linear import DenseLinear, QuantisedLinear, linear
from kvferry.kernels.triton.attention import paged_attention
from kvferry.kernels.triton.cache import (
    copy_blocks,
    gather_blocks,
    rope,
    rope_write_kv,
    scatter_blocks,
    write_kv,
)
from kvferry.kernels.triton.layers import add_rms_norm, rms_norm, silu_mul

__all__ = [
    "DenseLinear",
    "InvalidKernelArgument",
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
