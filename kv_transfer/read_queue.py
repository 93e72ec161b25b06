"""The part of a one-sided read that does not depend on the transport.

Owns which block is copied next, how a copied block is verified, and what a fence takes away. Knows
no clock, no socket and no process: a source is a piece of memory that this process can read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.connector import (
    BlockResult,
    Move,
    PeerInfo,
    ReadId,
    ReadStatus,
)
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import Fence, PoolMemory
from kvferry.kv_transfer.targets import Staging, TargetBlocks

# Called with the bytes received, uint8 [the source's block_bytes], before they are verified.
Tamper = Callable[[Move, NDArray[np.uint8]], None]


class BlockSource(Protocol):
    """A peer whose pool lies in memory that this process can read."""

    @property
    def info(self) -> PeerInfo:
        """The source's description; its epoch is the life that may be read."""
        ...

    @property
    def memory(self) -> PoolMemory:
        """The source's bytes and generation words; used only while ``is_open``."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether blocks can still be read."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    read_id: ReadId
    index: int
    move: Move


@dataclass(slots=True)
class _SourceQueue:
    source: BlockSource
    entries: deque[_Entry] = field(default_factory=deque)


class ReadQueue:
    """Reads of several sources into one pool.

    Each source's blocks are read in the order in which they were asked for; sources take turns,
    block by block, so that a long read of one does not hold back another's. A copy is made and
    verified within ``run``: between two calls nothing is in flight, so that ``cancel`` needs only
    to forget what is queued.

    A block is verified in this order, the only safe one::

        epoch of the reference == epoch of the source         else STALE, nothing copied
        copy the bytes, then read the generation word: equal   else STALE
        digest of the copied bytes, if one was given: equal     else CORRUPT

    A target whose block did not end OK holds bytes of no meaning; one that is filled slot by slot,
    from a staging buffer, is not written at all then.

    Attributes:
        tamper: fault injection between copy and verification; None in production.
    """

    def __init__(
        self, memory: PoolMemory, layout: KVCacheLayout, tamper: Tamper | None = None
    ) -> None:
        self.tamper = tamper
        self._targets = TargetBlocks(memory, layout)
        self._staging = Staging()
        self._fence = Fence()
        self._turns: deque[_SourceQueue] = deque()
        self._unfinished: dict[ReadId, int] = {}
        self._next_id = 1

    def __len__(self) -> int:
        """Blocks whose read has not ended."""
        return sum(self._unfinished.values())

    def start(self, source: BlockSource, moves: Sequence[Move]) -> ReadId:
        """Queue the copies of ``moves`` behind the source's earlier ones."""
        read_id = ReadId(self._next_id)
        self._next_id += 1
        if not moves:
            return read_id
        self._unfinished[read_id] = len(moves)
        entries = (_Entry(read_id, index, move) for index, move in enumerate(moves))
        self._queue_of(source).entries.extend(entries)
        return read_id

    def cancel(self, read_id: ReadId) -> None:
        """Forget a read: none of its targets is written and no result reported from now on."""
        self._unfinished.pop(read_id, None)

    def clear(self) -> None:
        """Forget all reads."""
        self._unfinished.clear()
        self._turns.clear()

    def run(self, max_blocks: int, max_bytes: int | None = None) -> list[BlockResult]:
        """Read the next ``max_blocks`` blocks, or the first of them that together have no more
        than ``max_bytes`` bytes, one at least; say how each ended.
        """
        results: list[BlockResult] = []
        num_bytes = 0
        while self._turns and len(results) < max_blocks:
            size = self._turns[0].source.info.layout.block_bytes()
            if max_bytes is not None and results and num_bytes + size > max_bytes:
                break
            queue = self._turns.popleft()
            entry = self._next_entry(queue)
            if entry is None:
                continue
            results.append(self._finish(queue.source, entry))
            num_bytes += size
            if queue.entries:
                self._turns.append(queue)
        return results

    def _queue_of(self, source: BlockSource) -> _SourceQueue:
        for queue in self._turns:
            if queue.source is source:
                return queue
        queue = _SourceQueue(source)
        self._turns.append(queue)
        return queue

    def _next_entry(self, queue: _SourceQueue) -> _Entry | None:
        """The queue's next entry that was not cancelled."""
        while queue.entries:
            entry = queue.entries.popleft()
            if entry.read_id in self._unfinished:
                return entry
        return None

    def _finish(self, source: BlockSource, entry: _Entry) -> BlockResult:
        status = self._read(source, entry.move)
        self._unfinished[entry.read_id] -= 1
        if not self._unfinished[entry.read_id]:
            del self._unfinished[entry.read_id]
        num_bytes = source.info.layout.block_bytes() if status is ReadStatus.OK else 0
        return BlockResult(entry.read_id, entry.index, entry.move, status, num_bytes)

    def _read(self, source: BlockSource, move: Move) -> ReadStatus:
        reference = move.source
        if not source.is_open:
            return ReadStatus.FAILED
        if reference.epoch != source.info.epoch:
            return ReadStatus.STALE
        layout = source.info.layout
        if not 0 <= reference.block_id < source.memory.num_blocks:
            return ReadStatus.FAILED
        if not self._targets.accepts(move, layout):
            return ReadStatus.FAILED
        received = (
            self._staging.room(source.memory.block_bytes)
            if move.runs
            else self._targets.whole(move)
        )
        np.copyto(received, source.memory.blocks[reference.block_id])
        if self.tamper is not None:
            self.tamper(move, received)
        self._fence()
        if int(source.memory.generations[reference.block_id]) != reference.generation:
            return ReadStatus.STALE
        if move.digest is not None and block_digest(received) != move.digest:
            return ReadStatus.CORRUPT
        self._targets.place(move, received, layout)
        return ReadStatus.OK
