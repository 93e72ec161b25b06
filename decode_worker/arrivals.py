"""Which chain values are on their way into this pool, and for whom. Pure.

Requests that begin alike may be announced at the same time. What is being read for one is not
read again for another: that one waits until the read has ended, and then finds the block in the
index, or reads it itself. Every read ends, by a limit of time if by nothing else.
"""

from __future__ import annotations

from kvferry.decode_worker.leg import DecodeLeg
from kvferry.kv_cache.hashing import BlockHash


class Arrivals:
    """See the module."""

    def __init__(self) -> None:
        self._reader: dict[BlockHash, DecodeLeg] = {}
        self._waiting: dict[BlockHash, dict[int, DecodeLeg]] = {}

    def is_read_for_another(self, value: BlockHash, leg: DecodeLeg) -> bool:
        """Whether the block is being read for another leg; this one is woken when it has ended."""
        reader = self._reader.get(value)
        if reader is None or reader is leg:
            return False
        self._waiting.setdefault(value, {})[id(leg)] = leg
        return True

    def begin(self, value: BlockHash, leg: DecodeLeg) -> None:
        """A read of the block begins for a leg."""
        self._reader.setdefault(value, leg)

    def end(self, value: BlockHash, leg: DecodeLeg) -> None:
        """The leg's read of the block has ended, well or not: who waits looks again."""
        if self._reader.get(value) is leg:
            del self._reader[value]
            for waiting in self._waiting.pop(value, {}).values():
                waiting.pull.unacknowledged = True

    def end_all(self, leg: DecodeLeg) -> None:
        """The leg reads nothing any longer."""
        for value in [value for value, reader in self._reader.items() if reader is leg]:
            self.end(value, leg)
