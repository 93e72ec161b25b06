"""Reads peers' blocks into a device pool: another connector reads them into slots, and each is
copied in when it has been verified.

Each block of a read passes through ::

    QUEUED (no slot is free) → READING (by the connector, into a slot) → COPYING → ended
      a block is reported OK when the event behind its copy says that it is done; one whose read
      ended otherwise is reported at once, and its slot given back

so what the own pool gets has been verified, and what is reported OK can be computed with.

``cancel`` fences: no block is taken from the queue any more, the connector is fenced, and copies
into the own pool that are under way are waited for, which is the one place where the host waits for
the device: a few blocks at the speed of the bus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvferry.kv_transfer.connector import (
    BlockResult,
    IncompatiblePeer,
    KVConnector,
    Move,
    Peer,
    PeerInfo,
    ReadId,
    ReadStatus,
)
from kvferry.kv_transfer.digest import block_digest
from kvferry.worker.staging.device_pool import DevicePool
from kvferry.worker.staging.slots import Slots


@dataclass(frozen=True, slots=True)
class _Queued:
    """A block of a read that has no slot yet."""

    read_id: ReadId
    index: int
    move: Move


@dataclass(slots=True)
class _Staged:
    """A block that has a slot: being read into it, or, with a result, being copied out of it."""

    queued: _Queued
    peer: Peer
    slot: int
    result: BlockResult | None = None


@dataclass(slots=True)
class _PeerQueue:
    """What is to be read of one source, in order, and how many slots it has."""

    peer: Peer
    waiting: deque[_Queued] = field(default_factory=deque)
    num_slots: int = 0


class StagingConnector:
    """``KVConnector`` over a device pool. Owns ``inner`` and the slots.

    Sources take turns, block by block, and none has more than half of the slots, so that one that
    stands still does not hold back the others. Blocks of another size than the own ones are
    refused: slots of positions cannot be copied one by one.

    Args:
        inner: reads into the pool of slots.
        pool: where the blocks go.
        slots: those for reading.
        on_close: called once, before ``inner`` is closed and its memory goes.
    """

    def __init__(
        self,
        inner: KVConnector,
        pool: DevicePool,
        slots: Slots,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._slots = slots
        self._most_per_peer = max(1, slots.num_slots // 2)
        self._turns: deque[_PeerQueue] = deque()
        self._unfinished: dict[ReadId, int] = {}
        self._reading: dict[ReadId, _Staged] = {}  # by the inner connector's id
        self._copying: list[_Staged] = []
        self._refused: list[_Queued] = []
        self._next_id = 1
        self._on_close: Callable[[], None] | None = on_close

    def local_info(self) -> PeerInfo:
        """This worker's own description: that of its slots."""
        return self._inner.local_info()

    def refused(self) -> Counter[str]:
        """The inner connector's refusals."""
        return self._inner.refused()

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes; waits for them to come from the device."""
        return block_digest(self._pool.block(block_id).cpu().numpy())

    def connect(self, info: PeerInfo) -> Peer:
        """Open a source. Raises IncompatiblePeer (naming both values) or TransferFailed."""
        here, there = self.local_info().layout.block_size, info.layout.block_size
        if here != there:
            raise IncompatiblePeer(
                f"worker {info.worker_id} (epoch {info.epoch}) cannot be read into a pool on a "
                f"GPU: block_size is {there} there, {here} here. Give both roles one block size"
            )
        return self._inner.connect(info)

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies; they begin at the next poll. Raises TransferFailed for a foreign
        peer.
        """
        self._inner.start_read(peer, [])  # refuses what is not its own, or if it is closed
        read_id = ReadId(self._next_id)
        self._next_id += 1
        if not moves:
            return read_id
        self._unfinished[read_id] = len(moves)
        queue = self._queue_of(peer)
        for index, move in enumerate(moves):
            queued = _Queued(read_id, index, move)
            fits = not move.runs and move.target in self._pool
            (queue.waiting if fits else self._refused).append(queued)
        return read_id

    def poll(self, now: float) -> list[BlockResult]:
        """Give free slots to what waits, let the connector read, begin copies, and report."""
        refused, self._refused = self._refused, []
        results = [self._failed(queued) for queued in refused]
        self._fill_slots()
        for found in self._inner.poll(now):
            results += self._take(found)
        copying, self._copying = self._copying, []
        for staged in copying:
            if self._slots.is_copied(staged.slot):
                results.append(self._end(staged))
            else:
                self._copying.append(staged)
        return results

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read; see the module. Unknown ids are ignored."""
        if self._unfinished.pop(read_id, None) is None:
            return
        self._refused = [queued for queued in self._refused if queued.read_id != read_id]
        for queue in self._turns:
            queue.waiting = deque(q for q in queue.waiting if q.read_id != read_id)
        mine = [i for i, staged in self._reading.items() if staged.queued.read_id == read_id]
        for inner_id in mine:
            self._inner.cancel(inner_id)
            self._free(self._reading.pop(inner_id))
        for staged in [s for s in self._copying if s.queued.read_id == read_id]:
            self._slots.wait(staged.slot)
            self._copying.remove(staged)
            self._free(staged)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: peers read slots, which are the publisher's to withdraw."""

    def close(self) -> None:
        """Wait for the copies under way, then close the inner connector; idempotent."""
        self._slots.close()
        for kept in (self._unfinished, self._reading, self._copying, self._refused, self._turns):
            kept.clear()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
        self._inner.close()

    def _queue_of(self, peer: Peer) -> _PeerQueue:
        for queue in self._turns:
            if queue.peer is peer:
                return queue
        queue = _PeerQueue(peer)
        self._turns.append(queue)
        return queue

    def _fill_slots(self) -> None:
        """Sources take turns as long as there are slots."""
        idle = 0
        while self._turns and idle < len(self._turns) and self._slots.num_free:
            queue = self._turns[0]
            self._turns.rotate(-1)
            if not queue.waiting or queue.num_slots >= self._most_per_peer:
                idle += 1
                continue
            idle = 0
            self._read(queue)
        self._turns = deque(q for q in self._turns if q.waiting or q.num_slots)

    def _read(self, queue: _PeerQueue) -> None:
        """Read the next block of a source into a slot."""
        slot = self._slots.take()
        assert slot is not None
        queued = queue.waiting.popleft()
        inner_id = self._inner.start_read(queue.peer, [replace(queued.move, target=slot)])
        queue.num_slots += 1
        self._reading[inner_id] = _Staged(queued, queue.peer, slot)

    def _take(self, found: BlockResult) -> list[BlockResult]:
        """A block has been read into its slot, or could not be; what there is to report."""
        staged = self._reading.pop(found.read_id, None)
        if staged is None:
            return []  # reported before
        staged.result = found
        if found.status is not ReadStatus.OK:
            return [self._end(staged)]
        self._slots.copy_in(staged.slot, self._pool.block(staged.queued.move.target))
        self._copying.append(staged)
        return []

    def _end(self, staged: _Staged) -> BlockResult:
        assert staged.result is not None
        self._free(staged)
        queued = staged.queued
        self._ended(queued.read_id)
        return replace(staged.result, read_id=queued.read_id, index=queued.index, move=queued.move)

    def _failed(self, queued: _Queued) -> BlockResult:
        self._ended(queued.read_id)
        return BlockResult(queued.read_id, queued.index, queued.move, ReadStatus.FAILED, 0)

    def _ended(self, read_id: ReadId) -> None:
        self._unfinished[read_id] -= 1
        if not self._unfinished[read_id]:
            del self._unfinished[read_id]

    def _free(self, staged: _Staged) -> None:
        self._slots.give_back(staged.slot)
        for queue in self._turns:
            if queue.peer is staged.peer:
                queue.num_slots -= 1
