"""The prefix index: which block holds the KV of which chain of tokens.

Maps chain values to (block, filled slots). A block is entered once sealed, under the value at each
match unit inside it and at its last position; the first block of a value wins, so a second one with
the same content simply is not found. Knows nothing of owners: the pool asks whether a block that
nobody holds is worth keeping, and drops it from here when it takes the block for something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.kv_cache.hashing import BlockHash, Mark


class Entry(NamedTuple):
    """Where a chain ends: the block, and how many of its slots belong to the chain."""

    block_id: int
    num_tokens: int


class KVEventKind(StrEnum):
    """STORED: these can be found from now on. REMOVED: no longer. CLEARED: nothing can."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of what can be found here. Chain values cover the tenant's salt."""

    kind: KVEventKind
    values: tuple[bytes, ...] = ()


class PrefixIndex:
    """See the module.

    Attributes:
        num_events: changes so far; the next one has this number.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._values: dict[int, tuple[BlockHash, ...]] = {}
        self._untold: list[KVEvent] = []
        self.num_events = 0

    def __len__(self) -> int:
        """Chain values known."""
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        """Whether any chain value leads to the block."""
        return block_id in self._values

    def __iter__(self) -> Iterator[int]:
        """The blocks that it leads to."""
        return iter(self._values)

    def values(self) -> tuple[BlockHash, ...]:
        """Every chain value known, oldest first: a snapshot."""
        return tuple(self._entries)

    def find(self, value: BlockHash) -> Entry | None:
        """Where the chain that ends in ``value`` lies."""
        return self._entries.get(value)

    def add(self, block_id: int, marks: Iterable[Mark]) -> None:
        """Enter a sealed block under those of its marks that lead nowhere yet."""
        fresh = [mark for mark in marks if mark.value not in self._entries]
        if not fresh:
            return
        for mark in fresh:
            self._entries[mark.value] = Entry(block_id, mark.num_tokens)
        values = tuple(mark.value for mark in fresh)
        self._values[block_id] = self._values.get(block_id, ()) + values
        self._tell(KVEvent(KVEventKind.STORED, values))

    def drop(self, block_id: int) -> None:
        """Nothing leads to the block any longer. Nothing if nothing did."""
        values = self._values.pop(block_id, ())
        for value in values:
            del self._entries[value]
        if values:
            self._tell(KVEvent(KVEventKind.REMOVED, values))

    def clear(self) -> None:
        """Nothing leads anywhere any longer."""
        if self._values:
            self._entries.clear()
            self._values.clear()
            self._tell(KVEvent(KVEventKind.CLEARED))

    def _tell(self, event: KVEvent) -> None:
        self.num_events += 1
        self._untold.append(event)

    def take_events(self) -> tuple[int, tuple[KVEvent, ...]]:
        """The changes since this was last called, and the number of the first."""
        events, self._untold = tuple(self._untold), []
        return self.num_events - len(events), events
