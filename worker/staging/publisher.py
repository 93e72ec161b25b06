"""Publishes blocks of a device pool: copies them into slots that peers read.

::

    WAITING (no slot is free) → COPYING → READABLE          any state → gone, when withdrawn
      a block leaves COPYING when the event behind its copy says so: only then is its digest taken,
      and only then may it be announced

A block that was offered several times has one slot, until it was withdrawn as often. Slots are
given in order of offering, and a reader needs nothing but what was offered before to make progress;
so whoever waits for a slot waits for readers that have all they need. Called between steps: a block
that is offered has been written by a step that is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.kv_transfer.connector import BlockRef, KVConnector
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import PoolMemory
from kvferry.worker.publishing import Published
from kvferry.worker.staging.device_pool import DevicePool
from kvferry.worker.staging.slots import Slots


@dataclass(slots=True)
class _Offer:
    """A block: how often it was offered and not withdrawn, in which life, and where it is."""

    generation: int
    count: int = 1
    slot: int | None = None
    published: Published | None = None


class StagingPublisher:
    """See the module; implements ``worker.publishing.Publisher``.

    Args:
        epoch: the worker's life.
        pool: where the blocks lie.
        memory: the pool of slots that ``connector`` serves.
        slots: those of them that are for publishing.
        connector: serves the slots.
        checksum: give a digest with each block.
    """

    def __init__(
        self,
        epoch: int,
        pool: DevicePool,
        memory: PoolMemory,
        slots: Slots,
        connector: KVConnector,
        checksum: bool,
    ) -> None:
        self._epoch = epoch
        self._pool = pool
        self._memory = memory
        self._slots = slots
        self._connector = connector
        self._checksum = checksum
        self._offers: dict[int, _Offer] = {}
        self._waiting: dict[int, None] = {}  # in order
        self._copying: dict[int, None] = {}

    @property
    def num_pending(self) -> int:
        """Blocks that wait for a slot or for their copy."""
        return len(self._waiting) + len(self._copying)

    def offer(self, block_id: int) -> None:
        """Copy a block out as soon as there is a slot for it, if it is not here already."""
        known = self._offers.get(block_id)
        if known is not None:
            known.count += 1
            return
        self._offers[block_id] = _Offer(self._pool.generation(block_id))
        self._waiting[block_id] = None
        self._begin_copies()

    def published(self, block_id: int) -> Published | None:
        """How a block is read, once its copy is done."""
        return self._offers[block_id].published

    def poll(self) -> int:
        """Publish what has been copied, and begin to copy what there is room for."""
        done = [block_id for block_id in self._copying if self._publish(block_id)]
        for block_id in done:
            del self._copying[block_id]
        self._begin_copies()
        return len(done)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Give the slots of blocks back that nobody is to read any longer."""
        for block_id in block_ids:
            offer = self._offers[block_id]
            offer.count -= 1
            if offer.count:
                continue
            del self._offers[block_id]
            self._waiting.pop(block_id, None)
            self._copying.pop(block_id, None)
            if offer.slot is not None:
                self._connector.withdraw([offer.slot])
                self._slots.give_back(offer.slot)

    def _begin_copies(self) -> None:
        while self._waiting and (slot := self._slots.take()) is not None:
            block_id = next(iter(self._waiting))
            del self._waiting[block_id]
            self._offers[block_id].slot = slot
            self._slots.copy_out(self._pool.block(block_id), slot)
            self._copying[block_id] = None

    def _publish(self, block_id: int) -> bool:
        """Whether a block that was being copied can be read from now on."""
        offer = self._offers[block_id]
        assert offer.slot is not None
        if not self._slots.is_copied(offer.slot):
            return False
        found = self._pool.generation(block_id)
        assert found == offer.generation, (
            f"block {block_id} was rewritten while it was offered: generation {found}, offered "
            f"in {offer.generation}"
        )
        ref = BlockRef(self._epoch, offer.slot, self._slots.generation(offer.slot))
        digest = block_digest(self._memory.blocks[offer.slot]) if self._checksum else None
        offer.published = Published(ref, digest)
        return True
