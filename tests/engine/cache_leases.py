"""Leases as the model keeps them: who reads what, how far, and since when nothing moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.kv_transfer.leases import LeaseKey

Reader = tuple[str, int]


@dataclass
class Lease:
    """What a lease holds by position, how far its reader has verified, and has heard of."""

    since: float
    verified: int = 0
    announced: int = 0
    blocks: dict[int, int] = field(default_factory=dict)


class LeaseBook:
    """See the module. Times are seconds on the machine's clock."""

    def __init__(self, stall_limit: float) -> None:
        self.stall_limit = stall_limit
        self.open: dict[LeaseKey, Lease] = {}
        self.moved: dict[Reader, float] = {}
        self.ended: list[LeaseKey] = []

    def begin(self, key: LeaseKey, now: float) -> None:
        """A lease without blocks."""
        if all(other.reader != key.reader for other in self.open):
            self.moved[key.reader] = now
        self.open[key] = Lease(now)

    def add(self, key: LeaseKey, position: int, block_id: int, now: float) -> None:
        """One more block, unread."""
        lease = self.open[key]
        if not lease.blocks:
            lease.since = now
        lease.blocks[position] = block_id

    def verify(self, key: LeaseKey, until: int, now: float) -> list[int]:
        """The reader has everything below ``until``; the blocks that it no longer needs."""
        lease = self.open[key]
        if until <= lease.verified:
            return []
        lease.verified, self.moved[key.reader] = until, now
        done = sorted(position for position in lease.blocks if position < until)
        return [lease.blocks.pop(position) for position in done]

    def end(self, key: LeaseKey) -> list[int]:
        """The lease is over; the blocks that it still held, by position."""
        lease = self.open.pop(key)
        self.ended.append(key)
        return [block_id for _, block_id in sorted(lease.blocks.items())]

    def stalled(self, now: float) -> list[LeaseKey]:
        """Leases with unread blocks whose reader has not moved for longer than the limit."""
        return [
            key
            for key, lease in self.open.items()
            if lease.blocks and now - max(lease.since, self.moved[key.reader]) > self.stall_limit
        ]
