"""The contract of every transfer connector: pull, not push.

The reader copies sealed blocks out of a peer's pool into blocks that it owns, so nobody writes
into blocks that have changed hands. Every worker is both source and reader. Nothing here blocks:
a caller starts a read, polls it, and may cancel it; once ``cancel`` has returned no further byte
arrives in the targets.

A connector does not know requests, tokens or roles. Leases are kept by ``kv_transfer.leases``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.layout import KVCacheLayout

ReadId = NewType("ReadId", int)


class TransferFailed(KVFerryError):
    """Blocks could not be moved; names the peer and the cause."""


class IncompatiblePeer(TransferFailed):
    """The peer's pool cannot be read into ours; names the field and both values."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a given life of a given process: stale references are refused, never served."""

    epoch: int
    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of several ways to a pool: the connector that serves it and where that one finds it."""

    connector: str
    address: str


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """All that a reader needs to know of a source before any block moves.

    Attributes:
        worker_id, epoch: the source's name and life.
        connector: implementation that serves this pool, for example ``shm``.
        address: where the implementation finds it (for ``shm`` a Unix socket name).
        host_id: equal on workers that share memory.
        model: model name and revision; part of the compatibility check.
        layout: the pool's layout (block size, groups, heads, dtype, rank).
        num_blocks: blocks in the pool.
        endpoints: every way to the pool, where there are several; empty stands for the one that
            ``connector`` and ``address`` name.
        match_unit: tokens per value of its hash chains; 0 stands for the block size.
    """

    worker_id: str
    epoch: int
    connector: str
    address: str
    host_id: str
    model: str
    layout: KVCacheLayout
    num_blocks: int
    endpoints: tuple[Endpoint, ...] = ()
    match_unit: int = 0


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Consecutive slots of a source block, and those of an own block that hold the same positions.

    Attributes:
        first: the first of the source block's slots.
        target: own block id.
        target_first: the first of its slots.
        count: slots, at least one.
    """

    first: int
    target: int
    target_first: int
    count: int


@dataclass(frozen=True, slots=True)
class Move:
    """Read one whole source block: into one own block, or slot by slot into one or several.

    The block is read and verified whole in either case. With ``runs`` no slot is written before
    that, and none that is not named; a pool with blocks of another size takes nothing else.

    Attributes:
        source: the peer's block.
        target: own block id, owned by the transfer until the read ends or is fenced; with ``runs``
            that of the first of them.
        num_slots: filled slots (the whole block is read all the same).
        digest: 64-bit digest of the source block's bytes; None skips verification.
        rank: source rank; only 0 in the first version.
        runs: which slots go where; empty for the whole block.
    """

    source: BlockRef
    target: int
    num_slots: int
    digest: int | None
    rank: int = 0
    runs: tuple[SlotRun, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Own blocks that are written, each once; all are owned by the transfer."""
        if not self.runs:
            return (self.target,)
        return tuple(dict.fromkeys(run.target for run in self.runs))


class ReadStatus(Enum):
    """How the read of one block ended."""

    OK = "ok"
    STALE = "stale"  # the source's generation had moved on; the bytes were discarded
    CORRUPT = "corrupt"  # the digest did not match
    FAILED = "failed"  # the transport failed


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The end of one ``Move``; ``index`` is its place in the list given to ``start_read``.

    ``num_bytes`` are those of the source block if it is OK, else 0.
    """

    read_id: ReadId
    index: int
    move: Move
    status: ReadStatus
    num_bytes: int


class Peer(Protocol):
    """An open connection to a source."""

    @property
    def info(self) -> PeerInfo:
        """What the source said of itself in the handshake."""
        ...

    @property
    def setup_s(self) -> float:
        """Seconds that opening the connection took."""
        ...

    @property
    def connector(self) -> str:
        """The implementation that moves the blocks, for example ``shm``."""
        ...

    @property
    def reason(self) -> str:
        """Why it is that one, as a short sentence; see ``choosing``."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known, blocks can be read; reads of a closed peer end FAILED."""
        ...

    def close(self) -> None:
        """Drop the connection; its unfinished reads end FAILED."""
        ...


class KVConnector(Protocol):
    """One transport. All calls come from the engine thread, except where a method says otherwise.

    Clocks are arguments: ``now`` is in seconds of the caller's monotonic clock.
    """

    def local_info(self) -> PeerInfo:
        """This worker's own description, to be given to peers."""
        ...

    def refused(self) -> Counter[str]:
        """Readers that were refused since the start, by reason; on any thread."""
        ...

    def digest(self, block_id: int) -> int:
        """64-bit digest of an own block's bytes, as a reader will compute it."""
        ...

    def connect(self, info: PeerInfo) -> Peer:
        """Open a source. Raises IncompatiblePeer (naming both values) or TransferFailed."""
        ...

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        """Queue the copies; returns at once. Reads of one peer are served in order."""
        ...

    def poll(self, now: float) -> list[BlockResult]:
        """Make progress and return the blocks whose read has ended since the last poll."""
        ...

    def cancel(self, read_id: ReadId) -> None:
        """Fence a read: after this returns none of its targets is written again, and no
        further result of it is reported. Unknown ids are ignored.
        """
        ...

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """The source's side of a lease that ends: these own blocks may be rewritten from now on,
        once their generation words are raised. Returns at once.

        A reader's block ends OK only if its word was still the one asked for *after* its last
        byte had been copied, so a transport that checks this by itself has nothing to do here. It
        is the place for one that must stop its sends first.
        """
        ...

    def close(self) -> None:
        """Close peers and own memory; idempotent."""
        ...
