"""A source and a reader joined by either connector, with pools whose bytes are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.kv_cache.layout import KVCacheLayout, KVGroup
from kvferry.kv_transfer.connector import BlockRef, BlockResult, Move, Peer
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import PoolMemory, allocate_private, allocate_shared
from kvferry.kv_transfer.shm import ShmConnector

LAYOUT = KVCacheLayout(
    block_size=4,
    groups=(KVGroup(first_layer=0, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),),
)
MODEL = "tiny@1"
SOURCE_EPOCH = 7

Connector = ShmConnector | LocalConnector


def layout_with(**changes: object) -> KVCacheLayout:
    """LAYOUT with some fields of its group, or its block size, changed."""
    block_size = changes.pop("block_size", LAYOUT.block_size)
    assert isinstance(block_size, int)
    group = replace(LAYOUT.groups[0], **changes)  # type: ignore[arg-type]
    return KVCacheLayout(block_size=block_size, groups=(group,))


def fill(memory: PoolMemory, seed: int, generation: int) -> None:
    """Random bytes in every block, one generation on all of them."""
    rng = np.random.default_rng(seed)
    memory.blocks[:] = rng.integers(0, 256, memory.blocks.shape, dtype=np.uint8)
    memory.generations[:] = generation


@dataclass
class Worker:
    """One worker's memory and connector."""

    memory: PoolMemory
    connector: Connector

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
    ) -> Worker:
        block_bytes = layout.block_bytes()
        connector: Connector
        if self.kind == "shm":
            shared = allocate_shared(num_blocks, block_bytes)
            connector = ShmConnector(
                shared,
                worker_id=worker_id,
                epoch=epoch,
                model=model,
                layout=layout,
                bytes_per_poll=blocks_per_poll * block_bytes,
            )
            made = Worker(shared, connector)
        else:
            private = allocate_private(num_blocks, block_bytes)
            connector = LocalConnector(
                self.fabric,
                private,
                worker_id=worker_id,
                epoch=epoch,
                model=model,
                layout=layout,
                blocks_per_poll=blocks_per_poll,
            )
            made = Worker(private, connector)
        fill(made.memory, seed, generation=3)
        self.workers.append(made)
        return made

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
        results: list[BlockResult] = []
        for _ in range(len(moves) + 1):
            results += self.reader.connector.poll(0.0)
        assert all(result.read_id == read_id for result in results)
        return results


def make_pair(host: Host, *, num_blocks: int = 8, blocks_per_poll: int = 1000) -> Pair:
    source = host.worker("source", epoch=SOURCE_EPOCH, num_blocks=num_blocks, seed=1)
    reader = host.worker("reader", num_blocks=num_blocks, blocks_per_poll=blocks_per_poll, seed=2)
    return Pair(source, reader, reader.connector.connect(source.connector.local_info()))


MakePair = Callable[..., Pair]
