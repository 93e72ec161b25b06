"""The shared-memory connector: a reader on the same host copies straight out of the source's pool.

The source only hands out read-only descriptors of its two memory files (``shm_handshake``); after
that a read costs it nothing, and neither side needs the other alive. Copying and verifying are
``read_queue``'s.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.choosing import ONLY_ONE
from kvferry.kv_transfer.compatibility import check_compatible, check_identity, check_memory
from kvferry.kv_transfer.connector import BlockResult, Move, Peer, PeerInfo, ReadId, TransferFailed
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import (
    PoolMemory,
    PoolMemoryUnavailable,
    SharedPoolMemory,
    map_readonly,
)
from kvferry.kv_transfer.read_queue import ReadQueue, Tamper
from kvferry.kv_transfer.shm_handshake import (
    HandshakeServer,
    Hello,
    PeerUid,
    peer_uid,
    request_pool,
)

CONNECTOR_NAME = "shm"
DEFAULT_BYTES_PER_POLL = 32 << 20


def host_id() -> str:
    """Equal on two workers that this connector can join.

    The boot names the machine; the network namespace bounds the abstract socket names that the
    handshake uses, so two containers that do not share one are two hosts here.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()}/unknown"


class ShmPeer:
    """A source whose pool is mapped read-only into this process.

    Attributes:
        setup_s: seconds that ``connect`` took, kept apart from the reads' own time.
    """

    connector = CONNECTOR_NAME
    reason = ONLY_ONE

    def __init__(self, info: PeerInfo, memory: PoolMemory, setup_s: float) -> None:
        self._info = info
        self._memory = memory
        self.setup_s = setup_s

    @property
    def info(self) -> PeerInfo:
        """What the source said of itself."""
        return self._info

    @property
    def memory(self) -> PoolMemory:
        """The mapping."""
        return self._memory

    @property
    def is_open(self) -> bool:
        """Whether the pool is mapped; the source's own life does not matter."""
        return not self._memory.closed

    def close(self) -> None:
        """Unmap; unfinished reads end FAILED at the next poll. Idempotent."""
        self._memory.close()


class ShmConnector:
    """``KVConnector`` over shared memory. Owns ``memory`` from construction on, unless told
    otherwise because several connectors serve it.

    All calls come from one thread; a daemon thread of ``HandshakeServer`` answers readers.

    Attributes:
        server: the handshake's counters.
    """

    def __init__(
        self,
        memory: SharedPoolMemory,
        *,
        worker_id: str,
        epoch: int,
        model: str,
        layout: KVCacheLayout,
        match_unit: int = 0,
        owns_memory: bool = True,
        bytes_per_poll: int = DEFAULT_BYTES_PER_POLL,
        connect_timeout_s: float = 5.0,
        handshake_timeout_s: float = 2.0,
        tamper: Tamper | None = None,
        uid_of: PeerUid = peer_uid,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_memory(memory, layout)
        self._memory = memory
        self._owns_memory = owns_memory
        self._closed = False
        self._queue = ReadQueue(memory, layout, tamper)
        self._peers: list[ShmPeer] = []
        self._bytes_per_poll = bytes_per_poll
        self._connect_timeout_s = connect_timeout_s
        self._uid_of = uid_of
        self._clock = clock

        info = PeerInfo(
            worker_id=worker_id,
            epoch=epoch,
            connector=CONNECTOR_NAME,
            address="",  # the server's to choose
            host_id=host_id(),
            model=model,
            layout=layout,
            num_blocks=memory.num_blocks,
            match_unit=match_unit,
        )
        fds = (memory.blocks_fd, memory.generations_fd)
        self.server = HandshakeServer(info, fds, timeout_s=handshake_timeout_s, uid_of=uid_of)

    @property
    def tamper(self) -> Tamper | None:
        """Fault injection between copy and verification; None in production."""
        return self._queue.tamper

    @tamper.setter
    def tamper(self, tamper: Tamper | None) -> None:
        self._queue.tamper = tamper

    def local_info(self) -> PeerInfo:
        """This worker's own description, to be given to peers."""
        return self.server.info

    def refused(self) -> Counter[str]:
        """Readers that this source has refused, by reason."""
        return self.server.refused.copy()

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes."""
        return block_digest(self._memory.blocks[block_id])

    def connect(self, info: PeerInfo) -> ShmPeer:
        """Map the pool that ``info`` describes. Blocks for the handshake, at most twice
        ``connect_timeout_s``. Raises IncompatiblePeer before any socket is opened, or
        TransferFailed.
        """
        began = self._clock()
        check_compatible(self.local_info(), info)
        ours = (self.local_info().worker_id, self.local_info().epoch)
        hello = Hello(reader=ours, source=(info.worker_id, info.epoch))
        received, fds = request_pool(
            info.address, hello, timeout_s=self._connect_timeout_s, uid_of=self._uid_of
        )
        try:
            memory = self._map(info, received, fds)
        finally:
            for fd in fds:
                os.close(fd)
        peer = ShmPeer(received, memory, self._clock() - began)
        self._peers = [*(old for old in self._peers if old.is_open), peer]
        return peer

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies; returns at once. Raises TransferFailed for a foreign peer."""
        if not isinstance(peer, ShmPeer) or self._closed:
            raise TransferFailed(
                f"cannot read worker {peer.info.worker_id} through this connector: connect to it "
                "with the same, open connector first"
            )
        return self._queue.start(peer, moves)

    def poll(self, now: float) -> list[BlockResult]:
        """Copy and verify up to ``bytes_per_poll`` bytes, one block at least."""
        return self._queue.run(len(self._queue), self._bytes_per_poll)

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read: copies are made inside ``poll`` only, so none is under way."""
        self._queue.cancel(read_id)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: the reader checks the generation word after its copy."""

    def close(self) -> None:
        """Close the door, all peers and, if owned, the memory; idempotent. Readers keep their
        mapping.
        """
        self._closed = True
        self.server.close()
        self._queue.clear()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        if self._owns_memory:
            self._memory.close()

    def _map(self, wanted: PeerInfo, received: PeerInfo, fds: tuple[int, int]) -> PoolMemory:
        """Map a pool, having made sure that it is the one that was asked for."""
        check_identity(wanted, received)
        check_compatible(self.local_info(), received)
        try:
            return map_readonly(*fds, received.num_blocks, received.layout.block_bytes())
        except PoolMemoryUnavailable as error:
            raise TransferFailed(
                f"cannot map the pool of worker {wanted.worker_id} (epoch {wanted.epoch}): {error}"
            ) from error
