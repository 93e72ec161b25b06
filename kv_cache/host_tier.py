"""The host tier: contents of blocks that are kept outside the pool, where, and for whom.

Contents are known by key: the chain value of a whole block, or, for the last block of a sequence
that is not full, its owner and place. Each lies in a slot of memory or, where there is a disk, in a
file; slots and files have the size of a block, so that their numbers are the budget in bytes.

A content with owners (sequences whose blocks were off-loaded) stays until the last has let go.
One without is *cached*: it may be found by whoever begins alike, and is given up for others, the
least recently used first. When no slot is free, the least recently used content goes to the disk,
cached ones first; where there is no room on the disk either, a cached one is forgotten; where
there is none, nothing more is taken.

Decides and never touches bytes: what is to be copied is returned as moves, to be made in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.kv_cache.hashing import BlockHash


class TailKey(NamedTuple):
    """The content of a block that is not full, which nobody but its owner can use."""

    owner: Hashable
    block_index: int


HostKey = BlockHash | TailKey


class Save(NamedTuple):
    """Copy a block of the pool into a slot."""

    key: HostKey
    block_id: int
    slot: int


class Spill(NamedTuple):
    """Copy a slot into a file."""

    key: HostKey
    slot: int
    file: int


class Load(NamedTuple):
    """Copy a slot into a block of the pool."""

    key: HostKey
    slot: int
    block_id: int


class Read(NamedTuple):
    """Copy a file into a block of the pool."""

    key: HostKey
    file: int
    block_id: int


class Forget(NamedTuple):
    """Remove a file."""

    file: int


Move = Save | Spill | Load | Read | Forget


class Content(NamedTuple):
    """What is to be kept: a key, the block that holds it now, and its filled slots."""

    key: HostKey
    block_id: int
    num_tokens: int


@dataclass(slots=True)
class HostEntry:
    """Where a content lies, and for whom: in a slot of memory or else in a file.

    ``num_tokens`` are the filled positions of the block.
    """

    key: HostKey
    num_tokens: int
    slot: int | None = None
    file: int | None = None
    owners: set[Hashable] = field(default_factory=set)


class _Level:
    """Contents of memory, or of the disk, the least recently used first.

    Invariant: ``cached`` has those without an owner, in the order in which they were used last or
    were let go of.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[HostKey, HostEntry] = OrderedDict()
        self.cached: OrderedDict[HostKey, None] = OrderedDict()

    def add(self, entry: HostEntry) -> None:
        """As the most recently used."""
        self.entries[entry.key] = entry
        self.note_owners(entry)

    def remove(self, key: HostKey) -> None:
        """It is here no longer."""
        del self.entries[key]
        self.cached.pop(key, None)

    def touch(self, key: HostKey) -> None:
        """It is the most recently used one now."""
        self.entries.move_to_end(key)
        if key in self.cached:
            self.cached.move_to_end(key)

    def note_owners(self, entry: HostEntry) -> None:
        """It has its first owner, or none any longer."""
        if entry.owners:
            self.cached.pop(entry.key, None)
        elif entry.key not in self.cached:
            self.cached[entry.key] = None

    def first_cached(self) -> HostEntry | None:
        """The least recently used one that has no owner."""
        return next((self.entries[key] for key in self.cached), None)


