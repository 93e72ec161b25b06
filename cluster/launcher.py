"""Starting a cluster: Ray, the worker actors, the router actor; and ending them.

Ray places the actors and ends them; no token and no block passes through it. Owns the order of
starting and stopping; what happens to processes in between is ``cluster.supervision``'s.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from kvferry.cluster.access.settings import load_access
from kvferry.cluster.block_sizes import choose_block_sizes
from kvferry.cluster.colocated_worker import ColocatedWorker
from kvferry.cluster.config import Config
from kvferry.cluster.deaths import Death
from kvferry.cluster.errors import NotReady
from kvferry.cluster.ports import check_port
from kvferry.cluster.ray_actors import end, get, next_epoch, node_id, remote_actor
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.routed_request import RequestView
from kvferry.cluster.router_actor import RouterActor, RouterEndpoints, served_model
from kvferry.cluster.settings import (
    access_settings,
    kv_dtype,
    log_settings,
    router_settings,
    worker_settings,
)
from kvferry.cluster.supervision import RunningRouter, RunningWorker, Starts, Supervision
from kvferry.decode_worker.actor import DecodeWorker
from kvferry.prefill_worker.actor import PrefillWorker
from kvferry.worker.actor import WorkerActor
from kvferry.worker.build import WorkerSettings
from kvferry.worker.cluster_key import SECRET_BYTES, ClusterKey
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef

LEAST_ROUTER_SILENCE_S = 1.5  # a router that tokenizes a long prompt answers late
READY_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
LAST_CALL_S = 2.0  # for a router or workers to end by themselves, after that
ROUTER_NAME = "router-0"

ROLES: dict[str, type[WorkerActor]] = {
    "prefill": PrefillWorker,
    "decode": DecodeWorker,
    "colocated": ColocatedWorker,
}

Say = Callable[[str], None]


class Cluster:
    """A running cluster; ends with ``stop`` or as a context manager.

    Attributes:
        grpc, http, metrics: HOST:PORT of each door; None: no such door.
        ray_address: address of the Ray cluster.
        startup_s: seconds from the call of ``start`` to readiness.
    """

    def __init__(self, config: Config, model_folder: Path, owns_ray: bool) -> None:
        self.grpc = config.server.grpc
        self.http = config.server.http
        self.metrics = config.server.metrics
        self.ray_address = ""
        self.startup_s = 0.0
        self._config = config
        self._model_folder = model_folder
        self._logs = log_settings(config)
        self._owns_ray = owns_ray
        self._key = ClusterKey(secrets.token_bytes(SECRET_BYTES))
        self._settings: dict[str, tuple[str, WorkerSettings]] = {}
        self._router: Any = None
        self._actors: list[Any] = []
        self._supervision: Supervision | None = None
        self._stopped = False

    @classmethod
    def start(cls, config: Config, model_folder: Path, progress: Say) -> Cluster:
        """Start Ray (or join it), the workers and the router; return when ready.

        Raises whatever kept a part from starting, as the error that it was.
        """
        began = time.monotonic()
        if not config.ray.address:  # else the router may be on another host
            server = config.server
            for port in filter(None, (server.grpc, server.http, server.metrics)):
                check_port(port)
            load_access(access_settings(config))  # before a model is loaded for what cannot be
        address = config.ray.address
        progress(f"joining the Ray cluster at {address}" if address else "starting Ray")
        owns_ray = init_ray(config)
        cluster = cls(config, model_folder, owns_ray)
        try:
            cluster._start(progress)
        except BaseException:
            cluster.stop(grace_s=0.0)  # nobody is served yet
            raise
        cluster.startup_s = time.monotonic() - began
        return cluster

    def _start(self, progress: Say) -> None:
        self.ray_address = ray.get_runtime_context().gcs_address
        sizes = choose_block_sizes(self._config, self._model_folder, kv_dtype(self._config))
        for line in sizes.lines:
            progress(line)
        settings = worker_settings(self._config, self._model_folder, sizes, next_epoch, self._key)
        self._settings = {setting.ref.node_id: (role, setting) for role, setting in settings}
        progress(f"starting {len(self._settings)} workers and the router")
        self._router = self._new_router()
        started = []
        for _, setting in self._settings.values():
            actor, pending = self._start_worker(setting)
            self._actors.append(actor)
            started.append((actor, pending))
        workers: list[WorkerDescription] = [get(pending) for _, pending in started]
        for worker in workers:
            progress(f"{worker.member.ref.node_id}: {worker.pool_arithmetic}")
        for warning in sorted({w.kernels_warning for w in workers if w.kernels_warning}):
            progress(f"warning: {warning}")
        self._model = served_model(workers, self._config.model.served_name)
        endpoints = get(self._router.start.remote(self._model, workers))
        self.grpc, self.http, self.metrics = endpoints.grpc, endpoints.http, endpoints.metrics
        self._wait_ready(progress)
        router = RunningRouter(self._router, *get(self._router.whereabouts.remote(node_id)))
        self._supervision = Supervision(
            Starts(self._restart_worker, self._restart_router),
            [
                RunningWorker(actor, description, actor.wait.remote())
                for (actor, _), description in zip(started, workers, strict=True)
            ],
            router,
            max(LEAST_ROUTER_SILENCE_S, self._config.router.heartbeat_timeout),
        )
        self._supervision.start()
        progress("ready")

    def _wait_ready(self, progress: Say) -> None:
        progress("waiting for the workers to connect")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while reasons := get(self._router.not_ready_reasons.remote()):
            if time.monotonic() > deadline:
                raise NotReady(f"not ready after {READY_TIMEOUT_S:g} s: {'; '.join(reasons)}")
            time.sleep(READY_POLL_S)  # the router tells when it is asked only

    def _new_router(self) -> Any:
        ref = NodeRef(ROUTER_NAME, next_epoch())
        doors = RouterEndpoints(self.grpc, self.http, self.metrics)
        settings = router_settings(self._config, self._model_folder, ref, doors, self._key)
        return remote_actor(RouterActor, 1, self._config).remote(settings, self._logs)

    def _start_worker(self, setting: WorkerSettings) -> tuple[Any, Any]:
        role, _ = self._settings[setting.ref.node_id]
        actor = remote_actor(ROLES[role], setting.threads, self._config).remote(setting, self._logs)
        return actor, actor.start.remote(actor.__ray_call__.remote(node_id))

    def _restart_worker(self, name: str) -> tuple[Any, Any]:
        """The worker of this name in a new life, on its way."""
        _, setting = self._settings[name]
        return self._start_worker(replace(setting, ref=NodeRef(name, next_epoch())))

    def _restart_router(self, workers: list[WorkerDescription]) -> tuple[Any, Any]:
        """The router in a new life, at the same address, on its way."""
        actor = self._new_router()
        return actor, actor.start.remote(self._model, workers)

    def processes(self) -> dict[NodeRef, int]:
        """Process ids of the workers and the router in their present lives."""
        assert self._supervision is not None
        return self._supervision.processes()

    def deaths(self) -> list[Death]:
        """The last deaths that were declared."""
        assert self._supervision is not None
        return self._supervision.deaths()

    def request_views(self, timeout_s: float = 2.0) -> list[RequestView] | None:
        """Every live request of the router; None while no router answers."""
        assert self._supervision is not None
        router, _ = self._supervision.actors()
        try:
            views: list[RequestView] = ray.get(router.request_views.remote(), timeout=timeout_s)
        except ray.exceptions.RayError:  # a time-out too
            return None
        return views

    def stop(self, grace_s: float = 0.0) -> None:
        """Let streams finish for ``grace_s`` seconds, end the rest, end every process; idempotent.

        Whatever a process does, or does not, it is over ``2 * LAST_CALL_S`` seconds later.
        """
        if self._stopped:
            return
        self._stopped = True
        router, actors = self._router, self._actors
        if self._supervision is not None:
            self._supervision.stop()
            router, actors = self._supervision.actors()
        if router is not None:
            end([router.stop.remote(grace_s)], grace_s + LAST_CALL_S)
        end([actor.stop.remote() for actor in actors], LAST_CALL_S)
        for actor in [*actors, router]:
            if actor is not None:
                ray.kill(actor)
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
