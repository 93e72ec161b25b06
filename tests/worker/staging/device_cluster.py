"""The stepped cluster of ``tests.golden`` whose workers have their pools on fake devices.

Real model, real kernels (the reference's, on tensors that stand for device memory), real
connectors; the devices do their work by chance, from a seed, and notice misuse. Beside that every
copy and every step is held to the order of generation words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvferry.engine.batch import SchedulerOutput
from kvferry.engine.device.protocol import Device
from kvferry.engine.engine import Engine
from kvferry.engine.models.loading import kv_layout
from kvferry.kv_cache.block_pool import BlockPool, BlockState
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.worker.device_parts import DeviceParts, TransferOptions, make_device_parts
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import Worker
from tests.fake_device import FakeDevice
from tests.golden.cluster import RealCluster, WatchedRunner
from tests.sim.cluster import SimWorker


@dataclass
class DeviceCluster(RealCluster):
    """See the module. Roles in ``on_cpu`` have their pools in host memory."""

    seed: int = 0
    staging_blocks: int = 3
    on_cpu: frozenset[str] = frozenset()
    devices: dict[NodeRef, FakeDevice] = field(default_factory=dict)
    parts: dict[NodeRef, DeviceParts] = field(default_factory=dict)

    def build(self, ref: NodeRef, num_blocks: int) -> SimWorker:
        """A worker on a device of its own."""
        if ref.node_id.partition("-")[0] in self.on_cpu:
            return super().build(ref, num_blocks)
        assert self.model is not None
        block_size = self.block_size_of(ref)
        layout = kv_layout(self.model.config, block_size, self.kv_dtype)
        device = self.make_device(ref)
        options = TransferOptions(
            self.connector,
            max_in_flight_blocks=self.blocks_per_poll,
            staging_blocks=self.staging_blocks,
            match_unit=self.match_unit,
            key=NO_KEY,
        )
        made = self.parts[ref] = make_device_parts(
            device, self.model, layout, num_blocks, self.scheduler, ref, "golden", options
        )
        made.runner.capture_graphs()
        pool = BlockPool(num_blocks, made.pool.raise_generation, self.index(), self.clock)
        if ref in self.devices:
            self.devices[ref].on_copy = _held_to_words(made, pool)
        runner = WatchedRunner(made.runner, before_step=_step_held_to_words(made, pool))
        engine = Engine(
            self.scheduler, runner, pool, block_size, "golden", self.clock, self.match_unit
        )
        worker = Worker(ref, engine, made.connector, self.times, publisher=made.publisher)
        return SimWorker(worker, runner, made.connector)

    def make_device(self, ref: NodeRef) -> Device:
        """What the worker computes on."""
        self.devices[ref] = FakeDevice(self.seed + ref.epoch)
        return self.devices[ref]

    def kill(self, sim: SimWorker) -> None:
        """kill -9: its sockets are gone, and what its device had queued is never done."""
        super().kill(sim)
        sim.worker.connector._inner.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Give everything back; no slot is missing then."""
        for sim in self.workers:
            if sim.alive:
                sim.worker.close()
        for ref, device in self.devices.items():
            if any(sim.ref == ref and sim.alive for sim in self.workers):
                assert device.num_queued == 0


def _held_to_words(
    made: DeviceParts, pool: BlockPool
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A check of every copy between slots and blocks as it is queued."""
    memory = made.pool.memory
    first, width = memory.data_ptr(), memory[0].nbytes
    last_word: dict[int, int] = {}

    def check(target: torch.Tensor, source: torch.Tensor) -> None:
        if target.nbytes != width or target.dtype is not torch.uint8:
            return  # a step's inputs
        inward = first <= target.data_ptr() < first + memory.nbytes
        place = ((target if inward else source).data_ptr() - first) // width
        block = pool.blocks[place]
        assert made.pool.generation(place) == block.generation, "the word is of another life"
        if inward:
            assert block.state is BlockState.OPEN and block.num_transfers
            return
        assert block.state is BlockState.SEALED and block.num_pins
        slots = made.publisher._slots
        slot = (target.data_ptr() - slots._pinned.data_ptr()) // width
        assert slots.generation(slot) > last_word.get(slot, 0), "a slot's word was not raised"
        last_word[slot] = slots.generation(slot)

    return check


def _step_held_to_words(made: DeviceParts, pool: BlockPool) -> Callable[[SchedulerOutput], None]:
    """A check of every block that a step is about to write."""

    def check(output: SchedulerOutput) -> None:
        size = made.runner.pool.shape[4]
        for share in output.sequences:
            end = share.start + len(share.token_ids)
            for index in range(share.start // size, -(-end // size)):
                block_id = share.block_table[index]
                block = pool.blocks[block_id]
                assert block.state is BlockState.OPEN and not block.num_transfers
                assert made.pool.generation(block_id) == block.generation

    return check
