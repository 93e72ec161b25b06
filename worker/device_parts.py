"""The parts of a worker whose pool lies in a device's memory.

Owns how they are put together: pool and runner on the device, slots of pinned host memory between
them and the connectors. Knows the device only by its protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine.device.protocol import Device
from kvferry.engine.device.runner import DeviceModelRunner, num_scratch_blocks
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.authentication import NoKey
from kvferry.kv_transfer.choosing import AUTO
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.worker.connectors import make_connector
from kvferry.worker.messages import NodeRef
from kvferry.worker.staging.connector import StagingConnector
from kvferry.worker.staging.device_pool import DevicePool
from kvferry.worker.staging.publisher import StagingPublisher
from kvferry.worker.staging.slots import Slots


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a worker's blocks move; see ``worker.connectors.make_connector``.

    ``staging_blocks`` are the slots of pinned memory for reading, and as many for publishing.
    ``key``: what TCP peers must know.
    """

    configured: str = AUTO
    host: str = "127.0.0.1"
    checksum: bool = True
    max_in_flight_blocks: int = 64
    staging_blocks: int = 128
    faults: FaultPlan | None = None
    match_unit: int = 0
    key: bytes | NoKey = field(kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a worker is made of, and the memory that tests look into.

    Attributes:
        pool: the blocks, and the generation words to be raised.
        runner: computes on them.
        connector, publisher: move them.
    """

    pool: DevicePool
    runner: DeviceModelRunner
    connector: StagingConnector
    publisher: StagingPublisher


def make_device_parts(
    device: Device,
    model: LlamaModel,
    layout: KVCacheLayout,
    num_blocks: int,
    scheduler: SchedulerConfig,
    ref: NodeRef,
    model_id: str,
    transfer: TransferOptions,
    max_model_len: int | None = None,
) -> DeviceParts:
    """Allocate pool and slots, open the connectors.

    Slots for reading and for publishing are kept apart: of two workers that read from each other
    neither waits for slots that it gets back only when the other one has read.

    Raises PoolMemoryUnavailable, PinningFailed, or what ``make_connector`` raises.
    """
    block_bytes = layout.block_bytes()
    num_scratch = num_scratch_blocks(scheduler.max_num_seqs, layout.block_size)
    memory = device.zeros((num_blocks + num_scratch) * block_bytes).view(-1, block_bytes)
    pool = DevicePool(memory, num_blocks)
    runner = DeviceModelRunner(
        device,
        model,
        memory,
        layout,
        num_blocks,
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
        max_model_len,
    )
    count = transfer.staging_blocks
    staging = allocate_shared(2 * count, block_bytes)
    pinned = device.pin(staging.blocks)
    inner = make_connector(
        staging,
        layout,
        ref,
        model_id,
        configured=transfer.configured,
        host=transfer.host,
        checksum=transfer.checksum,
        max_in_flight_blocks=transfer.max_in_flight_blocks,
        faults=transfer.faults,
        match_unit=transfer.match_unit,
        key=transfer.key,
    )
    outward = Slots(staging, pinned, range(count), device.stream())
    inward = Slots(staging, pinned, range(count, 2 * count), device.stream())
    publisher = StagingPublisher(ref.epoch, pool, staging, outward, inner, transfer.checksum)

    def close_slots() -> None:
        """Nothing is copied any more, so that the slots' memory may go."""
        outward.close()
        inward.close()
        device.unpin(staging.blocks)

    connector = StagingConnector(inner, pool, inward, close_slots)
    return DeviceParts(pool, runner, connector, publisher)
