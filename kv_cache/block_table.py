"""Block tables: which block holds which position of a sequence, and how tables grow.

``BlockTable`` is one sequence's map; ``KVCacheManager`` grows and frees tables out of a pool.
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


class KVCacheManager:
    """Grows, seals and frees block tables out of one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that ``table`` lacks to hold ``num_tokens`` positions (copies not counted)."""
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids))

    def allocate(
        self,
        table: BlockTable,
        num_computed_tokens: int,
        num_tokens: int,
        num_lookahead_tokens: int = 0,
    ) -> list[tuple[int, int]] | None:
        """Make room to write positions ``num_computed_tokens .. num_tokens - 1``.

        A sealed block that the write would append to is reopened if the sequence owns it alone,
        else copied. All or nothing.

        Returns:
            (source, target) block copies to make before the write; None when too few are free.
        """
        needed = self.blocks_needed(table, num_tokens + num_lookahead_tokens)
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
            self.pool.release([source])
        elif appends:
            self.pool.reopen(table.block_ids[index])
        if appends:
            table.num_sealed = min(table.num_sealed, index)
        table.block_ids.extend(fresh)
        return copies

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
            block_hash = hashes.at(index, token_ids, num_computed_tokens)
            self.pool.seal(block_id, filled, block_hash)
            table.num_sealed += 1
            sealed.append(SealedBlock(start, block_id, filled))
        return sealed

    def has_freeable_block(self, table: BlockTable) -> bool:
        """Whether freeing the table would give at least one block back now."""
        return any(self.pool.can_reopen(block_id) for block_id in table.block_ids)

    def free(self, table: BlockTable) -> None:
        """Give back the table's references; a freed table is empty, so twice is harmless."""
        block_ids, table.block_ids = table.block_ids, []
        table.num_sealed = 0
        self.pool.release(block_ids)
