"""From the configuration to the settings of each worker and of the router."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvferry.cluster.access.settings import AccessSettings, TenantSettings
from kvferry.cluster.access.tenants import Tenant
from kvferry.cluster.access.tls import TlsFiles
from kvferry.cluster.block_sizes import BlockSizes
from kvferry.cluster.config import Config
from kvferry.cluster.config_access import salt_of
from kvferry.cluster.config_schema import RoleConfig
from kvferry.cluster.config_types import Section
from kvferry.cluster.devices import gpus_of
from kvferry.cluster.router_actor import RouterEndpoints, RouterSettings
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.server_limits import ServerLimits, connections_for
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.authentication import NoKey
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.worker.build import WorkerSettings
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.logs import LogSettings
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import WorkerTimes

LOOPBACK = "127.0.0.1"
S = TypeVar("S", bound=Section)


def model_dtype(config: Config) -> ModelDtype:
    """Element type of the weights; float32 where ``cluster.devices`` has not settled another."""
    return "float32" if config.model.dtype == "auto" else config.model.dtype


def kv_dtype(config: Config) -> str:
    """Element type of every pool: that of activations unless another is asked for."""
    if config.cache.kv_dtype != "auto":
        return config.cache.kv_dtype
    return "bfloat16" if model_dtype(config) == "bfloat16" else "float32"


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's part of its host: threads, a share of the memory, whether cores are its own."""

    threads: int
    memory: float
    pin_cores: bool = False


def role_counts(config: Config) -> dict[str, int]:
    """How many workers of each role a configuration asks for."""
    replicas = config.replicas()
    return {
        "prefill": replicas.prefill,
        "decode": replicas.decode,
        "colocated": replicas.colocated,
    }


def fixed_threads(config: Config, role: str) -> int | None:
    """Threads of each worker of a role as the configuration says them; None: it does not."""
    section: RoleConfig = getattr(config, role)
    if section.threads is not None:
        return section.threads
    cpus = section.resources.get("CPU", 0.0)
    return max(1, int(cpus)) if cpus else None


def worker_setting(
    config: Config,
    model_folder: Path,
    block_sizes: BlockSizes,
    role: str,
    ref: NodeRef,
    share: Share,
    key: ClusterKey | NoKey,
) -> WorkerSettings:
    """The settings of one worker."""
    faults = config.transfer.faults
    section: RoleConfig = getattr(config, role)
    return WorkerSettings(
        ref=ref,
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
        memory_share=share.memory,
        role=role,
        device=section.device,
        gpus=gpus_of(section),
        staging_blocks=config.transfer.staging_blocks,
        threads=share.threads,
        pin_cores=share.pin_cores,
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


def absolute_paths(config: Config) -> Config:
    """The same, with the files of who may call by absolute paths: whoever starts the router may be
    in another folder.
    """
    tls = _with_absolute(config.server.tls, "cert", "key", "client_ca")
    auth = _with_absolute(config.server.auth, "tokens_file")
    server = config.server.model_copy(update={"tls": tls, "auth": auth})
    tenants = {name: _with_absolute(each, "key_file") for name, each in config.tenants.items()}
    return config.model_copy(update={"server": server, "tenants": tenants})


def _with_absolute(section: S, *keys: str) -> S:
    given = {key: path for key in keys if (path := getattr(section, key)) is not None}
    return section.model_copy(update={key: _absolute(path) for key, path in given.items()})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def router_settings(
    config: Config,
    model_folder: Path,
    ref: NodeRef,
    doors: RouterEndpoints,
    key: ClusterKey | NoKey,
    bind_host: str = LOOPBACK,
) -> RouterSettings:
    """The router's settings, listening at its ``doors``, and for workers at ``bind_host``."""
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
        bind_host,
        limits=ServerLimits(
            config.server.max_message_bytes,
            config.server.keepalive,
            config.server.keepalive_timeout,
            config.server.slow_client_limit,
            max_connections=connections_for(config.router.queue_limit),
            max_streams=connections_for(config.router.queue_limit),
        ),
        access=access_settings(config),
        key=key,
    )
