"""How the bytes of one KV block are laid out, as data.

A block holds ``block_size`` consecutive positions for all layers of one KV group, held by one
rank, in one contiguous stretch of bytes::

    block[layer][plane][head][slot][dim]

so that one block is one descriptor on the wire. Each (layer, plane, head) is a run: its rows, slot
by slot, and where the group has scales, one behind the other, those of the rows. A block so carries
its scales wherever it is moved. This module does not know where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

MAX_BLOCK_SIZE = 1024
"""Positions of a block at most."""

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "int64": 8,
}
SCALED_DTYPES = ("int8", "float8_e4m3fn")
"""Of pools that have a float32 scale per row."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block shape, and the heads of them that this rank holds.

    Attributes:
        first_layer: index of the group's first model layer.
        num_layers: number of consecutive layers.
        num_kv_heads: KV heads held by this rank.
        head_dim: elements per head and position.
        dtype: element type, a key of ``DTYPE_BYTES``.
        num_planes: 2 for K and V; 1 for a latent cache.
        first_kv_head: global index of the first head held.
        total_kv_heads: KV heads of the whole model; 0 means the same as ``num_kv_heads``.
        scales: element type of the scales, one per row, a key of ``DTYPE_BYTES``; empty for none.
            That of a slot means nothing until the slot is written.
    """

    first_layer: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_planes: int = 2
    first_kv_head: int = 0
    total_kv_heads: int = 0
    scales: str = ""

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """Shape ``[layers, planes, heads, slots, dim]`` of one block, scales left out."""
        return (self.num_layers, self.num_planes, self.num_kv_heads, block_size, self.head_dim)

    def block_strides(self, block_size: int) -> tuple[int, int, int, int, int]:
        """Bytes from one layer, plane, head, slot and element of a block to the next."""
        element = DTYPE_BYTES[self.dtype]
        head = self.run_bytes(block_size)
        plane = head * self.num_kv_heads
        return (plane * self.num_planes, plane, head, element * self.head_dim, element)

    def scales_offset(self, block_size: int) -> int:
        """Bytes from the begin of a run to its scales: its rows, to whole scales."""
        rows = block_size * self.head_dim * DTYPE_BYTES[self.dtype]
        width = DTYPE_BYTES[self.scales] if self.scales else 1
        return -(-rows // width) * width

    def run_bytes(self, block_size: int) -> int:
        """Bytes of one (layer, plane, head) of a block: its rows, and their scales if any."""
        scales = block_size * DTYPE_BYTES[self.scales] if self.scales else 0
        return self.scales_offset(block_size) + scales

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block."""
        return prod(self.block_shape(block_size)[:3]) * self.run_bytes(block_size)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The layout of one rank's pool: block size in positions, and its KV groups.

    The first version has one group and one rank; signatures carry both so that more is only data.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    rank: int = 0
    num_ranks: int = 1

    def block_shape(self, group: int = 0) -> tuple[int, int, int, int, int]:
        """Shape ``[layers, planes, heads, slots, dim]`` of one block of ``group``, less scales."""
        return self.groups[group].block_shape(self.block_size)

    def block_strides(self, group: int = 0) -> tuple[int, int, int, int, int]:
        """Bytes from one layer, plane, head, slot and element of a block to the next."""
        return self.groups[group].block_strides(self.block_size)

    def block_bytes(self, group: int = 0) -> int:
        """Bytes of one block of ``group``."""
        return self.groups[group].block_bytes(self.block_size)

    def byte_offset(self, layer: int, plane: int, head: int, slot: int, group: int = 0) -> int:
        """Offset in bytes, within a block, of element 0 of a (layer, plane, head, slot) row."""
        strides = self.block_strides(group)
        return sum(a * b for a, b in zip((layer, plane, head, slot), strides[:4], strict=True))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)
