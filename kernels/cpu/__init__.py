"""The compiled kernel family: C++ in vector extensions, one build per instruction set.

The same functions as ``kvferry.kernels.reference``, which says what each does, on a CPU. They
release the interpreter's lock, use ``torch.get_num_threads()`` threads, and raise
InvalidKernelArgument before anything is written. Importing this package raises ExtensionUnusable
where the extension is missing or was built from other sources.
"""

from __future__ import annotations

from kvferry.kernels.cpu.attention import paged_attention
from kvferry.kernels.cpu.cache import (
    copy_blocks,
    gather_blocks,
    rope_write_kv,
    scatter_blocks,
    write_kv,
)
from kvferry.kernels.cpu.errors import (
    ExtensionMissing,
    ExtensionStale,
    ExtensionUnusable,
    InvalidKernelArgument,
    UnknownIsa,
)
from kvferry.kernels.cpu.extension import isa, isas, select_isa
from kvferry.kernels.cpu.layers import add_rms_norm, rms_norm, rope, rope_tables, silu_mul
from kvferry.kernels.cpu.linear import PackedLinear, linear

__all__ = [
    "ExtensionMissing",
    "ExtensionStale",
    "ExtensionUnusable",
    "InvalidKernelArgument",
    "PackedLinear",
    "UnknownIsa",
    "add_rms_norm",
    "copy_blocks",
    "gather_blocks",
    "isa",
    "isas",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "rope_write_kv",
    "scatter_blocks",
    "select_isa",
    "silu_mul",
    "write_kv",
]
