"""Slots of pinned host memory: which are free, and how each is copied from and to the device.

Owns a share of a pool of slots. A slot is free only when no copy from or to it is queued: one that
is given back before its copy is done is kept until the copy's event says so. Knows neither blocks
nor peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from kvferry.engine.device.protocol import Event, Stream
from kvferry.kv_transfer.memory import PoolMemory


class Slots:
    """See the module.

    Args:
        memory: the pool of slots; its generation words are raised here.
        pinned: the same bytes as a tensor, uint8 ``[num_slots, block_bytes]``.
        ids: the slots that are this object's to give.
        stream: where the copies are queued.
    """

    def __init__(
        self, memory: PoolMemory, pinned: torch.Tensor, ids: Sequence[int], stream: Stream
    ) -> None:
        self.num_slots = len(ids)
        self._memory = memory
        self._pinned = pinned
        self._stream = stream
        self._free = deque(ids)
        self._copying: dict[int, Event] = {}
        self._draining: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        self._reclaim()
        return len(self._free)

    def take(self) -> int | None:
        """A slot that nobody has and no copy touches, in a new life; None: there is none now.

        What peers were told of its last life is stale from now on.
        """
        self._reclaim()
        if not self._free:
            return None
        slot = self._free.popleft()
        self._memory.raise_generation(slot, self.generation(slot) + 1)
        return slot

    def give_back(self, slot: int) -> None:
        """Nobody needs the slot any longer; it is free when the copy that is queued is done."""
        if slot in self._copying:
            self._draining.add(slot)
        else:
            self._free.append(slot)

    def copy_out(self, block: torch.Tensor, slot: int) -> None:
        """Queue a copy of a block of the device into a slot that was taken."""
        self._copy(slot, self._pinned[slot], block)

    def copy_in(self, slot: int, block: torch.Tensor) -> None:
        """Queue a copy of a slot into a block of the device."""
        self._copy(slot, block, self._pinned[slot])

    def is_copied(self, slot: int) -> bool:
        """Whether the copy that was queued of a slot is done."""
        event = self._copying.get(slot)
        if event is not None and event.query():
            del self._copying[slot]
            return True
        return event is None

    def wait(self, slot: int) -> None:
        """Return when no copy from or to the slot is queued."""
        event = self._copying.pop(slot, None)
        if event is not None:
            event.synchronize()

    def generation(self, slot: int) -> int:
        """The life that a slot is in."""
        return int(self._memory.generations[slot])

    def close(self) -> None:
        """Return when no copy is queued."""
        for slot in list(self._copying):
            self.wait(slot)

    def _copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        assert slot not in self._copying, "one copy of a slot at a time"
        self._stream.copy(target, source)
        self._copying[slot] = self._stream.record()

    def _reclaim(self) -> None:
        for slot in [slot for slot in self._draining if self.is_copied(slot)]:
            self._draining.discard(slot)
            self._free.append(slot)
