"""A block pool in a device's memory, and its generation words in the host's.

Owns where a block's bytes lie and the words beside them. Knows neither what a block holds nor who
owns it. A word is raised before the work that first writes the block in its next life is queued;
until then whoever has copied the block knows that what was copied is of the life that was meant.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kv_transfer.memory import Fence


class DevicePool:
    """See the module.

    Attributes:
        memory: the bytes of every block, scratch blocks behind them: uint8 on the device
            ``[num_blocks + num_scratch, block_bytes]``.
        num_blocks: blocks that may have an owner.
        generations: uint64 ``[num_blocks]``.
    """

    def __init__(self, memory: torch.Tensor, num_blocks: int) -> None:
        self.memory = memory
        self.num_blocks = num_blocks
        self.generations: NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        self._fence = Fence()

    def block(self, block_id: int) -> torch.Tensor:
        """A block's bytes, uint8 [block_bytes] on the device."""
        return self.memory[block_id]

    def __contains__(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks

    def raise_generation(self, block_id: int, generation: int) -> None:
        """A block's next life begins; call it before anything that writes in it is queued."""
        self.generations[block_id] = generation
        self._fence()

    def generation(self, block_id: int) -> int:
        """The life that a block is in."""
        return int(self.generations[block_id])
