"""Builds a worker from its settings: model, pool, connector, engine.

The one place where a worker's parts are chosen. Knows no role, no Ray and no router.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.engine import Engine
from kvferry.engine.kernel_choice import AUTO as AUTO_KERNELS
from kvferry.engine.kernel_choice import ChosenKernels, choose_kernels
from kvferry.engine.model_runner import TorchModelRunner, peak_step_bytes
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout, load_model
from kvferry.engine.models.size import ModelSize
from kvferry.engine.offload import Offloading
from kvferry.engine.pool_sizing import PoolSize, memory_limit, size_pool
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.kv_transfer.choosing import AUTO
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.connectors import make_connector
from kvferry.worker.disk_folder import HEADER_BYTES, DiskFolder
from kvferry.worker.host_memory import HostMemory
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import Worker, WorkerTimes

RESERVE_BYTES = 512 << 20
"""Memory left for the interpreter and its libraries when a pool is sized automatically."""


class HostTierTooSmall(KVFerryError):
    """The host tier does not hold a single block; names the sizes."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that a worker needs to know to start; plain data, so that it can travel.

    Attributes:
        ref: the worker's id and epoch.
        model_folder: folder in Hugging Face layout.
        prefix_caching: keep the KV of ended requests for others with the same beginning.
        match_unit: tokens per value of a hash chain, the same for all workers; None: the block
            size.
        max_model_len: tokens of one request at most; None: what the model and the pool allow.
        num_blocks, pool_bytes: the pool as asked for; both None sizes it automatically.
        memory_share: this worker's part of the machine's memory, for automatic sizing.
        threads: compute threads.
        kernels, isa: see ``engine.kernel_choice.choose_kernels``.
        connector: ``auto``, ``shm`` or ``tcp``.
        host: address that this worker listens on.
        checksum: verify a digest of every block moved.
        max_in_flight_blocks: blocks copied per poll of the connector.
        faults: what to inject into transfers, for trials.
        host_bytes: memory of the host tier; 0 for none.
        disk_path, disk_bytes: the folder that it may use beside that, and how much of it.
        key: what every other node must know; None: anybody may send messages and read blocks.
    """

    ref: NodeRef
    model_folder: str
    dtype: ModelDtype
    kv_dtype: str
    scheduler: SchedulerConfig
    times: WorkerTimes
    block_size: int = 16
    prefix_caching: bool = True
    match_unit: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    pool_bytes: int | None = None
    memory_share: float = 0.5
    threads: int = 1
    kernels: str = AUTO_KERNELS
    isa: str = AUTO_KERNELS
    connector: str = AUTO
    host: str = "127.0.0.1"
    checksum: bool = True
    max_in_flight_blocks: int = 64
    faults: FaultPlan | None = None
    audit_every_step: bool = False
    host_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int = 0
    key: ClusterKey | None = None


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker, and what start-up has to say about it."""

    worker: Worker
    model: ModelConfig
    size: ModelSize
    layout: KVCacheLayout
    pool: PoolSize
    max_model_len: int
    kernels: ChosenKernels


def build_worker(settings: WorkerSettings) -> BuiltWorker:
    """Load the model, allocate the pool, open the connector.

    Raises KernelsUnavailable, ModelError, PoolTooSmall, PoolMemoryUnavailable, HostTierTooSmall,
    HostMemoryUnavailable or DiskUnavailable.
    """
    torch.set_num_threads(settings.threads)
    chosen = choose_kernels(settings.kernels, settings.isa)
    model = load_model(Path(settings.model_folder), settings.dtype, chosen.kernels)
    config = model.config
    layout = kv_layout(config, settings.block_size, settings.kv_dtype)
    pool_size = _size_pool(settings, model, layout)
    max_len = min(
        settings.max_model_len or config.max_model_len,
        config.max_model_len,
        pool_size.num_blocks * layout.block_size,
    )
    memory = allocate_shared(pool_size.num_blocks, layout.block_bytes())
    model_id = f"{config.name}@{config.revision}"
    connector = make_connector(
        memory,
        layout,
        settings.ref,
        model_id,
        configured=settings.connector,
        host=settings.host,
        checksum=settings.checksum,
        max_in_flight_blocks=settings.max_in_flight_blocks,
        faults=settings.faults,
        match_unit=settings.match_unit or 0,
        key=None if settings.key is None else settings.key.for_blocks(),
    )
    runner = TorchModelRunner(
        model,
        torch.from_numpy(memory.blocks),
        layout,
        pool_size.num_blocks,
        settings.scheduler.max_num_batched_tokens,
        settings.scheduler.max_num_seqs,
    )
    engine = Engine(
        settings.scheduler,
        runner,
        BlockPool(
            pool_size.num_blocks,
            memory.raise_generation,
            PrefixIndex() if settings.prefix_caching else None,
            time.monotonic,
        ),
        layout.block_size,
        model_id,
        time.monotonic,
        settings.match_unit,
        host_tier(settings, memory.blocks),
    )
    worker = Worker(settings.ref, engine, connector, settings.times, settings.checksum)
    return BuiltWorker(worker, config, ModelSize.of(model), layout, pool_size, max_len, chosen)


def host_tier(settings: WorkerSettings, blocks: NDArray[np.uint8]) -> Offloading | None:
    """Where KV may wait outside the pool ``blocks``, uint8 ``[num_blocks, block_bytes]``; None if
    nowhere. Raises HostTierTooSmall, HostMemoryUnavailable or DiskUnavailable.
    """
    if not settings.host_bytes:
        return None
    block_bytes = int(blocks.shape[1])
    num_slots = settings.host_bytes // block_bytes
    num_files = settings.disk_bytes // (block_bytes + HEADER_BYTES) if settings.disk_path else 0
    if not num_slots or (settings.disk_path and not num_files):
        raise HostTierTooSmall(
            f"cache.host_tier has {settings.host_bytes} bytes of memory and {settings.disk_bytes} "
            f"of disk, a block has {block_bytes}: give each room for one block at least"
        )
    disk = DiskFolder(Path(settings.disk_path), block_bytes) if settings.disk_path else None
    return Offloading(
        HostTier(num_slots, num_files, settings.prefix_caching),
        HostMemory(blocks, num_slots, disk),
        settings.block_size,
        time.monotonic,
    )


def _size_pool(settings: WorkerSettings, model: LlamaModel, layout: KVCacheLayout) -> PoolSize:
    limit = settings.scheduler
    max_len = min(settings.max_model_len or model.config.max_model_len, model.config.max_model_len)
    return size_pool(
        memory_limit(),
        settings.memory_share,
        model.weights.num_bytes(),
        peak_step_bytes(model, layout, limit.max_num_batched_tokens, limit.max_num_seqs),
        RESERVE_BYTES + settings.host_bytes,
        layout.block_bytes(),
        useful_blocks=limit.max_num_seqs * layout.num_blocks_for(max_len),
        requested_memory=settings.pool_bytes,
        requested_blocks=settings.num_blocks,
        min_blocks=layout.num_blocks_for(max_len) if settings.max_model_len else 1,
    )
