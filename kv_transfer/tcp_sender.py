"""One reader's requests at a source, and the blocks that go out for them.

Owns the order of the answers and the proof that a sent block was the one asked for. Reads pool
memory, never the pool's book-keeping. Knows neither threads nor handshakes.
"""

from __future__ import annotations

import socket
from collections import deque

from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import Fence, PoolMemory
from kvferry.kv_transfer.tcp_wire import (
    HEADER,
    MAX_IN_FLIGHT_BLOCKS,
    REQUEST,
    TRAILER,
    BlockStatus,
    BrokenStream,
    Kind,
    Request,
)

MAX_HEAD_BYTES = 16 * 1024  # answers without a block that are joined into one send


class ServedPool:
    """A pool's memory as its source serves it, in one life of the worker.

    Attributes:
        blocks_sent: blocks that went out whole and were still valid then.
        stale_refused: requests for a block whose life was over, before or during the send.
    """

    def __init__(self, memory: PoolMemory, epoch: int) -> None:
        self.memory = memory
        self.blocks_sent = 0
        self.stale_refused = 0
        self._epoch = epoch
        self._fence = Fence()

    def look_up(self, request: Request) -> BlockStatus:
        """Whether the request names a block as it is now."""
        if request.epoch != self._epoch:
            self.stale_refused += 1
            return BlockStatus.STALE
        if not 0 <= request.block_id < self.memory.num_blocks:
            return BlockStatus.REFUSED
        return self._compare(request)

    def confirm(self, request: Request) -> BlockStatus:
        """Whether all bytes that were copied since ``look_up`` are those of the life asked for.

        The kernel has taken its copy of every byte by now. The owner raises the generation word
        before the first write of the next life, so an unchanged word after the copy means that
        no byte of another life is in it.
        """
        self._fence()
        status = self._compare(request)
        self.blocks_sent += status is BlockStatus.VALID
        return status

    def _compare(self, request: Request) -> BlockStatus:
        if int(self.memory.generations[request.block_id]) == request.generation:
            return BlockStatus.VALID
        self.stale_refused += 1
        return BlockStatus.STALE


class BlockSender:
    """The answers of one connection, in the order of its requests.

    Bytes go from the pool's memory to the kernel without a copy in between. What waits to be sent
    is bounded: a few small answers and one block; requests wait in ``requests``.
    """

    def __init__(self, pool: ServedPool) -> None:
        self._pool = pool
        self._requests: deque[Request] = deque()
        self._unsent: list[memoryview] = []
        self._head = bytearray()  # what goes out before the next block
        self._sending: Request | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._unsent or self._head or self._requests or self._sending is not None)

    @property
    def is_full(self) -> bool:
        """Whether no more requests should be read for now."""
        return len(self._requests) >= MAX_IN_FLIGHT_BLOCKS

    def say(self, message: bytes) -> None:
        """Send ``message`` before any block."""
        self._head += message

    def feed(self, received: bytearray) -> None:
        """Take the whole requests at the front of ``received``. Raises BrokenStream."""
        whole = len(received) - len(received) % REQUEST.size
        for kind, *fields in REQUEST.iter_unpack(bytes(received[:whole])):
            if kind not in (Kind.READ, Kind.READ_WITH_DIGEST):
                raise BrokenStream(f"request of unknown kind {kind}")
            self._requests.append(Request(Kind(kind), *fields))
        del received[:whole]

    def send(self, connection: socket.socket, max_bytes: int) -> None:
        """Hand about ``max_bytes`` to the kernel, or what it takes. Raises OSError."""
        sent = 0
        while sent < max_bytes:
            if not self._unsent:
                self._unsent = self._next_views()
            if not self._unsent:
                return
            try:
                count = connection.sendmsg(self._unsent)
            except BlockingIOError:
                return
            sent += count
            self._advance(count)

    def _advance(self, count: int) -> None:
        """Forget the first ``count`` unsent bytes."""
        while self._unsent and count >= len(self._unsent[0]):
            count -= len(self._unsent.pop(0))
        if count:
            self._unsent[0] = self._unsent[0][count:]

    def _next_views(self) -> list[memoryview]:
        """The next bytes to send: at most one block, and what goes out before it."""
        head, self._head = self._head, bytearray()
        if self._sending is not None:
            status = self._pool.confirm(self._sending)
            head += TRAILER.pack(status, self._sending.index)
            self._sending = None
        while self._requests and len(head) < MAX_HEAD_BYTES:
            request = self._requests.popleft()
            status = self._pool.look_up(request)
            if status is BlockStatus.VALID:
                row = self._pool.memory.blocks[request.block_id]
                digest = block_digest(row) if request.kind is Kind.READ_WITH_DIGEST else 0
                head += _header(request, status, row.nbytes, digest)
                self._sending = request
                return [memoryview(head), memoryview(row)]
            head += _header(request, status, 0, 0)
        return [memoryview(head)] if head else []


def _header(request: Request, status: BlockStatus, length: int, digest: int) -> bytes:
    return HEADER.pack(status, request.index, request.read_id, request.generation, length, digest)
