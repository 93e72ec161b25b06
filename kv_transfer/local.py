"""The in-memory connector: the whole contract within one process, for tests and the simulator.

Pools are found in a ``LocalFabric`` instead of through a socket; a worker can be killed there, and
``blocks_per_poll`` lets a caller step a read block by block. Copying and verifying are
``read_queue``'s, the same as for shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.choosing import ONLY_ONE
from kvferry.kv_transfer.compatibility import check_compatible, check_identity, check_memory
from kvferry.kv_transfer.connector import BlockResult, Move, Peer, PeerInfo, ReadId, TransferFailed
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import PoolMemory
from kvferry.kv_transfer.read_queue import ReadQueue, Tamper

CONNECTOR_NAME = "local"


@dataclass(slots=True)
class Registration:
    """A pool's entry in the fabric; ``alive`` until its worker is killed or closes."""

    info: PeerInfo
    memory: PoolMemory
    alive: bool = True


class LocalFabric:
    """All pools of one process by address. A killed worker's successor may take its address."""

    def __init__(self) -> None:
        self._pools: dict[str, Registration] = {}

    def register(self, info: PeerInfo, memory: PoolMemory) -> Registration:
        """Make a pool readable. Raises TransferFailed if a live one has the address."""
        if self.is_alive(info.address):
            raise TransferFailed(
                f"address {info.address!r} is taken: kill its worker or use another address"
            )
        registration = Registration(info, memory)
        self._pools[info.address] = registration
        return registration

    def kill(self, address: str) -> None:
        """End the worker at ``address``: reads from it fail from now on."""
        if address in self._pools:
            self._pools[address].alive = False

    def is_alive(self, address: str) -> bool:
        """Whether a live worker has the address."""
        return address in self._pools and self._pools[address].alive

    def open(self, wanted: PeerInfo) -> LocalPeer:
        """Open the pool that ``wanted`` describes. Raises TransferFailed."""
        found = self._pools.get(wanted.address)
        if found is None or not found.alive:
            raise TransferFailed(
                f"worker {wanted.worker_id} (epoch {wanted.epoch}) does not live at "
                f"{wanted.address!r}: ask membership"
            )
        check_identity(wanted, found.info)
        return LocalPeer(found)


class LocalPeer:
    """A source in the same process. ``setup_s`` is 0: there is nothing to set up."""

    setup_s = 0.0
    connector = CONNECTOR_NAME
    reason = ONLY_ONE

    def __init__(self, registered: Registration) -> None:
        self._registered = registered
        self._closed = False

    @property
    def info(self) -> PeerInfo:
        """What the source said of itself."""
        return self._registered.info

    @property
    def memory(self) -> PoolMemory:
        """The source's own memory."""
        return self._registered.memory

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended."""
        return not self._closed and self._registered.alive and not self.memory.closed

    def close(self) -> None:
        """Drop the connection; unfinished reads end FAILED at the next poll. Idempotent."""
        self._closed = True


class LocalConnector:
    """``KVConnector`` within one process. Owns ``memory`` from construction on.

    ``blocks_per_poll`` bounds the blocks read in one ``poll``; None reads all that is queued.
    """

    def __init__(
        self,
        fabric: LocalFabric,
        memory: PoolMemory,
        *,
        worker_id: str,
        epoch: int,
        model: str,
        layout: KVCacheLayout,
        address: str | None = None,
        blocks_per_poll: int | None = None,
        match_unit: int = 0,
        tamper: Tamper | None = None,
    ) -> None:
        check_memory(memory, layout)
        self._fabric = fabric
        self._memory = memory
        self._queue = ReadQueue(memory, layout, tamper)
        self._peers: list[LocalPeer] = []
        self._blocks_per_poll = blocks_per_poll
        self._info = PeerInfo(
            worker_id=worker_id,
            epoch=epoch,
            connector=CONNECTOR_NAME,
            address=f"local:{worker_id}" if address is None else address,
            host_id="local",
            model=model,
            layout=layout,
            num_blocks=memory.num_blocks,
            match_unit=match_unit,
        )
        self._registration = fabric.register(self._info, memory)

    @property
    def tamper(self) -> Tamper | None:
        """Fault injection between copy and verification; None in production."""
        return self._queue.tamper

    @tamper.setter
    def tamper(self, tamper: Tamper | None) -> None:
        self._queue.tamper = tamper

    def local_info(self) -> PeerInfo:
        """This worker's own description, to be given to peers."""
        return self._info

    def refused(self) -> Counter[str]:
        """Nobody is: there is no door here."""
        return Counter()

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes."""
        return block_digest(self._memory.blocks[block_id])

    def connect(self, info: PeerInfo) -> LocalPeer:
        """Open the pool that ``info`` describes. Raises IncompatiblePeer or TransferFailed."""
        check_compatible(self._info, info)
        peer = self._fabric.open(info)
        self._peers = [*(old for old in self._peers if old.is_open), peer]
        return peer

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies; returns at once. Raises TransferFailed for a foreign peer."""
        if not isinstance(peer, LocalPeer) or self._memory.closed:
            raise TransferFailed(
                f"cannot read worker {peer.info.worker_id} through this connector: connect to it "
                "with the same, open connector first"
            )
        return self._queue.start(peer, moves)

    def poll(self, now: float) -> list[BlockResult]:
        """Copy and verify up to ``blocks_per_poll`` blocks."""
        limit = len(self._queue) if self._blocks_per_poll is None else self._blocks_per_poll
        return self._queue.run(limit)

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read: copies are made inside ``poll`` only, so none is under way."""
        self._queue.cancel(read_id)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: the reader checks the generation word after its copy."""

    def close(self) -> None:
        """Leave the fabric, close all peers and the own memory; idempotent."""
        self._registration.alive = False
        self._queue.clear()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._memory.close()
