"""Leases: what keeps a source's sealed blocks alive until their reader has them.

A lease belongs to one (request, attempt, reader life) and holds a *set* of blocks by position, so
that releasing twice is nothing. Pure and deterministic: the clock is an argument, and the caller
turns the returned block ids into unpins. Safety never rests on a lease: a reader that outlives its
own finds the generation words changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.kv_cache.errors import KVFerryError

Reader = tuple[str, int]  # worker id, epoch


class LeaseConflict(KVFerryError):
    """A lease was given two blocks for one position; names both."""


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Whose blocks a lease holds.

    Attributes:
        request_id: the request.
        attempt: (router epoch, count); a new placement is a new lease.
        reader: (worker id, epoch) of the life that reads.
    """

    request_id: str
    attempt: tuple[int, int]
    reader: Reader


@dataclass(slots=True)
class _Lease:
    """One lease's state.

    Attributes:
        waiting_since: when ``blocks`` last ceased to be empty, or the lease's beginning.
        verified: leading positions that the reader has verified.
        blocks: position to block id of what it has yet to verify.
    """

    waiting_since: float
    verified: int = 0
    blocks: dict[int, int] = field(default_factory=dict)

    def release(self) -> list[int]:
        """Give up all blocks, in order of position."""
        released = [self.blocks[position] for position in sorted(self.blocks)]
        self.blocks.clear()
        return released


@dataclass(slots=True)
class _ReaderState:
    """A reader that holds leases: their keys in order of opening, and its last progress."""

    progressed_at: float
    keys: dict[LeaseKey, None] = field(default_factory=dict)


class LeaseTable:
    """All leases of one source.

    While a lease holds unread blocks, *some* read of the same reader must progress within
    ``stall_limit``: waiting behind the reader's other reads is no stall, and a lease with nothing
    to read cannot stall. An id that is not open is refused, counted and leaves no state.

    Attributes:
        stall_limit: seconds without progress after which a lease with unread blocks expires.
        stale_refused: acknowledgements and blocks refused because their lease had ended.
        num_expired: leases ended because their reader had stalled.
    """

    def __init__(self, stall_limit: float) -> None:
        self.stall_limit = stall_limit
        self.stale_refused = 0
        self.num_expired = 0
        self._leases: dict[LeaseKey, _Lease] = {}
        self._readers: dict[Reader, _ReaderState] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._leases

    def __iter__(self) -> Iterator[tuple[LeaseKey, int, int]]:
        """For the audit: (key, position, block id) of each pinned block."""
        for key, lease in self._leases.items():
            for position in sorted(lease.blocks):
                yield key, position, lease.blocks[position]

    def open(self, key: LeaseKey, now: float) -> bool:
        """Begin a lease without blocks. False, and no change, if it is open already."""
        if key in self._leases:
            return False
        self._leases[key] = _Lease(waiting_since=now)
        self._readers.setdefault(key.reader, _ReaderState(now)).keys[key] = None
        return True

    def add(self, key: LeaseKey, position: int, block_id: int, now: float) -> bool:
        """Hold a block for the reader. True if it is newly held: the caller then pins it.

        ``position`` is the block's last: the reader may have the first ones from elsewhere, and it
        reads the block until it has this one.

        False if the position is held already or the reader has verified it, and, counted, if the
        lease has ended. Raises LeaseConflict if the position is held with another block.
        """
        lease = self._leases.get(key)
        if lease is None:
            self.stale_refused += 1
            return False
        held = lease.blocks.get(position)
        if held is not None and held != block_id:
            raise LeaseConflict(
                f"request {key.request_id} attempt {key.attempt}: position {position} is leased as "
                f"block {held}, got block {block_id}: end the lease before its blocks change"
            )
        if held is not None or position < lease.verified:
            return False
        if not lease.blocks:
            lease.waiting_since = now
        lease.blocks[position] = block_id
        return True

    def acknowledge(self, key: LeaseKey, positions_verified: int, now: float) -> list[int]:
        """Take the reader's word that it has verified all positions below ``positions_verified``.

        Returns the blocks released, by position. Cumulative: repetitions and older counts change
        nothing. An acknowledgement of a lease that has ended is refused and counted.
        """
        lease = self._leases.get(key)
        if lease is None:
            self.stale_refused += 1
            return []
        if positions_verified <= lease.verified:
            return []
        lease.verified = positions_verified
        self.progress(key.reader, now)
        read = sorted(position for position in lease.blocks if position < positions_verified)
        return [lease.blocks.pop(position) for position in read]

    def progress(self, reader: Reader, now: float) -> None:
        """Note that some read of ``reader`` progressed: all its leases live on."""
        state = self._readers.get(reader)
        if state is not None:
            state.progressed_at = max(state.progressed_at, now)

    def end(self, key: LeaseKey) -> list[int]:
        """End a lease; returns the blocks it still held. Nothing if it is not open."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return []
        siblings = self._readers[key.reader].keys
        del siblings[key]
        if not siblings:
            del self._readers[key.reader]
        return lease.release()

    def end_reader(self, reader: Reader) -> list[tuple[LeaseKey, list[int]]]:
        """End all leases of a reader that is gone; returns each with the blocks it still held."""
        state = self._readers.get(reader)
        return [] if state is None else [(key, self.end(key)) for key in list(state.keys)]

    def sweep(self, now: float) -> list[tuple[LeaseKey, list[int]]]:
        """End the leases whose reader has stalled; returns each with the blocks it still held.

        Call it on a timer: it must not depend on new work being admitted.
        """
        expired = [key for key in self._leases if (self.remaining(key, now) or 0.0) < 0.0]
        self.num_expired += len(expired)
        return [(key, self.end(key)) for key in expired]

    def remaining(self, key: LeaseKey, now: float) -> float | None:
        """Seconds until the lease expires if nothing progresses; None if nothing can expire."""
        lease = self._leases.get(key)
        if lease is None or not lease.blocks:
            return None
        since = max(lease.waiting_since, self._readers[key.reader].progressed_at)
        return since + self.stall_limit - now

    def pinned_blocks(self) -> Counter[int]:
        """How many leases hold each block."""
        return Counter(block_id for _, _, block_id in self)
