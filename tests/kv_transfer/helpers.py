"""A source and a reader joined by any connector, with pools whose bytes are known.

``auto`` and ``multi-tcp`` are workers that have two connectors over one pool; on one host the first
chooses shared memory, the second is told to use TCP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.kv_cache.layout import KVCacheLayout, KVGroup
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.connector import (
    BlockRef,
    BlockResult,
    Endpoint,
    KVConnector,
    Move,
    Peer,
    PeerInfo,
    ReadId,
)
from kvferry.kv_transfer.faults import TamperableConnector
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import PoolMemory, allocate_private, allocate_shared
from kvferry.kv_transfer.multi import MultiConnector
from kvferry.kv_transfer.read_queue import Tamper
from kvferry.kv_transfer.shm import ShmConnector
from kvferry.kv_transfer.tcp import TcpConnector

LAYOUT = KVCacheLayout(
    block_size=4,
    groups=(KVGroup(first_layer=0, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),),
)
MODEL = "tiny@1"
SOURCE_EPOCH = 7

COPIED_IN_POLL = ("shm", "local", "auto")  # a block's read begins and ends within one poll
SERVED = ("tcp", "multi-tcp")  # its bytes come when they come
SOON_S = 60.0  # a bound that only a fault exceeds, however slow the machine is


# No test of the contract should fail because the machine is busy.
PATIENT: dict[str, Any] = {"connect_timeout_s": SOON_S, "handshake_timeout_s": SOON_S}


def layout_with(**changes: object) -> KVCacheLayout:
    """LAYOUT with some fields of its group, or its block size, changed."""
    block_size = changes.pop("block_size", LAYOUT.block_size)
    assert isinstance(block_size, int)
    group = replace(LAYOUT.groups[0], **changes)  # type: ignore[arg-type]
    return KVCacheLayout(block_size=block_size, groups=(group,))


def at_address(info: PeerInfo, change: Callable[[str], str]) -> PeerInfo:
    """``info`` with every address in it changed."""
    endpoints = tuple(Endpoint(e.connector, change(e.address)) for e in info.endpoints)
    return replace(info, address=change(info.address), endpoints=endpoints)


def polls_until(connector: KVConnector, num_blocks: int) -> list[list[BlockResult]]:
    """Poll until ``num_blocks`` blocks have ended, and once more; what each poll said."""
    polls: list[list[BlockResult]] = []
    ended = 0
    deadline = time.monotonic() + SOON_S
    while ended < num_blocks:
        polls.append(connector.poll(0.0))
        ended += len(polls[-1])
        assert time.monotonic() < deadline, f"{ended} blocks of {num_blocks} within {SOON_S} s"
        time.sleep(0)  # the other side may need the processor
    return [*polls, connector.poll(0.0)]


def collect(connector: KVConnector, num_blocks: int) -> list[BlockResult]:
    """Poll until ``num_blocks`` blocks have ended, and once more; their results."""
    return [result for results in polls_until(connector, num_blocks) for result in results]


def fill(memory: PoolMemory, seed: int, generation: int) -> None:
    """Random bytes in every block, one generation on all of them."""
    rng = np.random.default_rng(seed)
    memory.blocks[:] = rng.integers(0, 256, memory.blocks.shape, dtype=np.uint8)
    memory.generations[:] = generation


@dataclass
class Worker:
    """One worker's memory and connector."""

    memory: PoolMemory
    connector: TamperableConnector

    def reference(self, block_id: int) -> BlockRef:
        """The block as an announcement would name it now."""
        epoch = self.connector.local_info().epoch
        return BlockRef(epoch, block_id, int(self.memory.generations[block_id]))

    def move(self, block_id: int, target: int, *, digest: bool = True) -> Move:
        """The block's announcement, with a target."""
        value = self.connector.digest(block_id) if digest else None
        return Move(self.reference(block_id), target, LAYOUT.block_size, value)


