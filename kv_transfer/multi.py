"""Several connectors over one pool, each pair of workers using the one that suits it.

Owns which connector serves which peer; ``choosing`` says which and why, the connectors do the
rest. A worker describes itself with one endpoint per connector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.kv_transfer.choosing import AUTO, Choice, choose, endpoints_of, through
from kvferry.kv_transfer.connector import (
    BlockResult,
    Move,
    Peer,
    PeerInfo,
    ReadId,
    TransferFailed,
)
from kvferry.kv_transfer.faults import TamperableConnector
from kvferry.kv_transfer.memory import PoolMemory
from kvferry.kv_transfer.read_queue import Tamper


class MultiPeer:
    """A source, reached by the connector that was chosen for it.

    Attributes:
        inner: that connector's own peer.
        connector, reason: which one, and why.
    """

    def __init__(self, inner: Peer, choice: Choice) -> None:
        self.inner = inner
        self.connector = choice.connector
        self.reason = choice.reason

    @property
    def info(self) -> PeerInfo:
        """What the source said of itself, as the chosen connector sees it."""
        return self.inner.info

    @property
    def setup_s(self) -> float:
        """Seconds that opening the connection took."""
        return self.inner.setup_s

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known, blocks can be read."""
        return self.inner.is_open

    def close(self) -> None:
        """Drop the connection; its unfinished reads end FAILED."""
        self.inner.close()


@dataclass(slots=True)
class _Read:
    """A read under its connector's own id, and its blocks that have not ended."""

    connector: str
    inner_id: ReadId
    unfinished: int


class MultiConnector:
    """``KVConnector`` that delegates, per peer, to one of ``connectors``.

    Owns the connectors and ``memory``, the one pool that all of them serve; they must not own it
    themselves. Their order is that of the endpoints; the first is the one that peers see who know
    of no endpoints.
    """

    def __init__(
        self,
        memory: PoolMemory,
        connectors: Sequence[TamperableConnector],
        configured: str = AUTO,
    ) -> None:
        """``configured`` is ``auto`` or the name of the connector to use for every peer."""
        if not connectors:
            raise TransferFailed("a worker needs at least one connector, got none")
        self._memory = memory
        self._configured = configured
        self._connectors = {c.local_info().connector: c for c in connectors}
        self._reads: dict[ReadId, _Read] = {}
        self._ids: dict[tuple[str, ReadId], ReadId] = {}
        self._next_id = 1
        infos = [connector.local_info() for connector in connectors]
        every = tuple(endpoint for info in infos for endpoint in endpoints_of(info))
        self._info = replace(infos[0], endpoints=every)

    @property
    def parts(self) -> tuple[TamperableConnector, ...]:
        """The connectors, in the order of the endpoints."""
        return tuple(self._connectors.values())

    @property
    def tamper(self) -> Tamper | None:
        """Fault injection between copy and verification; None in production."""
        return next(iter(self._connectors.values())).tamper

    @tamper.setter
    def tamper(self, tamper: Tamper | None) -> None:
        for connector in self._connectors.values():
            connector.tamper = tamper

    def local_info(self) -> PeerInfo:
        """This worker's own description, with every endpoint."""
        return self._info

    def refused(self) -> Counter[str]:
        """Readers that any of them has refused, by reason."""
        return sum((each.refused() for each in self._connectors.values()), Counter[str]())

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes."""
        return next(iter(self._connectors.values())).digest(block_id)

    def connect(self, info: PeerInfo) -> MultiPeer:
        """Open a source by the connector that suits it. Raises IncompatiblePeer, also if none
        does, or TransferFailed.
        """
        choice = choose(self._info.host_id, self._connectors, self._configured, info)
        connector = self._connectors[choice.connector]
        return MultiPeer(connector.connect(through(info, choice.connector)), choice)

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies. Raises TransferFailed for a foreign peer."""
        if not isinstance(peer, MultiPeer):
            raise TransferFailed(
                f"cannot read worker {peer.info.worker_id} through this connector: connect to it "
                "with the same, open connector first"
            )
        inner_id = self._connectors[peer.connector].start_read(peer.inner, moves)
        read_id = ReadId(self._next_id)
        self._next_id += 1
        if moves:
            self._reads[read_id] = _Read(peer.connector, inner_id, len(moves))
            self._ids[peer.connector, inner_id] = read_id
        return read_id

    def poll(self, now: float) -> list[BlockResult]:
        """Let every connector progress; each has its own budget."""
        return [
            self._translate(name, result)
            for name, connector in self._connectors.items()
            for result in connector.poll(now)
        ]

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read."""
        read = self._reads.get(read_id)
        if read is not None:
            self._connectors[read.connector].cancel(read.inner_id)
            self._forget(read_id)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Tell every connector."""
        for connector in self._connectors.values():
            connector.withdraw(block_ids)

    def close(self) -> None:
        """Close the connectors, then the memory that they served; idempotent."""
        for connector in self._connectors.values():
            connector.close()
        self._reads.clear()
        self._ids.clear()
        self._memory.close()

    def _translate(self, name: str, result: BlockResult) -> BlockResult:
        """A connector's result under the id that the caller knows."""
        read_id = self._ids[name, result.read_id]
        read = self._reads[read_id]
        read.unfinished -= 1
        if not read.unfinished:
            self._forget(read_id)
        return replace(result, read_id=read_id)

    def _forget(self, read_id: ReadId) -> None:
        read = self._reads.pop(read_id)
        del self._ids[read.connector, read.inner_id]
