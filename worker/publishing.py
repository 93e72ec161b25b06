"""Which of a worker's own blocks peers can read, and by which name.

Where the pool lies in memory that the connectors serve, a sealed block can be read as it lies, at
once. Where it lies elsewhere (``worker.staging``) it has to be copied first, and there may be no
room for that yet. So a block is *offered*, and asked after until it is *published*. Does not know
why a block is offered, nor to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_transfer.connector import BlockRef, KVConnector


@dataclass(frozen=True, slots=True)
class Published:
    """A block as peers read it: its name, and the digest of its bytes if they are verified."""

    ref: BlockRef
    digest: int | None


class Publisher(Protocol):
    """Makes own blocks readable. All calls come from the engine thread; none waits."""

    @property
    def num_pending(self) -> int:
        """Blocks offered that cannot be read yet."""
        ...

    def offer(self, block_id: int) -> None:
        """A sealed block, which is pinned until ``withdraw`` has been called as often."""
        ...

    def published(self, block_id: int) -> Published | None:
        """How an offered block is read; None: not yet. It then stays readable until withdrawn."""
        ...

    def poll(self) -> int:
        """Make progress; how many blocks became readable."""
        ...

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Nobody is to read these blocks for whom they were offered, once each: call it before
        they are unpinned.
        """
        ...


class DirectPublisher:
    """Blocks that peers read as they lie."""

    num_pending = 0

    def __init__(self, epoch: int, pool: BlockPool, connector: KVConnector, checksum: bool) -> None:
        self._epoch = epoch
        self._pool = pool
        self._connector = connector
        self._checksum = checksum

    def offer(self, block_id: int) -> None:
        """Nothing to do."""

    def published(self, block_id: int) -> Published:
        """At once."""
        generation = self._pool.blocks[block_id].generation
        digest = self._connector.digest(block_id) if self._checksum else None
        return Published(BlockRef(self._epoch, block_id, generation), digest)

    def poll(self) -> int:
        """Nothing is ever pending."""
        return 0

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Tell the connector of those that nobody else reads: it may have to stop sending them."""
        last = [b for b in block_ids if self._pool.blocks[b].num_pins == 1]
        if last:
            self._connector.withdraw(last)