class Host:
    """Makes workers of one kind, and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fabric = LocalFabric()
        self.workers: list[Worker] = []

    def worker(
        self,
        worker_id: str,
        *,
        epoch: int = 1,
        num_blocks: int = 8,
        layout: KVCacheLayout = LAYOUT,
        model: str = MODEL,
        blocks_per_poll: int = 1000,
        seed: int = 0,
        **options: Any,
    ) -> Worker:
        common: dict[str, Any] = {
            "worker_id": worker_id,
            "epoch": epoch,
            "model": model,
            "layout": layout,
            **options,
        }
        made = self._make(common, num_blocks, layout.block_bytes(), blocks_per_poll)
        fill(made.memory, seed, generation=3)
        self.workers.append(made)
        return made

    def _make(
        self, common: dict[str, Any], num_blocks: int, block_bytes: int, blocks_per_poll: int
    ) -> Worker:
        if self.kind == "local":
            private = allocate_private(num_blocks, block_bytes)
            return Worker(
                private,
                LocalConnector(self.fabric, private, blocks_per_poll=blocks_per_poll, **common),
            )
        common["bytes_per_poll"] = blocks_per_poll * block_bytes
        if self.kind == "tcp":
            private = allocate_private(num_blocks, block_bytes)
            return Worker(private, TcpConnector(private, key=NO_KEY, **PATIENT, **common))
        shared = allocate_shared(num_blocks, block_bytes)
        if self.kind == "shm":
            return Worker(shared, ShmConnector(shared, **common))
        common["owns_memory"] = False
        both: list[TamperableConnector] = [
            ShmConnector(shared, **common),
            TcpConnector(shared, key=NO_KEY, **PATIENT, **common),
        ]
        configured = self.kind.removeprefix("multi-")
        return Worker(shared, MultiConnector(shared, both, configured))

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.close()


@dataclass
class Pair:
    """A reader connected to a source."""

    source: Worker
    reader: Worker
    peer: Peer

    def read(self, moves: Sequence[Move]) -> list[BlockResult]:
        """Start a read and poll it to its end."""
        read_id = self.reader.connector.start_read(self.peer, moves)
        results = collect(self.reader.connector, len(moves))
        assert all(result.read_id == read_id for result in results)
        return results


def make_pair(
    host: Host, /, *, num_blocks: int = 8, blocks_per_poll: int = 1000, **options: Any
) -> Pair:
    source = host.worker("source", epoch=SOURCE_EPOCH, num_blocks=num_blocks, seed=1, **options)
    reader = host.worker(
        "reader", num_blocks=num_blocks, blocks_per_poll=blocks_per_poll, seed=2, **options
    )
    return Pair(source, reader, reader.connector.connect(source.connector.local_info()))


class Settled:
    """A connector each of whose polls lasts until all its reads have ended, for tests of what is
    built on top and should not care how long bytes are under way.
    """

    def __init__(self, inner: TamperableConnector) -> None:
        self._inner = inner
        self._unfinished: dict[ReadId, int] = {}

    @property
    def tamper(self) -> Tamper | None:
        return self._inner.tamper

    @tamper.setter
    def tamper(self, tamper: Tamper | None) -> None:
        self._inner.tamper = tamper

    def local_info(self) -> PeerInfo:
        return self._inner.local_info()

    def refused(self) -> Counter[str]:
        return self._inner.refused()

    def digest(self, block_id: int) -> int:
        return self._inner.digest(block_id)

    def connect(self, info: PeerInfo) -> Peer:
        return self._inner.connect(info)

    def start_read(self, peer: Peer, moves: Sequence[Move]) -> ReadId:
        read_id = self._inner.start_read(peer, moves)
        self._unfinished[read_id] = len(moves)
        return read_id

    def poll(self, now: float) -> list[BlockResult]:
        results = collect(self._inner, sum(self._unfinished.values()))
        self._unfinished.clear()
        return results

    def cancel(self, read_id: ReadId) -> None:
        self._inner.cancel(read_id)
        self._unfinished.pop(read_id, None)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        self._inner.withdraw(block_ids)

    def close(self) -> None:
        self._inner.close()


MakePair = Callable[..., Pair]
