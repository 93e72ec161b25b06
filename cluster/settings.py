"""From the configuration to the settings of each worker and of the router. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvferry.cluster.config import Config
from kvferry.cluster.router_actor import RouterSettings
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.server_limits import ServerLimits
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.worker.build import WorkerSettings
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import WorkerTimes


def worker_settings(
    config: Config, model_folder: Path, epoch: Callable[[], int]
) -> list[tuple[str, WorkerSettings]]:
    """The workers that a configuration asks for: (role, settings)."""
    replicas = config.replicas()
    counts = {
        "prefill": replicas.prefill,
        "decode": replicas.decode,
        "colocated": replicas.colocated,
    }
    total = sum(counts.values())
    share = max(1, len(os.sched_getaffinity(0)) // total)
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    activations = "bfloat16" if dtype == "bfloat16" else "float32"
    kv_dtype = activations if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    faults = config.transfer.faults
    settings = []
    for role, count in counts.items():
        section = getattr(config, role)
        for index in range(count):
            setting = WorkerSettings(
                ref=NodeRef(f"{role}-{index}", epoch()),
                model_folder=str(model_folder),
                dtype=dtype,
                kv_dtype=kv_dtype,
                scheduler=SchedulerConfig(
                    config.scheduler.max_num_seqs,
                    config.scheduler.max_num_batched_tokens,
                    config.scheduler.chunk_tokens,
                    config.scheduler.watermark,
                    _ageing(config),
                ),
                times=WorkerTimes(
                    config.transfer.list_period,
                    config.transfer.heartbeat,
                    config.router.heartbeat_timeout,
                    config.transfer.stall_limit,
                    config.transfer.read_timeout,
                ),
                block_size=config.cache.block_size,
                prefix_caching=config.cache.prefix_caching,
                match_unit=config.cache.prefix_match_unit,
                max_model_len=config.model.max_model_len,
                num_blocks=section.num_blocks or config.cache.num_blocks,
                pool_bytes=None if section.num_blocks else config.cache.memory,
                memory_share=1.0 / total,
                threads=section.threads or share,
                kernels=config.debug.kernels,
                isa=config.debug.isa,
                connector=config.transfer.connector,
                checksum=config.transfer.checksum != "never",
                max_in_flight_blocks=config.transfer.max_in_flight_blocks,
                faults=None if faults == type(faults)() else FaultPlan(**faults.model_dump()),
                audit_every_step=config.debug.audit_every_step,
                host_bytes=config.cache.host_tier.memory or 0,
                disk_path=config.cache.host_tier.disk_path,
                disk_bytes=config.cache.host_tier.disk_size or 0,
            )
            settings.append((role, setting))
    return settings


def _ageing(config: Config) -> float | None:
    """Seconds of waiting per level of priority; None where priorities mean nothing."""
    return config.scheduler.ageing if config.scheduler.policy == "priority" else None


def router_settings(config: Config, model_folder: Path, ref: NodeRef, grpc: str) -> RouterSettings:
    """The router's settings, listening on ``grpc``."""
    return RouterSettings(
        ref,
        str(model_folder),
        grpc,
        RouterConfig(
            config.router.queue_limit,
            config.router.max_attempts,
            config.router.worker_wait,
            config.transfer.list_period,
            config.transfer.heartbeat,
            config.router.heartbeat_timeout,
            config.transfer.stall_limit,
            _ageing(config),
        ),
        config.router.prefill_window,
        config.model.served_name,
        limits=ServerLimits(
            config.server.max_message_bytes,
            config.server.keepalive,
            config.server.keepalive_timeout,
            config.server.slow_client_limit,
        ),
    )
