"""A device pool behind slots, over a fake device, and a host pool to read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.connector import BlockRef, Move
from kvferry.kv_transfer.digest import block_digest
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import PoolMemory, allocate_private
from kvferry.worker.staging.connector import StagingConnector
from kvferry.worker.staging.device_pool import DevicePool
from kvferry.worker.staging.publisher import StagingPublisher
from kvferry.worker.staging.slots import Slots
from tests.fake_device import FakeDevice
from tests.kv_transfer.helpers import LAYOUT, MODEL

NUM_BLOCKS = 12


def content(block_id: int, generation: int, num_bytes: int) -> bytes:
    """What a block holds in one of its lives."""
    return np.random.default_rng([block_id, generation]).bytes(num_bytes)


@dataclass
class Staged:
    """A worker with a device pool and its parts."""

    device: FakeDevice
    pool: DevicePool
    memory: PoolMemory
    publisher: StagingPublisher
    connector: StagingConnector
    inner: LocalConnector

    def fill(self, block_id: int) -> None:
        """A block's next life begins and is written by a step, which is done."""
        generation = self.pool.generation(block_id) + 1
        self.pool.raise_generation(block_id, generation)
        data = content(block_id, generation, self.memory.block_bytes)
        self.pool.memory[block_id] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read_slot(self, ref: BlockRef) -> bytes:
        """What a peer finds under a name; it must still be of that life."""
        assert int(self.memory.generations[ref.block_id]) == ref.generation
        return bytes(self.memory.blocks[ref.block_id])

    def block(self, block_id: int) -> bytes:
        """A block's bytes on the device."""
        return bytes(self.pool.memory[block_id].numpy())


def make_staged(
    fabric: LocalFabric,
    name: str,
    num_slots: int = 2,
    epoch: int = 1,
    seed: int | None = None,
    layout: KVCacheLayout = LAYOUT,
    blocks_per_poll: int | None = None,
) -> Staged:
    device = FakeDevice(seed)
    block_bytes = layout.block_bytes()
    pool = DevicePool(device.zeros(NUM_BLOCKS * block_bytes).view(-1, block_bytes), NUM_BLOCKS)
    memory = allocate_private(2 * num_slots, block_bytes)
    pinned = device.pin(memory.blocks)
    inner = LocalConnector(
        fabric,
        memory,
        worker_id=name,
        epoch=epoch,
        model=MODEL,
        layout=layout,
        blocks_per_poll=blocks_per_poll,
    )
    outward = Slots(memory, pinned, range(num_slots), device.stream())
    inward = Slots(memory, pinned, range(num_slots, 2 * num_slots), device.stream())
    publisher = StagingPublisher(epoch, pool, memory, outward, inner, True)
    return Staged(device, pool, memory, publisher, StagingConnector(inner, pool, inward), inner)


@dataclass
class HostSource:
    """A pool in host memory, every block full."""

    memory: PoolMemory
    connector: LocalConnector

    def move(self, block_id: int, target: int) -> Move:
        """Read a block of it."""
        info = self.connector.local_info()
        ref = BlockRef(info.epoch, block_id, int(self.memory.generations[block_id]))
        return Move(ref, target, 4, block_digest(self.memory.blocks[block_id]))


def make_source(fabric: LocalFabric, name: str = "source", num_blocks: int = 8) -> HostSource:
    memory = allocate_private(num_blocks, LAYOUT.block_bytes())
    connector = LocalConnector(fabric, memory, worker_id=name, epoch=7, model=MODEL, layout=LAYOUT)
    for block_id in range(num_blocks):
        memory.raise_generation(block_id, 3)
        data = content(block_id, 3, memory.block_bytes)
        memory.blocks[block_id] = np.frombuffer(data, dtype=np.uint8)
    return HostSource(memory, connector)
