"""The prefix index: which block holds the KV of which chain of tokens.

Maps chain values to (block, filled slots). A block is entered once sealed, under the value at each
match unit inside it and at its last position; the first block of a value wins, so a second one with
the same content simply is not found. Knows nothing of owners: the pool asks whether a block that
nobody holds is worth keeping, and drops it from here when it takes the block for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.kv_cache.hashing import BlockHash, Mark


class Entry(NamedTuple):
    """Where a chain ends: the block, and how many of its slots belong to the chain."""

    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stored:
    """These chain values can be found here from now on."""

    values: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These chain values cannot be found here any longer."""

    values: tuple[BlockHash, ...]


IndexEvent = Stored | Removed


class PrefixIndex:
    """See the module.

    Args:
        on_event: called with every change, in order.
    """

    def __init__(self, on_event: Callable[[IndexEvent], None] | None = None) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._values: dict[int, tuple[BlockHash, ...]] = {}
        self._on_event = on_event

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
        if self._on_event is not None:
            self._on_event(Stored(values))

    def drop(self, block_id: int) -> None:
        """Nothing leads to the block any longer. Nothing if nothing did."""
        values = self._values.pop(block_id, ())
        for value in values:
            del self._entries[value]
        if values and self._on_event is not None:
            self._on_event(Removed(values))
