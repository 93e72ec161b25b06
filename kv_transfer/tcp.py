"""The TCP connector: a reader on any host asks the source, and the source serves the read.

Both ends are in this class, for every worker is source and reader. The source's thread
(``tcp_source``) sends from the pool's memory; the reader receives into its own pool inside
``poll`` (``tcp_peer``). Bytes pass through no Python object on either side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.authentication import NoKey
from kvferry.kv_transfer.choosing import TCP
from kvferry.kv_transfer.compatibility import check_compatible, check_memory
from kvferry.kv_transfer.connector import (
    BlockResult,
    Move,
    Peer,
    PeerInfo,
    ReadId,
    ReadStatus,
    TransferFailed,
)
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import PoolMemory
from kvferry.kv_transfer.read_queue import Tamper
from kvferry.kv_transfer.shm import host_id
from kvferry.kv_transfer.tcp_dial import Dial, DialOptions
from kvferry.kv_transfer.tcp_peer import TcpPeer
from kvferry.kv_transfer.tcp_receiver import TargetPool, Wanted
from kvferry.kv_transfer.tcp_sender import ServedPool
from kvferry.kv_transfer.tcp_source import SourceLimits, TcpSource

DEFAULT_BYTES_PER_POLL = 32 << 20
DEFAULT_IN_FLIGHT_BYTES = 32 << 20


class TcpConnector:
    """``KVConnector`` over TCP. Owns ``memory`` from construction on, unless told otherwise
    because several connectors serve it.

    All calls come from one thread, and only ``connect`` waits, ``connect_timeout_s`` at most. A
    daemon thread of ``TcpSource`` serves readers; it touches the pool's memory alone.

    With ``key`` both ends must show that they know it before they say anything else, and each is
    the one that the other means. The stream itself is neither encrypted nor signed: bind it to a
    network that only the cluster uses.

    Attributes:
        source, served: the counters of handshakes and of blocks sent.
    """

    def __init__(
        self,
        memory: PoolMemory,
        *,
        worker_id: str,
        epoch: int,
        model: str,
        layout: KVCacheLayout,
        match_unit: int = 0,
        owns_memory: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        checksum: bool = True,
        bytes_per_poll: int = DEFAULT_BYTES_PER_POLL,
        max_in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        connect_timeout_s: float = 1.0,
        handshake_timeout_s: float = 2.0,
        silence_timeout_s: float = 20.0,
        max_pending_handshakes: int = 256,
        max_pending_per_host: int = 32,
        max_connections: int = 256,
        socket_buffer_bytes: int | None = None,
        key: bytes | NoKey,
        tamper: Tamper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at ``host``:``port``, as ``advertise_host`` to readers where that differs.

        ``checksum`` has a block announced without a digest verified against one that the source
        computes as it sends. ``max_in_flight_bytes`` bounds what is asked of one peer at a time,
        one block at least. Raises LayoutMismatch or TransferFailed.
        """
        check_memory(memory, layout)
        self._memory = memory
        self._owns_memory = owns_memory
        self._clock = clock
        self._target = TargetPool(memory, layout, checksum, tamper)
        self._bytes_per_poll = bytes_per_poll
        self._max_in_flight_bytes = max_in_flight_bytes
        self._peers: list[TcpPeer] = []
        self._unfinished: dict[ReadId, tuple[TcpPeer, int]] = {}
        self._next_id = 1
        self._closed = False
        self._dial_options = DialOptions(
            connect_timeout_s, silence_timeout_s, socket_buffer_bytes, clock, key=key
        )
        info = PeerInfo(
            worker_id=worker_id,
            epoch=epoch,
            connector=TCP,
            address="",  # the source's to choose
            host_id=host_id(),
            model=model,
            layout=layout,
            num_blocks=memory.num_blocks,
            match_unit=match_unit,
        )
        self.served = ServedPool(memory, epoch)
        self.source = TcpSource(
            info,
            self.served,
            host=host,
            port=port,
            advertise_host=advertise_host,
            limits=SourceLimits(
                handshake_timeout_s,
                silence_timeout_s,
                max_pending_handshakes,
                max_pending_per_host,
                max_connections,
                socket_buffer_bytes,
            ),
            key=key,
            clock=clock,
        )

    @property
    def tamper(self) -> Tamper | None:
        """Fault injection between receipt and verification; None in production."""
        return self._target.tamper

    @tamper.setter
    def tamper(self, tamper: Tamper | None) -> None:
        self._target.tamper = tamper

    def local_info(self) -> PeerInfo:
        """This worker's own description, to be given to peers."""
        return self.source.info

    def refused(self) -> Counter[str]:
        """Readers that this source has refused, by reason."""
        return self.source.refused.copy()

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes."""
        return block_digest(self._memory.blocks[block_id])

    def connect(self, info: PeerInfo) -> TcpPeer:
        """Reach the source that ``info`` describes. Raises IncompatiblePeer, before any socket is
        opened or as the source's answer, or TransferFailed.
        """
        began = self._clock()
        check_compatible(self.local_info(), info, same_host=False)
        if self._closed:
            raise TransferFailed("this connector is closed: open a new one")

        def dial() -> Dial:
            return Dial(info, self.local_info(), self._dial_options)

        attempt = dial()
        while (found := attempt.advance()) is None:
            attempt.wait()
        setup_s = self._clock() - began
        peer = TcpPeer(
            found, attempt.connection, setup_s, self._target, dial, self._max_in_flight_bytes
        )
        self._peers.append(peer)
        return peer

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies; the requests leave at the next poll. Raises TransferFailed for a
        foreign peer.
        """
        if not isinstance(peer, TcpPeer) or peer.pool is not self._target or self._closed:
            raise TransferFailed(
                f"cannot read worker {peer.info.worker_id} through this connector: connect to it "
                "with the same, open connector first"
            )
        read_id = ReadId(self._next_id)
        self._next_id += 1
        if moves:
            self._unfinished[read_id] = (peer, len(moves))
            if peer not in self._peers:  # closed and forgotten: its reads fail at the next poll
                self._peers.append(peer)
            peer.queue(Wanted(read_id, index, move) for index, move in enumerate(moves))
        return read_id

    def poll(self, now: float) -> list[BlockResult]:
        """Send what there is room for, receive what has come, up to ``bytes_per_poll`` bytes, one
        block at least.

        Peers take turns block by block; the next poll begins with the next peer.
        """
        results: list[BlockResult] = []
        room = self._bytes_per_poll
        turns = [peer for peer in self._peers if not peer.is_idle]
        while turns:
            still_busy = []
            for peer in turns:
                if results and peer.block_bytes > room:
                    continue
                wanted = peer.step()
                if wanted is not None:
                    results.append(self._result(wanted, peer.block_bytes))
                    room -= peer.block_bytes
                    still_busy.append(peer)
            turns = still_busy
        kept = [peer for peer in self._peers if not (peer.is_closed and peer.is_idle)]
        self._peers = kept[1:] + kept[:1]
        return results

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read: bytes are received inside ``poll`` only, and those of a cancelled block
        that are still to come are thrown away.
        """
        peer, _ = self._unfinished.pop(read_id, (None, 0))
        if peer is not None:
            peer.cancel(read_id)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Nothing to do, although the source serves the reads here.

        A block's validity is said in the trailer behind its bytes, and the source writes that
        only once the kernel has its own copy of all of them *and* the generation word has been
        compared again. So a block whose word is raised while it is being sent, or that still
        waits in a queue, leaves as STALE, without a lock between the thread that owns the pool
        and the one that sends, without waiting for a slow reader, and without breaking a
        connection that carries other blocks too. Bytes that left before the word was raised are
        what the reader asked for, and stay true.
        """

    def close(self) -> None:
        """End the source, all peers and, if owned, the memory; idempotent."""
        self._closed = True
        self.source.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._unfinished.clear()
        if self._owns_memory:
            self._memory.close()

    def _result(self, wanted: Wanted, block_bytes: int) -> BlockResult:
        assert wanted.ended is not None
        peer, left = self._unfinished[wanted.read_id]
        if left == 1:
            del self._unfinished[wanted.read_id]
        else:
            self._unfinished[wanted.read_id] = (peer, left - 1)
        num_bytes = block_bytes if wanted.ended is ReadStatus.OK else 0
        return BlockResult(wanted.read_id, wanted.index, wanted.move, wanted.ended, num_bytes)
