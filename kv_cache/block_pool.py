"""The block pool: every block of one worker, who owns it, and which life it is in.

A block can be taken only when no owner is left: no request table references it, no lease pins it
and no running read moves bytes into it. One that the prefix index leads to keeps its content
meanwhile (**cached**): those are taken last, the least recently used first. Every allocation raises
the block's **generation**; whoever names an old one is stale. The pool decides and counts; it does
not know where the bytes lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.hashing import BlockHash, Mark
from kvferry.kv_cache.prefix_index import PrefixIndex


class BlockAccountingError(KVFerryError):
    """An owner gave back what it did not hold, or wrote where it may not: a bug, named by block."""


class OutOfBlocks(KVFerryError):
    """Fewer free blocks than asked for; names both numbers."""


class BlockState(Enum):
    """OPEN: one request writes it. SEALED: its step has completed; never written again."""

    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"


@dataclass(slots=True)
class Durations:
    """How many there were, and how many seconds they took together."""

    count: int = 0
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.total_s += seconds

    @property
    def mean_s(self) -> float | None:
        """Their mean; None before the first."""
        return self.total_s / self.count if self.count else None


@dataclass(slots=True)
class KVCacheBlock:
    """One block's book-keeping. Only ``BlockPool`` changes it.

    Attributes:
        generation: number of times the block's content began anew.
        ref_count: request tables that list the block.
        num_pins: leases that keep it readable for a peer.
        num_transfers: running reads that write into it.
        num_tokens: filled slots, once sealed.
        block_hash: chain hash, once sealed with one.
        quarantined: a read into it could not be fenced; never used again.
        moved: its content came from a peer; not from computing here, nor from the host tier.
        filled_at: when its present content began.
        idle_at: since when nobody has owned it, if it is cached.
    """

    block_id: int
    generation: int = 0
    state: BlockState = BlockState.FREE
    ref_count: int = 0
    num_pins: int = 0
    num_transfers: int = 0
    num_tokens: int = 0
    block_hash: BlockHash | None = None
    quarantined: bool = False
    moved: bool = False
    filled_at: float = 0.0
    idle_at: float = 0.0

    @property
    def is_owned(self) -> bool:
        """Whether any owner is left."""
        return bool(self.ref_count or self.num_pins or self.num_transfers)


class BlockPool:
    """Free list, cached blocks in eviction order, and the owners' counts.

    Args:
        num_blocks: blocks in the pool.
        raise_word: called with (block id, generation) before anyone may write the block's next
            life, to publish the generation where readers in other processes see it.
        index: where sealed blocks are entered, so that they can be found again; None: nowhere.
        clock: seconds, monotonic, for how long blocks live.

    Attributes:
        on_evict: called with a cached block that is about to be taken for something else, its
            content still there; None: nobody wants to know.
        num_evictions: cached blocks taken for something else.
        lifetimes: from a block's allocation to the end of its content.
        idle_times: from the moment that a block is cached to its next use or its eviction.
    """

    def __init__(
        self,
        num_blocks: int,
        raise_word: Callable[[int, int], None] | None = None,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, wanted at least 1")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self._num_quarantined = 0
        self._raise_word = raise_word
        self.index = index
        self.num_evictions = 0
        self.lifetimes = Durations()
        self.idle_times = Durations()
        self._clock = clock
        self.on_evict: Callable[[KVCacheBlock], None] | None = None
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()  # these three for counting by class only
        self._in_transfer: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, whatever their state."""
        return len(self.blocks)

    @property
    def num_usable(self) -> int:
        """Blocks that may ever be taken: all but quarantined ones."""
        return len(self.blocks) - self._num_quarantined

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: without any owner, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix index holds."""
        return len(self._cached)

    def count_classes(self) -> dict[str, int]:
        """Blocks by class, each under its strongest owner, as ``kv_cache.audit`` defines them.

        Takes as long as there are pins and running reads, not blocks.
        """
        unreferenced = [
            block
            for block_id in self._pinned | self._in_transfer
            if not (block := self.blocks[block_id]).ref_count and not block.quarantined
        ]
        in_transfer = sum(bool(block.num_transfers) for block in unreferenced)
        counts = {
            "in_transfer": in_transfer,
            "pinned": len(unreferenced) - in_transfer,
            "cached": len(self._cached),
            "free": len(self._free),
            "quarantined": len(self._quarantined),
        }
        return {"referenced": self.num_blocks - sum(counts.values()), **counts}

    def is_free(self, block_id: int) -> bool:
        """Whether the block can be taken, its content forgotten."""
        return block_id in self._free or block_id in self._cached

    def is_cached(self, block_id: int) -> bool:
        """Whether only the prefix index holds the block."""
        return block_id in self._cached

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, OPEN, each with one reference and a new generation.

        All or nothing: raises OutOfBlocks and takes none when fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        taken = [self._take() for _ in range(count)]
        for block_id in taken:
            block = self.blocks[block_id]
            self._raise_generation(block)
            block.ref_count = 1
        return taken

    def _take(self) -> int:
        if self._free:
            return self._free.popitem(last=False)[0]
        block_id, _ = self._cached.popitem(last=False)
        if self.on_evict is not None:
            self.on_evict(self.blocks[block_id])
        self._forget(block_id)
        self._uncached(self.blocks[block_id])
        self._ends(self.blocks[block_id])
        self.num_evictions += 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a sealed block; an open one belongs to its only writer."""
        block = self.blocks[block_id]
        if block.state is not BlockState.SEALED:
            raise BlockAccountingError(f"block {block_id} is shared while {block.state.value}")
        self._use(block)
        block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block, given in table order; the tail is freed first."""
        for block_id in reversed(list(block_ids)):
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise BlockAccountingError(f"block {block_id} is released but not referenced")
            block.ref_count -= 1
            self._free_if_unowned(block)

    def pin(self, block_id: int) -> None:
        """Keep a sealed block readable for a lease."""
        block = self.blocks[block_id]
        if block.state is not BlockState.SEALED:
            raise BlockAccountingError(f"block {block_id} is pinned while {block.state.value}")
        self._use(block)
        block.num_pins += 1
        self._pinned.add(block_id)

    def unpin(self, block_id: int) -> None:
        """Drop a lease's pin."""
        block = self.blocks[block_id]
        if block.num_pins < 1:
            raise BlockAccountingError(f"block {block_id} is unpinned but not pinned")
        block.num_pins -= 1
        if not block.num_pins:
            self._pinned.discard(block_id)
        self._free_if_unowned(block)

    def begin_transfer(self, block_id: int) -> None:
        """A read starts to write into the block; it stays owned until ``end_transfer``."""
        block = self.blocks[block_id]
        if block.state is not BlockState.OPEN:
            raise BlockAccountingError(f"block {block_id} is a read's target while not open")
        block.num_transfers += 1
        self._in_transfer.add(block_id)

    def end_transfer(self, block_id: int) -> None:
        """The read has ended or is fenced: no byte arrives from it any more."""
        block = self.blocks[block_id]
        if block.num_transfers < 1:
            raise BlockAccountingError(f"block {block_id} ends a transfer that never began")
        block.num_transfers -= 1
        if not block.num_transfers:
            self._in_transfer.discard(block_id)
        self._free_if_unowned(block)

    def seal(
        self,
        block_id: int,
        num_tokens: int,
        block_hash: BlockHash | None = None,
        marks: Sequence[Mark] = (),
        moved: bool = False,
    ) -> None:
        """The step or read that filled the block has completed; it is not written again.

        It can be found from now on under those of ``marks`` that no other block is found under.
        ``moved``: a peer's content.
        """
        block = self.blocks[block_id]
        if block.state is not BlockState.OPEN:
            raise BlockAccountingError(f"block {block_id} is sealed while {block.state.value}")
        if block.num_transfers:
            raise BlockAccountingError(f"block {block_id} is sealed while a read writes into it")
        block.state = BlockState.SEALED
        block.num_tokens = num_tokens
        block.block_hash = block_hash
        block.moved = moved
        if self.index is not None and marks and not block.quarantined:
            self.index.add(block_id, marks)

    def is_held_once(self, block_id: int) -> bool:
        """Whether one reference is all that keeps the block, so that dropping it gives the block
        back. Never of a quarantined block.
        """
        block = self.blocks[block_id]
        alone = block.ref_count == 1 and not block.num_pins and not block.num_transfers
        return alone and not block.quarantined

    def can_reopen(self, block_id: int) -> bool:
        """Whether appending to the block, once sealed, disturbs nobody: it is held once, and
        nobody can find it.
        """
        found = self.index is not None and block_id in self.index
        return self.is_held_once(block_id) and not found

    def reopen(self, block_id: int) -> None:
        """Begin a new life of a sealed block with its content kept, to append to it."""
        state = self.blocks[block_id].state
        if state is not BlockState.SEALED:
            raise BlockAccountingError(f"block {block_id} is reopened while {state.value}")
        if not self.can_reopen(block_id):
            raise BlockAccountingError(f"block {block_id} is reopened while shared or pinned")
        self._raise_generation(self.blocks[block_id])

    def used(self, blocks: Sequence[tuple[int, int]]) -> None:
        """A sequence's blocks, as (id, generation) in table order, were of use until now.

        Those that are cached, and in that life, are taken after all others, the tail first:
        leases let go of blocks in the order in which they are read, which is from the head.
        """
        for block_id, generation in reversed(blocks):
            if block_id in self._cached and self.blocks[block_id].generation == generation:
                self._cached.move_to_end(block_id)

    def quarantine(self, block_id: int) -> None:
        """Never use the block again in this process: a read into it may still be running."""
        self._num_quarantined += not self.blocks[block_id].quarantined
        self.blocks[block_id].quarantined = True
        self._quarantined.add(block_id)
        self._forget(block_id)
        self._free.pop(block_id, None)
        self._cached.pop(block_id, None)

    def _raise_generation(self, block: KVCacheBlock) -> None:
        block.generation += 1
        if self._raise_word is not None:
            self._raise_word(block.block_id, block.generation)
        block.state = BlockState.OPEN
        block.num_tokens = 0
        block.block_hash = None
        block.moved = False
        block.filled_at = self._clock()

    def _free_if_unowned(self, block: KVCacheBlock) -> None:
        if block.is_owned or block.quarantined:
            return
        if self.index is not None and block.block_id in self.index:
            self._cached[block.block_id] = None
            block.idle_at = self._clock()
            return
        self._ends(block)
        self._free[block.block_id] = None

    def _use(self, block: KVCacheBlock) -> None:
        """Somebody owns the block again, if nobody did."""
        if block.block_id in self._cached:
            del self._cached[block.block_id]
            self._uncached(block)

    def _uncached(self, block: KVCacheBlock) -> None:
        self.idle_times.add(self._clock() - block.idle_at)

    def _ends(self, block: KVCacheBlock) -> None:
        """The block's content ends."""
        block.state = BlockState.FREE
        self.lifetimes.add(self._clock() - block.filled_at)

    def _forget(self, block_id: int) -> None:
        """Nobody finds the block any longer."""
        if self.index is not None:
            self.index.drop(block_id)

    def clear_cache(self) -> int:
        """Forget every cached block; returns how many. Blocks with an owner stay found."""
        count = len(self._cached)
        if self.index is not None and count == self.num_blocks - len(self._free):
            self.index.clear()  # nothing has an owner: one event says it all
        while self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
            self._uncached(self.blocks[block_id])
            self._free_if_unowned(self.blocks[block_id])
        return count
