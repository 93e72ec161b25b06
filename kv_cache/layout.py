"""How the bytes of one KV block are laid out, as data.

A block holds ``block_size`` consecutive positions for all layers of one KV group, held by one
rank, in one contiguous stretch of bytes::

    block[layer][plane][head][slot][dim]

so that one block is one descriptor on the wire and each (layer, plane, head) run is contiguous.
This module does not know where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


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
    """

    first_layer: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_planes: int = 2
    first_kv_head: int = 0
    total_kv_heads: int = 0

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """Shape ``[layers, planes, heads, slots, dim]`` of one block."""
        return (self.num_layers, self.num_planes, self.num_kv_heads, block_size, self.head_dim)

    def bytes_per_token(self) -> int:
        """Bytes that one position takes in this group."""
        elements = self.num_layers * self.num_planes * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]


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
        """Shape ``[layers, planes, heads, slots, dim]`` of one block of ``group``."""
        return self.groups[group].block_shape(self.block_size)

    def block_bytes(self, group: int = 0) -> int:
        """Bytes of one block of ``group``."""
        return self.groups[group].bytes_per_token() * self.block_size

    def byte_offset(self, layer: int, plane: int, head: int, slot: int, group: int = 0) -> int:
        """Offset in bytes, within a block, of element 0 of a (layer, plane, head, slot) row."""
        shape = self.block_shape(group)
        index = layer
        for size, at in zip(shape[1:4], (plane, head, slot), strict=True):
            index = index * size + at
        return index * shape[4] * DTYPE_BYTES[self.groups[group].dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)
