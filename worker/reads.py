"""The worker's running reads: which role waits for which block, and who owns the targets.

Until a read of a block is complete or fenced its target belongs to the transfer, whatever
becomes of the request. Knows the connector and the pool; does not know why a block is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.kv_cache.audit import Owner, OwnerKind
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_transfer.connector import BlockResult, KVConnector, Move, Peer, ReadId

OnBlock = Callable[[BlockResult, float], None]


@dataclass(slots=True)
class _Read:
    """A running read and the moves of it that have not ended, by index."""

    request_id: str
    attempt: int
    peer: str
    on_block: OnBlock
    pending: dict[int, Move] = field(default_factory=dict)


class Reads:
    """All running reads of one worker."""

    def __init__(self, connector: KVConnector, pool: BlockPool) -> None:
        self._connector = connector
        self._pool = pool
        self._reads: dict[ReadId, _Read] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def start(
        self, peer: Peer, moves: Sequence[Move], request_id: str, attempt: int, on_block: OnBlock
    ) -> ReadId:
        """Begin to read blocks; ``on_block`` hears of each block's end. Raises TransferFailed."""
        read_id = self._connector.start_read(peer, moves)  # no byte moves before the next poll
        for target in _targets(moves):
            self._pool.begin_transfer(target)
        self._reads[read_id] = _Read(
            request_id, attempt, peer.info.worker_id, on_block, dict(enumerate(moves))
        )
        return read_id

    def poll(self, clock: Callable[[], float]) -> int:
        """Let reads progress; returns the number of blocks that ended.

        Results carry the time at which the copies were made and verified, not when they began.
        """
        if not self._reads:
            return 0
        results = self._connector.poll(clock())
        now = clock()
        ended = 0
        for result in results:
            read = self._reads.get(result.read_id)
            if read is None or read.pending.pop(result.index, None) is None:
                continue  # cancelled since, or reported twice
            ended += 1
            for target in result.move.targets:
                self._pool.end_transfer(target)
            if not read.pending:
                del self._reads[result.read_id]
            read.on_block(result, now)
        return ended

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read and give its targets back; unknown or ended ones are ignored."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return
        self._connector.cancel(read_id)
        for target in _targets(read.pending.values()):
            self._pool.end_transfer(target)

    def owners(self) -> Iterator[Owner]:
        """The blocks that running reads write into, for the audit."""
        for read in self._reads.values():
            for target in _targets(read.pending.values()):
                yield Owner(OwnerKind.WRITER, target, read.request_id, read.attempt, read.peer)


def _targets(moves: Iterable[Move]) -> Iterator[int]:
    """The blocks that moves write into: as often as there are moves that do."""
    return (target for move in moves for target in move.targets)
