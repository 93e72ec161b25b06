"""Starting a cluster: Ray, the worker actors, the router actor; and ending them.

Ray places the actors, watches them and ends them; no token and no block passes through it. Owns
the processes' lives and the epochs; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv

from kvferry.cluster.colocated_worker import ColocatedWorker
from kvferry.cluster.config import Config
from kvferry.cluster.errors import NotReady
from kvferry.cluster.grpc_server import check_port
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.router import RouterConfig
from kvferry.cluster.router_actor import RouterActor, RouterSettings
from kvferry.decode_worker.actor import DecodeWorker
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_transfer.faults import FaultPlan
from kvferry.prefill_worker.actor import PrefillWorker
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef
from kvferry.worker.worker import WorkerTimes

START_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
EPOCH_NAMESPACE = b"kvferry"

ROLES: dict[str, type[WorkerActor]] = {
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
    "colocated": ColocatedWorker,
}

Say = Callable[[str], None]


class Cluster:
    """A running cluster; ends with ``stop`` or as a context manager.

    Attributes:
        grpc: HOST:PORT of the gRPC endpoint.
        ray_address: address of the Ray cluster.
        startup_s: seconds from the call of ``start`` to readiness.
    """

    def __init__(self, owns_ray: bool) -> None:
        self.grpc = ""
        self.ray_address = ""
        self.startup_s = 0.0
        self.workers: list[WorkerDescription] = []
        self._owns_ray = owns_ray
        self._router: Any = None
        self._actors: list[Any] = []
        self._stopped = False

    @classmethod
    def start(cls, config: Config, model_folder: Path, progress: Say) -> Cluster:
        """Start Ray (or join it), the workers and the router; return when ready.

        Raises whatever kept a part from starting, as the error that it was.
        """
        began = time.monotonic()
        if not config.ray.address:  # else the router may be on another host
            check_port(config.server.grpc)
        progress("starting Ray")
        cluster = cls(owns_ray=init_ray(config))
        try:
            cluster._start(config, model_folder, progress)
        except BaseException:
            cluster.stop(timeout_s=0.0)  # nobody is served yet
            raise
        cluster.startup_s = time.monotonic() - began
        return cluster

    def _start(self, config: Config, model_folder: Path, progress: Say) -> None:
        self.ray_address = ray.get_runtime_context().gcs_address
        settings = worker_settings(config, model_folder, next_epoch)
        progress(f"starting {len(settings)} workers and the router")
        level = config.logging.level.upper()
        router_settings = RouterSettings(
            NodeRef("router-0", next_epoch()),
            str(model_folder),
            config.server.grpc,
            router_config(config),
            config.router.prefill_window,
            config.model.served_name,
        )
        self._router = _actor(RouterActor, 1, config).remote(router_settings, level)
        started = []
        for role, setting in settings:
            actor = _actor(ROLES[role], setting.threads, config).remote(setting, "127.0.0.1", level)
            self._actors.append(actor)
            started.append(actor.start.remote(actor.__ray_call__.remote(_node_id)))
        self.workers = [_get(ref) for ref in started]
        for worker in self.workers:
            progress(f"{worker.member.ref.node_id}: {worker.pool_arithmetic}")
        self.grpc = _get(self._router.start.remote(self.workers))
        self._wait_ready(progress)

    def _wait_ready(self, progress: Say) -> None:
        progress("waiting for the workers to connect")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while reasons := _get(self._router.not_ready_reasons.remote()):
            if time.monotonic() > deadline:
                raise NotReady(f"not ready after {READY_TIMEOUT_S:g} s: {'; '.join(reasons)}")
            time.sleep(READY_POLL_S)
        progress("ready")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Let streams finish for half the time, end the rest, end every process; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        grace = timeout_s / 2
        if self._router is not None:
            _end([self._router.stop.remote(grace)], timeout_s)
        _end([actor.stop.remote() for actor in self._actors], timeout_s / 2)
        for actor in [*self._actors, self._router]:
            if actor is not None:
                ray.kill(actor)
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


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
    kv_dtype = dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
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
                ),
                times=WorkerTimes(
                    config.transfer.list_period,
                    config.transfer.heartbeat,
                    config.router.heartbeat_timeout,
                    config.transfer.stall_limit,
                ),
                block_size=config.cache.block_size,
                max_model_len=config.model.max_model_len,
                num_blocks=section.num_blocks or config.cache.num_blocks,
                pool_bytes=None if section.num_blocks else config.cache.memory,
                memory_share=1.0 / total,
                threads=section.threads or share,
                checksum=config.transfer.checksum != "never",
                max_in_flight_blocks=config.transfer.max_in_flight_blocks,
                faults=None if faults == type(faults)() else FaultPlan(**faults.model_dump()),
                audit_every_step=config.debug.audit_every_step,
            )
            settings.append((role, setting))
    return settings


def router_config(config: Config) -> RouterConfig:
    """The router's limits."""
    return RouterConfig(
        config.router.queue_limit,
        config.router.max_attempts,
        config.router.worker_wait,
        config.transfer.list_period,
        config.transfer.heartbeat,
        config.router.heartbeat_timeout,
    )


def next_epoch() -> int:
    """A number never given before in this Ray cluster: its store decides who was first."""
    epoch = int(internal_kv._internal_kv_get(b"epoch", namespace=EPOCH_NAMESPACE) or 0)
    while True:
        epoch += 1
        key = f"epoch/{epoch}".encode()
        taken = internal_kv._internal_kv_put(key, b"", overwrite=False, namespace=EPOCH_NAMESPACE)
        if not taken:
            break
    internal_kv._internal_kv_put(
        b"epoch", str(epoch).encode(), overwrite=True, namespace=EPOCH_NAMESPACE
    )
    return epoch


def _actor(cls: type, threads: int, config: Config) -> Any:
    """``cls`` as a Ray actor with its share of the cores; OpenMP must know it before it loads."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return ray.remote(cls).options(
        num_cpus=threads if config.ray.address else 0,
        max_concurrency=4,
        max_restarts=0,
        runtime_env={"env_vars": env},
    )


def _node_id(_actor: object) -> str:
    """Ray's id of the node that an actor was placed on; runs in the actor's process."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _get(ref: Any) -> Any:
    """A remote call's result; an error of ours is raised as itself."""
    try:
        return ray.get(ref, timeout=START_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KVFerryError):
            raise cause from None
        raise


def _end(refs: Sequence[Any], timeout_s: float) -> None:
    """Wait for calls that end something; one that is dead already has ended."""
    for ref in refs:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(ref, timeout=timeout_s)