class HostTier:
    """See the module.

    Args:
        num_slots: blocks that fit into memory; at least 1.
        num_files: blocks that fit onto the disk; 0 for no disk.
        caching: keep whole blocks that no owner needs any longer, for who begins alike.

    Attributes:
        num_evictions: cached contents given up for others.
        num_spilled: contents that went from memory to disk.
    """

    def __init__(self, num_slots: int, num_files: int = 0, caching: bool = True) -> None:
        if num_slots < 1 or num_files < 0:
            raise ValueError(f"got {num_slots} slots, {num_files} files; wanted at least 1 and 0")
        self.num_slots = num_slots
        self.num_files = num_files
        self.caching = caching
        self.num_evictions = 0
        self.num_spilled = 0
        self._memory = _Level()
        self._disk = _Level()
        self._held: dict[Hashable, set[HostKey]] = {}
        self._free_slots = list(range(num_slots))
        self._free_files = list(range(num_files))

    def __len__(self) -> int:
        """Contents kept."""
        return len(self._memory.entries) + len(self._disk.entries)

    def __iter__(self) -> Iterator[HostEntry]:
        """Every content, of memory and then of disk."""
        yield from self._memory.entries.values()
        yield from self._disk.entries.values()

    @property
    def owners(self) -> frozenset[Hashable]:
        """Whoever holds something."""
        return frozenset(self._held)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that hold nothing."""
        return tuple(self._free_slots)

    @property
    def free_files(self) -> tuple[int, ...]:
        """Files that do not exist."""
        return tuple(self._free_files)

    def find(self, key: HostKey) -> HostEntry | None:
        """Where a content lies; None if it is not here."""
        return self._memory.entries.get(key) or self._disk.entries.get(key)

    def num_missing(self, contents: Sequence[Content]) -> int:
        """How many of the contents would have to be copied to keep them all."""
        return sum(not self._is_here(content) for content in contents)

    def save(self, owner: Hashable, contents: Sequence[Content]) -> list[Move] | None:
        """Keep the contents for ``owner`` until it lets go of them. All or nothing.

        Returns:
            The moves that this takes; None, and nothing changes, where there is no room.
        """
        here = {content.key for content in contents if self._is_here(content)}
        stale = {c.key for c in contents if c.key not in here and self.find(c.key) is not None}
        if len(contents) - len(here) > self._room(here) + len(stale):
            return None
        moves = [move for key in stale for move in self.lose(key)]
        self.hold(owner, [content.key for content in contents if content.key in here])
        for content in contents:
            if content.key not in here:
                slot = self._take_slot(moves, for_owner=True)
                assert slot is not None, "what was found to fit does not"
                moves.append(Save(content.key, content.block_id, slot))
                self._enter(content, slot)
                self.hold(owner, [content.key])
        return moves

    def keep(self, content: Content) -> list[Move]:
        """Keep a whole block that the pool is about to give up, if nobody has to make room for it
        but other cached contents.
        """
        if not self.caching:
            return []
        if self.find(content.key) is not None:
            self._touch(content.key)
            return []
        moves: list[Move] = []
        slot = self._take_slot(moves, for_owner=False)
        if slot is not None:
            moves.append(Save(content.key, content.block_id, slot))
            self._enter(content, slot)
        return moves

    def hold(self, owner: Hashable, keys: Sequence[HostKey]) -> None:
        """Keep contents that are here for one owner more."""
        for key in keys:
            entry = self._touch(key)
            entry.owners.add(owner)
            self._level(key).note_owners(entry)
        if keys:
            self._held.setdefault(owner, set()).update(keys)

    def holds(self, owner: Hashable) -> bool:
        """Whether anything is kept for ``owner``."""
        return owner in self._held

    def restore(self, keys: Sequence[HostKey], block_ids: Sequence[int]) -> list[Move]:
        """Copy contents that are here into blocks of the pool; they stay here, too."""
        moves: list[Move] = []
        for key, block_id in zip(keys, block_ids, strict=True):
            entry = self._touch(key)
            if entry.slot is not None:
                moves.append(Load(key, entry.slot, block_id))
            else:
                assert entry.file is not None, "a content lies nowhere"
                moves.append(Read(key, entry.file, block_id))
        return moves

    def release(self, owner: Hashable) -> list[Move]:
        """The owner lets go of all that it holds; unknown owners hold nothing."""
        moves: list[Move] = []
        for key in self._held.pop(owner, ()):
            entry = self.find(key)
            assert entry is not None, "what is held is not here"
            entry.owners.discard(owner)
            self._level(key).note_owners(entry)
            if not entry.owners and (isinstance(key, TailKey) or not self.caching):
                moves.extend(self._drop(entry))
        return moves

    def lose(self, key: HostKey) -> list[Move]:
        """The content cannot be had (any longer): nobody finds or holds it."""
        entry = self.find(key)
        if entry is None:
            return []
        for owner in entry.owners:
            self._held[owner].discard(key)
            if not self._held[owner]:
                del self._held[owner]
        return self._drop(entry)

    def clear_cache(self) -> list[Move]:
        """Forget every content without an owner."""
        return [move for e in list(self) if not e.owners for move in self._drop(e)]

    def _is_here(self, content: Content) -> bool:
        entry = self.find(content.key)
        return entry is not None and entry.num_tokens == content.num_tokens

    def _room(self, but: set[HostKey]) -> int:
        """Contents that can be taken, those of ``but`` kept."""
        levels = (self._memory.cached, self._disk.cached)
        cached = sum(map(len, levels)) - sum(key in level for level in levels for key in but)
        return len(self._free_slots) + len(self._free_files) + cached

    def _touch(self, key: HostKey) -> HostEntry:
        """The content is the most recently used one now."""
        level = self._level(key)
        level.touch(key)
        return level.entries[key]

    def _level(self, key: HostKey) -> _Level:
        """Where a content that is here lies."""
        return self._memory if key in self._memory.entries else self._disk

    def _enter(self, content: Content, slot: int) -> None:
        self._memory.add(HostEntry(content.key, content.num_tokens, slot))

    def _take_slot(self, moves: list[Move], for_owner: bool) -> int | None:
        """A slot to write into; what has to go for it is added to ``moves``."""
        if self._free_slots:
            return self._free_slots.pop()
        entry = self._memory.first_cached()
        if entry is None and for_owner:
            entry = next(iter(self._memory.entries.values()))
        if entry is None:
            return None
        slot, file = entry.slot, self._take_file()
        assert slot is not None, "a content of memory has no slot"
        if file is not None:
            moves.append(Spill(entry.key, slot, file))
            self._memory.remove(entry.key)
            entry.slot, entry.file = None, file
            self._disk.add(entry)
            self.num_spilled += 1
        elif not entry.owners:
            self._memory.remove(entry.key)
            self.num_evictions += 1
        else:
            return None
        return slot

    def _take_file(self) -> int | None:
        """A file to write; the one that a cached content had is simply written again."""
        if self._free_files:
            return self._free_files.pop()
        entry = self._disk.first_cached()
        if entry is None:
            return None
        self._disk.remove(entry.key)
        self.num_evictions += 1
        return entry.file

    def _drop(self, entry: HostEntry) -> list[Move]:
        if entry.slot is not None:
            self._memory.remove(entry.key)
            self._free_slots.append(entry.slot)
            return []
        self._disk.remove(entry.key)
        assert entry.file is not None, "a content of the disk has no file"
        self._free_files.append(entry.file)
        return [Forget(entry.file)]
