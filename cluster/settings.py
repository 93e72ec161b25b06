"""From the configuration to the settings of each worker and of the router."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvferry.cluster.access.settings import AccessSettings, TenantSettings
from kvferry.cluster.access.tenants import Tenant
from kvferry.cluster.access.tls import TlsFiles
from kvferry.cluster.block_sizes import BlockSizes
from kvferry.cluster.config import Config
from kvferry.cluster.config_access import salt_of
from kvferry.cluster.router_actor import RouterEndpoints, RouterSettings
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.server_limits import ServerLimits
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.worker.build import WorkerSettings
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.logs import LogSettings
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import WorkerTimes


def model_dtype(config: Config) -> ModelDtype:
    """Element type of the weights; on a CPU float32 unless another is asked for."""
    return "float32" if config.model.dtype == "auto" else config.model.dtype


def kv_dtype(config: Config) -> str:
    """Element type of every pool: that of activations unless another is asked for."""
    if config.cache.kv_dtype != "auto":
        return config.cache.kv_dtype
    return "bfloat16" if model_dtype(config) == "bfloat16" else "float32"


def worker_settings(
    config: Config,
    model_folder: Path,
    block_sizes: BlockSizes,
    epoch: Callable[[], int],
    key: ClusterKey | None,
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
    faults = config.transfer.faults
    settings = []
    for role, count in counts.items():
        section = getattr(config, role)
        for index in range(count):
            setting = WorkerSettings(
                ref=NodeRef(f"{role}-{index}", epoch()),
                model_folder=str(model_folder),
                dtype=model_dtype(config),
                kv_dtype=kv_dtype(config),
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
                block_size=block_sizes.by_role[role],
                prefix_caching=config.cache.prefix_caching,
                match_unit=block_sizes.match_unit,
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
                key=key,
            )
            settings.append((role, setting))
    return settings


def _ageing(config: Config) -> float | None:
    """Seconds of waiting per level of priority; None where priorities mean nothing."""
    return config.scheduler.ageing if config.scheduler.policy == "priority" else None


def log_settings(config: Config) -> LogSettings:
    """How every process logs."""
    return LogSettings(config.logging.level.upper(), config.logging.format)


def access_settings(config: Config) -> AccessSettings:
    """Who may call; files by absolute paths, for the router's process has another folder."""
    tls = config.server.tls
    files = None
    if tls.cert is not None and tls.key is not None:
        client_ca = None if tls.client_ca is None else _absolute(tls.client_ca)
        files = TlsFiles(_absolute(tls.cert), _absolute(tls.key), client_ca)
    tokens = config.server.auth.tokens_file
    tenants = (
        TenantSettings(
            Tenant(name, salt_of(name, each), each.tokens_per_s), _absolute(each.key_file)
        )
        for name, each in config.tenants.items()
    )
    return AccessSettings(files, None if tokens is None else _absolute(tokens), tuple(tenants))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def router_settings(
    config: Config,
    model_folder: Path,
    ref: NodeRef,
    doors: RouterEndpoints,
    key: ClusterKey | None,
) -> RouterSettings:
    """The router's settings, listening at its ``doors``."""
    return RouterSettings(
        ref,
        str(model_folder),
        doors,
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
        access=access_settings(config),
        key=key,
    )
