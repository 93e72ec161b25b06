"""Builds a worker from its settings: model, pool, connector, engine.

The one place where a worker's parts are chosen. Knows no role, no Ray and no router.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.batch import ModelRunner
from kvferry.engine.device.choice import CPU, CUDA, choose_device
from kvferry.engine.device.cuda import CudaDevice
from kvferry.engine.device.protocol import Device
from kvferry.engine.device.runner import device_step_bytes
from kvferry.engine.engine import Engine
from kvferry.engine.kernel_choice import AUTO as AUTO_KERNELS
from kvferry.engine.kernel_choice import (
    TRITON,
    ChosenKernels,
    check_pool_dtype,
    choose_gpu_kernels,
    choose_kernels,
)
from kvferry.engine.model_runner import TorchModelRunner, peak_step_bytes
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout, load_model
from kvferry.engine.models.size import ModelSize
from kvferry.engine.offload import Offloading
from kvferry.engine.pool_sizing import (
    CPU_POOL_CAP_BYTES,
    PoolSize,
    device_memory_limit,
    memory_limit,
    size_pool,
)
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kernels import reference
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.kv_transfer.authentication import NoKey
from kvferry.kv_transfer.choosing import AUTO
from kvferry.kv_transfer.connector import KVConnector
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.worker.cluster_key import ClusterKey, for_blocks
from kvferry.worker.connectors import make_connector
from kvferry.worker.device_parts import TransferOptions, make_device_parts
from kvferry.worker.disk_folder import HEADER_BYTES, DiskFolder
from kvferry.worker.host_memory import HostMemory
from kvferry.worker.messages import NodeRef
from kvferry.worker.publishing import Publisher
from kvferry.worker.worker import Worker, WorkerTimes

DEVICE_RESERVE_BYTES = 1 << 30
"""Memory of a GPU left for CUDA, compiled kernels, captured graphs and scratch blocks."""
RESERVE_BYTES = 512 << 20
"""Memory left for the interpreter and its libraries when a pool is sized automatically."""


class HostTierTooSmall(KVFerryError):
    """The host tier does not hold a single block; names the sizes."""

    exit_code = 2


class HostTierUnsupported(KVFerryError):
    """A host tier is asked for where the pool lies on a GPU; names what to change."""

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
        role: whose section of the configuration errors name.
        device: ``auto``, ``cpu`` or ``cuda``.
        gpus: the part of a GPU that it has, in (0, 1].
        staging_blocks: slots of pinned host memory for reading, and as many for publishing, where
            the pool lies on a GPU.
        threads: compute threads.
        pin_cores: keep to as many cores that no other worker of the host has, if there are.
        kernels, isa: see ``engine.kernel_choice.choose_kernels``.
        connector: ``auto``, ``shm`` or ``tcp``.
        host: address that this worker listens on.
        checksum: verify a digest of every block moved.
        max_in_flight_blocks: blocks copied per poll of the connector.
        faults: what to inject into transfers, for trials.
        host_bytes: memory of the host tier; 0 for none.
        disk_path, disk_bytes: the folder that it may use beside that, and how much of it.
        key: what every other node must know.
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
    role: str = "worker"
    device: str = CPU
    gpus: float = 1.0
    staging_blocks: int = 128
    threads: int = 1
    pin_cores: bool = False
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
    key: ClusterKey | NoKey = field(kw_only=True)


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """What depends on where the pool lies. ``publisher``: None where peers read it as it lies."""

    runner: ModelRunner
    raise_word: Callable[[int, int], None]
    connector: KVConnector
    publisher: Publisher | None = None
    offloading: Offloading | None = None


def build_worker(settings: WorkerSettings) -> BuiltWorker:
    """Load the model, allocate the pool, open the connector.

    Raises DeviceUnavailable, KernelsUnavailable, ModelError, PoolTooSmall, PoolMemoryUnavailable,
    PinningFailed, HostTierTooSmall, HostTierUnsupported, HostMemoryUnavailable or DiskUnavailable.
    """
    torch.set_num_threads(settings.threads)
    is_cuda = choose_device(settings.device, settings.role) == CUDA
    return build_on(settings, CudaDevice() if is_cuda else None)


def build_on(settings: WorkerSettings, device: Device | None) -> BuiltWorker:
    """The same on a given device; None is the CPU."""
    chosen = (
        choose_kernels(settings.kernels, settings.isa)
        if device is None
        else choose_gpu_kernels(settings.kernels, device.architecture)
    )
    check_pool_dtype(chosen, settings.kv_dtype)
    if device is not None and settings.host_bytes:
        raise HostTierUnsupported(
            f"{settings.ref.node_id} computes on a GPU, where cache.host_tier is not supported "
            f"yet: leave it out, or set {settings.role}.device to cpu"
        )
    where = None if device is None else device.torch_device
    model = load_model(Path(settings.model_folder), settings.dtype, chosen.kernels, where)
    config = model.config
    layout = kv_layout(config, settings.block_size, settings.kv_dtype)
    pool_size = _size_pool(settings, model, layout, device)
    max_len = min(
        settings.max_model_len or config.max_model_len,
        config.max_model_len,
        pool_size.num_blocks * layout.block_size,
    )
    model_id = f"{config.name}@{config.revision}"
    if device is None:
        parts = _host_parts(settings, model, layout, pool_size.num_blocks, model_id)
    else:
        has_graphs = chosen.implementation == TRITON  # others wait for the device amid a step
        parts = _device_parts(
            settings, device, model, layout, pool_size.num_blocks, model_id, has_graphs
        )
    engine = Engine(
        settings.scheduler,
        parts.runner,
        BlockPool(
            pool_size.num_blocks,
            parts.raise_word,
            PrefixIndex() if settings.prefix_caching else None,
            time.monotonic,
        ),
        layout.block_size,
        model_id,
        time.monotonic,
        settings.match_unit,
        parts.offloading,
    )
    worker = Worker(
        settings.ref,
        engine,
        parts.connector,
        settings.times,
        settings.checksum,
        parts.publisher,
    )
    return BuiltWorker(worker, config, ModelSize.of(model), layout, pool_size, max_len, chosen)


def _host_parts(
    settings: WorkerSettings,
    model: LlamaModel,
    layout: KVCacheLayout,
    num_blocks: int,
    model_id: str,
) -> _Parts:
    """A pool in memory that peers read as it lies."""
    memory = allocate_shared(num_blocks, layout.block_bytes())
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
        key=for_blocks(settings.key),
    )
    runner = TorchModelRunner(
        model,
        torch.from_numpy(memory.blocks),
        layout,
        num_blocks,
        settings.scheduler.max_num_batched_tokens,
        settings.scheduler.max_num_seqs,
    )
    offloading = host_tier(settings, memory.blocks)
    return _Parts(runner, memory.raise_generation, connector, offloading=offloading)


def _device_parts(
    settings: WorkerSettings,
    device: Device,
    model: LlamaModel,
    layout: KVCacheLayout,
    num_blocks: int,
    model_id: str,
    has_graphs: bool,
) -> _Parts:
    """A pool on a device."""
    options = TransferOptions(
        settings.connector,
        settings.host,
        settings.checksum,
        settings.max_in_flight_blocks,
        settings.staging_blocks,
        settings.faults,
        settings.match_unit or 0,
        key=for_blocks(settings.key),
    )
    made = make_device_parts(
        device,
        model,
        layout,
        num_blocks,
        settings.scheduler,
        settings.ref,
        model_id,
        options,
        settings.max_model_len,
    )
    if has_graphs:
        made.runner.capture_graphs()
    return _Parts(made.runner, made.pool.raise_generation, made.connector, made.publisher)


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


def _size_pool(
    settings: WorkerSettings, model: LlamaModel, layout: KVCacheLayout, device: Device | None
) -> PoolSize:
    limit = settings.scheduler
    max_len = min(settings.max_model_len or model.config.max_model_len, model.config.max_model_len)
    weights_bytes = model.weights.num_bytes()
    if device is None:
        memory, share, reserve = memory_limit(), settings.memory_share, RESERVE_BYTES
        cap = CPU_POOL_CAP_BYTES
    else:
        memory = device_memory_limit(*device.memory(), weights_bytes, settings.gpus)
        share, reserve, cap = 1.0, DEVICE_RESERVE_BYTES, memory
    if device is None or model.kernels is reference:
        peak = peak_step_bytes(model, layout, limit.max_num_batched_tokens, limit.max_num_seqs)
    else:
        peak = device_step_bytes(model, limit.max_num_batched_tokens, limit.max_num_seqs)
    return size_pool(
        memory,
        share,
        weights_bytes,
        peak,
        reserve + settings.host_bytes,
        layout.block_bytes(),
        useful_blocks=limit.max_num_seqs * layout.num_blocks_for(max_len),
        requested_memory=settings.pool_bytes,
        requested_blocks=settings.num_blocks,
        min_blocks=layout.num_blocks_for(max_len) if settings.max_model_len else 1,
        cap_bytes=cap,
    )
