"""Takes a source's answers off a connection: header, bytes into the pool or beside it, trailer.

Owns how a received block is verified and where the bytes of a cancelled one go. Knows neither what
was asked for next nor how the connection came about.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.connector import Move, ReadId, ReadStatus
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.memory import PoolMemory
from kvferry.kv_transfer.read_queue import Tamper
from kvferry.kv_transfer.targets import Staging, TargetBlocks
from kvferry.kv_transfer.tcp_wire import HEADER, TRAILER, BlockStatus, BrokenStream

SCRATCH_BYTES = 256 * 1024

_ENDS = {BlockStatus.STALE: ReadStatus.STALE, BlockStatus.REFUSED: ReadStatus.FAILED}


@dataclass(slots=True)
class Wanted:
    """One block of a read. ``ended`` is how its read ended, None until it has."""

    read_id: ReadId
    index: int
    move: Move
    ended: ReadStatus | None = None
    cancelled: bool = False


class TargetPool:
    """The pool that blocks are read into.

    Attributes:
        memory: the own pool.
        blocks: its blocks, as targets.
        scratch: where bytes go that nobody wants any longer.
        checksum: verify the source's digest of blocks that were announced without one.
        tamper: fault injection between receipt and verification; None in production.
    """

    def __init__(
        self, memory: PoolMemory, layout: KVCacheLayout, checksum: bool, tamper: Tamper | None
    ) -> None:
        self.memory = memory
        self.checksum = checksum
        self.tamper = tamper
        self.blocks = TargetBlocks(memory, layout)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))

    def asks_digest(self, move: Move) -> bool:
        """Whether the source is to compute a digest for this block."""
        return self.checksum and move.digest is None

    def verify(
        self, move: Move, received: NDArray[np.uint8], status: BlockStatus, digest: int
    ) -> ReadStatus:
        """How the read of a block ends whose bytes, ``received``, have all come.

        The source's last word is heard first: bytes of another life are STALE, whatever they are.
        """
        if self.tamper is not None:
            self.tamper(move, received)
        if status is not BlockStatus.VALID:
            return _ENDS[status]
        expected = digest if self.asks_digest(move) else move.digest
        if expected is not None and block_digest(received) != expected:
            return ReadStatus.CORRUPT
        return ReadStatus.OK


class _Stage(Enum):
    HEADER = auto()
    BLOCK = auto()
    TRAILER = auto()


class Receiver:
    """The incoming half of one connection. Answers come in the order of the requests.

    ``source`` is the layout of the pool at its other end.
    """

    def __init__(self, connection: socket.socket, pool: TargetPool, source: KVCacheLayout) -> None:
        self._connection = connection
        self._pool = pool
        self._source = source
        self._block_bytes = source.block_bytes()
        self._staging = Staging()
        self._stage = _Stage.HEADER
        self._head = memoryview(bytearray(HEADER.size))
        self._tail = memoryview(bytearray(TRAILER.size))
        self._count = 0  # bytes received in this stage
        self._digest = 0

    def receive(self, wanted: Wanted) -> None:
        """Take what has come of the answer for ``wanted``; sets its end if that is all of it.

        Raises BlockingIOError if nothing has come, OSError if nothing will, and BrokenStream if
        what came is no answer to this request.
        """
        match self._stage:
            case _Stage.HEADER:
                if self._fill(self._head):
                    self._take_header(wanted)
            case _Stage.BLOCK:
                self._count += self._receive_into(self._room(wanted))
                if self._count == self._block_bytes:
                    self._next(_Stage.TRAILER)
            case _Stage.TRAILER:
                if self._fill(self._tail):
                    self._take_trailer(wanted)

    def _take_header(self, wanted: Wanted) -> None:
        value, index, read_id, generation, length, self._digest = HEADER.unpack(self._head)
        status = _status(value)
        asked = (wanted.read_id, wanted.index, wanted.move.source.generation)
        if (read_id, index, generation) != asked:
            raise BrokenStream(f"answer to {(read_id, index, generation)}, wanted {asked}")
        block_bytes = self._block_bytes if status is BlockStatus.VALID else 0
        if length != block_bytes:
            raise BrokenStream(f"{status.name} block of {length} bytes, wanted {block_bytes}")
        if status is BlockStatus.VALID:
            self._next(_Stage.BLOCK)
        else:
            self._next(_Stage.HEADER)
            wanted.ended = _ENDS[status]

    def _take_trailer(self, wanted: Wanted) -> None:
        value, index = TRAILER.unpack(self._tail)
        status = _status(value)
        if index != wanted.index:
            raise BrokenStream(f"trailer of block {index}, wanted {wanted.index}")
        self._next(_Stage.HEADER)
        if wanted.cancelled:
            wanted.ended = ReadStatus.FAILED  # reported to nobody
            return
        move, received = wanted.move, self._received(wanted.move)
        wanted.ended = self._pool.verify(move, received, status, self._digest)
        if wanted.ended is ReadStatus.OK:
            self._pool.blocks.place(move, received, self._source)

    def _room(self, wanted: Wanted) -> memoryview:
        """Where the block's next bytes go; nowhere of ours once it is cancelled."""
        if wanted.cancelled:
            return self._pool.scratch[: self._block_bytes - self._count]
        return self._received(wanted.move).data[self._count :]

    def _received(self, move: Move) -> NDArray[np.uint8]:
        """The block's bytes as they come: where they will lie, or beside the pool."""
        if move.runs:
            return self._staging.room(self._block_bytes)
        return self._pool.blocks.whole(move)

    def _next(self, stage: _Stage) -> None:
        self._stage = stage
        self._count = 0

    def _fill(self, buffer: memoryview) -> bool:
        """Receive into ``buffer`` behind what it holds; whether it is full now."""
        self._count += self._receive_into(buffer[self._count :])
        return self._count == len(buffer)

    def _receive_into(self, buffer: memoryview) -> int:
        count = self._connection.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the source hung up")
        return count


def _status(value: int) -> BlockStatus:
    try:
        return BlockStatus(value)
    except ValueError as error:
        raise BrokenStream(f"unknown block status {value}") from error
