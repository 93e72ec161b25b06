"""Block tables: which block holds which position of a sequence, and how tables grow.

``BlockTable`` is one sequence's map; ``KVCacheManager`` grows and frees tables out of a pool, and
begins them with blocks that the prefix index finds.
Neither touches bytes: block copies are returned as (source, target) pairs for others to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_cache.hashing import HashChain


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence in position order.

    Invariant: position p lies in ``block_ids[p // block_size]``, slot ``p % block_size``; blocks
    before ``num_sealed`` are SEALED. The list only grows: whoever changes or drops an entry puts
    a new list in its place, so who has read the list once needs to read its end only.
    """

    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_sealed: int = 0
    copied_from: list[int] = field(default_factory=list)
    """Sources of copies that have not been made yet, kept from being written meanwhile."""

    @property
    def held_ids(self) -> list[int]:
        """Every block that the table refers to."""
        return [*self.block_ids, *self.copied_from] if self.copied_from else self.block_ids

    @property
    def capacity(self) -> int:
        """Positions that the table's blocks can hold."""
        return len(self.block_ids) * self.block_size

    def slot(self, position: int) -> int:
        """Slot number (``block_id * block_size + offset``) of a position."""
        block, offset = divmod(position, self.block_size)
        return self.block_ids[block] * self.block_size + offset

    def slot_mapping(self, start: int, count: int) -> list[int]:
        """Slot numbers of positions ``start .. start + count - 1``."""
        return [self.slot(position) for position in range(start, start + count)]


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block that has just been sealed: its first position, id and filled slots."""

    start: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV that is here already: the blocks, and how many leading tokens they hold."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


class KVCacheManager:
    """Begins, grows, seals and frees block tables out of one pool.

    Attributes:
        num_copies: blocks copied because a sequence wrote where others read.
        queried_tokens: tokens whose KV was looked for by those that began.
        hit_tokens_local, hit_tokens_moved: those found in the pool, in blocks that were computed
            here (or copied back from the host tier), and in blocks that a peer's came into.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_copies = 0
        self.queried_tokens = 0
        self.hit_tokens_local = 0
        self.hit_tokens_moved = 0

    def find_prefix(
        self, hashes: HashChain, token_ids: Sequence[int], num_tokens: int | None = None
    ) -> Prefix:
        """The longest part of the first ``num_tokens`` tokens (None: all) whose KV is here.

        It ends at a match unit, or at the last token. Nobody owns it yet: ``adopt`` it before
        anything is allocated.
        """
        index = self.pool.index
        if index is None:
            return Prefix()
        length = len(token_ids) if num_tokens is None else num_tokens
        block_ids: list[int] = []
        found = 0
        while found < length:
            end = min(found + hashes.unit, length)
            entry = index.find(hashes.value_at(end, token_ids))
            if entry is None:
                break
            del block_ids[(end - 1) // self.block_size :]  # a fuller one of the same place
            block_ids.append(entry.block_id)
            found = end
        return Prefix(tuple(block_ids), found)

    def num_cached(self, prefix: Prefix) -> int:
        """Blocks of a prefix that adopting it takes out of those that are free to take."""
        return sum(self.pool.is_cached(block_id) for block_id in prefix.block_ids)

    def whole_blocks(self, prefix: Prefix) -> Prefix:
        """A prefix less what its last block holds, if that is not full."""
        count = prefix.num_tokens // self.block_size
        return Prefix(prefix.block_ids[:count], count * self.block_size)

    def without_last_block(self, prefix: Prefix) -> Prefix:
        """A prefix less what its last block holds."""
        kept = prefix.block_ids[:-1]
        return Prefix(kept, len(kept) * self.block_size)

    def adopt(self, table: BlockTable, prefix: Prefix, num_queried: int | None = 0) -> None:
        """Begin an empty table with a prefix, which it shares.

        It was found of ``num_queried`` tokens; None: neither these nor what was found is counted.
        """
        assert not table.block_ids, "only an empty table can begin with a prefix"
        counts = num_queried is not None
        self.queried_tokens += num_queried or 0
        for place, block_id in enumerate(prefix.block_ids):
            self.pool.share(block_id)
            found = min(self.block_size, prefix.num_tokens - place * self.block_size)
            if not counts:
                continue
            if self.pool.blocks[block_id].moved:
                self.hit_tokens_moved += found
            else:
                self.hit_tokens_local += found
        table.block_ids = list(prefix.block_ids)
        table.num_sealed = len(prefix.block_ids)

    def fork(
        self, table: BlockTable, num_tokens: int, tail: int | None
    ) -> tuple[BlockTable, list[tuple[int, int]]]:
        """A second table with the first ``num_tokens`` positions of a table, all of them computed.

        Full blocks, which are sealed, are shared. Where the last block is partial, ``tail``, an
        open block that the caller has allocated, takes its place and its reference passes to the
        new table.

        Returns:
            the table, and the (source, target) copies to make before either is written.
        """
        whole, partial = divmod(num_tokens, self.block_size)
        assert table.num_sealed >= whole, "what is forked is still written"
        assert (tail is not None) == bool(partial), "a tail is for a partial block"
        for block_id in table.block_ids[:whole]:
            self.pool.share(block_id)
        forked = BlockTable(self.block_size, table.block_ids[:whole], whole)
        if tail is None:
            return forked, []
        forked.block_ids.append(tail)
        self.num_copies += 1
        return forked, [(table.block_ids[whole], tail)]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that ``table`` lacks to hold ``num_tokens`` positions (copies not counted)."""
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids))

    def needs_copy(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether to write at the next position is to copy the block that it lies in."""
        index = num_computed_tokens // self.block_size
        if index >= len(table.block_ids):
            return False
        block_id = table.block_ids[index]
        sealed = self.pool.blocks[block_id].state is BlockState.SEALED
        return sealed and not self.pool.can_reopen(block_id)

    def allocate(
        self,
        table: BlockTable,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> list[tuple[int, int]] | None:
        """Make room to write positions ``num_computed_tokens .. num_tokens - 1``.

        A sealed block that the write would append to is reopened if the sequence owns it alone,
        else copied. All or nothing.

        Returns:
            (source, target) block copies to make before the write; None when too few are free.
            The table holds the sources until ``copies_made``.
        """
        needed = self.blocks_needed(table, num_tokens)
        index = num_computed_tokens // self.block_size
        appends = (
            num_tokens > num_computed_tokens
            and index < len(table.block_ids)
            and self.pool.blocks[table.block_ids[index]].state is BlockState.SEALED
        )
        if not needed and not appends:
            return []  # the common case of a decode step
        copy = appends and not self.pool.can_reopen(table.block_ids[index])
        if needed + copy > self.pool.num_free:
            return None
        fresh = self.pool.allocate(needed + copy)
        copies: list[tuple[int, int]] = []
        if copy:
            source, target = table.block_ids[index], fresh.pop()
            table.block_ids = [*table.block_ids[:index], target, *table.block_ids[index + 1 :]]
            copies.append((source, target))
            self.num_copies += 1
            table.copied_from.append(source)
        elif appends:
            self.pool.reopen(table.block_ids[index])
        if appends:
            table.num_sealed = min(table.num_sealed, index)
        table.block_ids.extend(fresh)
        return copies

    def copies_made(self, table: BlockTable) -> None:
        """The copies that ``allocate`` asked for have been made: their sources are let go of."""
        if table.copied_from:
            sources, table.copied_from = table.copied_from, []
            self.pool.release(sources)

    def seal(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        hashes: HashChain,
        include_partial: bool = False,
    ) -> list[SealedBlock]:
        """Seal the blocks that computation has filled; with ``include_partial`` the last too.

        Call when the step has completed on the device. ``token_ids`` are the sequence's tokens
        from position 0, at least ``num_computed_tokens`` of them.
        """
        sealed: list[SealedBlock] = []
        if not include_partial and (table.num_sealed + 1) * self.block_size > num_computed_tokens:
            return sealed  # the common case of a decode step
        while table.num_sealed * self.block_size < num_computed_tokens:
            index = table.num_sealed
            start = index * self.block_size
            filled = min(self.block_size, num_computed_tokens - start)
            if filled < self.block_size and not include_partial:
                break
            block_id = table.block_ids[index]
            marks = hashes.marks(index, start + filled, token_ids)
            self.pool.seal(block_id, filled, marks[-1].value, marks)
            table.num_sealed += 1
            sealed.append(SealedBlock(start, block_id, filled))
        return sealed

    def has_freeable_block(self, table: BlockTable) -> bool:
        """Whether freeing the table would give at least one block back now."""
        return any(self.pool.is_held_once(block_id) for block_id in table.held_ids)

    def has_shared_block(self, table: BlockTable) -> bool:
        """Whether another table lists a block of this one too."""
        return any(self.pool.blocks[block_id].ref_count > 1 for block_id in table.held_ids)

    def free(self, table: BlockTable) -> None:
        """Give back the table's references; a freed table is empty, so twice is harmless."""
        block_ids, table.block_ids, table.copied_from = table.held_ids, [], []
        table.num_sealed = 0
        self.pool.release(block_ids)
