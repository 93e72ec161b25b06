"""The own blocks that reads write into: whole, or slot by slot from blocks of another size.

Owns where a source block's bytes may go. A block that fits is received where it will lie. Any other
is received into a staging buffer, verified there, and only then are its slots put into the slots of
own blocks that hold the same positions: a row at a time, and with each row its scale where the pool
has scales. Knows neither positions nor tokens; a ``Move`` says which slots.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.layout import DTYPE_BYTES, KVCacheLayout, KVGroup
from kvferry.kv_transfer.connector import Move
from kvferry.kv_transfer.memory import PoolMemory


class TargetBlocks:
    """Blocks of ``memory``, which is laid out as ``layout`` says."""

    def __init__(self, memory: PoolMemory, layout: KVCacheLayout) -> None:
        self.memory = memory
        self.layout = layout

    def accepts(self, move: Move, source: KVCacheLayout) -> bool:
        """Whether a block of a pool laid out as ``source`` may be read as ``move`` says."""
        if move.rank != 0:
            return False
        if not move.runs:
            return source.block_size == self.layout.block_size and self._has(move.target)
        return all(
            run.count > 0
            and _inside(run.first, run.count, source.block_size)
            and _inside(run.target_first, run.count, self.layout.block_size)
            and self._has(run.target)
            for run in move.runs
        )

    def whole(self, move: Move) -> NDArray[np.uint8]:
        """The bytes of the one block that a ``move`` without runs fills: uint8 [block_bytes]."""
        block: NDArray[np.uint8] = self.memory.blocks[move.target]
        return block

    def place(self, move: Move, staged: NDArray[np.uint8], source: KVCacheLayout) -> None:
        """Put a verified block's slots where ``move.runs`` says; nothing without runs.

        Args:
            move: one that is accepted.
            staged: the source block's bytes, uint8 [its block_bytes].
            source: the layout of its pool.
        """
        if not move.runs:
            return
        parts = _slots(staged, source.groups[0], source.block_size)
        group, size = self.layout.groups[0], self.layout.block_size
        for run in move.runs:
            taken = slice(run.first, run.first + run.count)
            filled = slice(run.target_first, run.target_first + run.count)
            own = _slots(self.memory.blocks[run.target], group, size)
            for there, here in zip(parts, own, strict=True):
                here[:, filled] = there[:, taken]

    def _has(self, block_id: int) -> bool:
        return block_id in range(self.memory.num_blocks)


class Staging:
    """A buffer for one block at a time, made when it is first needed."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def room(self, num_bytes: int) -> NDArray[np.uint8]:
        """``num_bytes`` bytes, the same ones in each call of one size: uint8 [num_bytes]."""
        if self._bytes.size < num_bytes:
            self._bytes = np.empty(num_bytes, dtype=np.uint8)
        return self._bytes[:num_bytes]


def _inside(first: int, count: int, size: int) -> bool:
    return 0 <= first <= size - count


def _slots(
    block: NDArray[np.uint8], group: KVGroup, block_size: int
) -> tuple[NDArray[np.uint8], ...]:
    """Views of a block's bytes by slot: its rows, and where it has them their scales.

    Each is uint8 ``[layers * planes * heads, block_size, bytes of a slot]``.
    """
    num_runs = prod(group.block_shape(block_size)[:3])
    stride = group.run_bytes(block_size)
    parts = [(0, group.head_dim * DTYPE_BYTES[group.dtype])]
    if group.scales:
        parts.append((group.scales_offset(block_size), DTYPE_BYTES[group.scales]))
    return tuple(
        np.ndarray(
            (num_runs, block_size, width), np.uint8, block, offset, strides=(stride, width, 1)
        )
        for offset, width in parts
    )
