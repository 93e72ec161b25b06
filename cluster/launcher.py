"""Starting a cluster: the worker actors and the router actor on their ground; and ending them.

Ray places the actors and ends them; no token and no block passes through it. Owns the order of
starting, growing, shrinking and stopping; what happens to processes in between is
``cluster.supervision``'s, and where they go ``cluster.ground``'s. On a Ray of one's own all this is
in the process that serves; in one that was joined it is in ``cluster.keeper``'s.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import ray

from kvferry.cluster.access.settings import load_access
from kvferry.cluster.adopting import Found
from kvferry.cluster.block_sizes import BlockSizes, choose_block_sizes
from kvferry.cluster.colocated_worker import ColocatedWorker
from kvferry.cluster.config import Config
from kvferry.cluster.deaths import Death
from kvferry.cluster.devices import on_devices
from kvferry.cluster.errors import NotReady
from kvferry.cluster.ground import Ground, OwnGround, Say, first_workers
from kvferry.cluster.own_ray import write_note
from kvferry.cluster.ports import check_port
from kvferry.cluster.ray_actors import end, get, next_epoch, node_id, num_gpus, remote_actor
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.routed_request import RequestView
from kvferry.cluster.router_actor import RouterActor, RouterEndpoints, served_model
from kvferry.cluster.running import RunningRouter, RunningWorker
from kvferry.cluster.scaler import Scaler
from kvferry.cluster.settings import (
    LOOPBACK,
    access_settings,
    kv_dtype,
    log_settings,
    router_settings,
    worker_setting,
)
from kvferry.cluster.supervision import Orders, Starts, Supervision
from kvferry.decode_worker.actor import DecodeWorker
from kvferry.prefill_worker.actor import PrefillWorker
from kvferry.worker.actor import WorkerActor
from kvferry.worker.cluster_key import ClusterKey, new_key
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef

logger = logging.getLogger(__name__)

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


class Cluster:
    """A running cluster; ends with ``stop`` or as a context manager.

    Attributes:
        config: what it runs by; it says which device each role is on.
        grpc, http, metrics: HOST:PORT of each door; None: no such door.
        ray_address: address of the Ray cluster.
        startup_s: seconds from the call of ``start`` to readiness.
    """

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        ground: Ground,
        key: ClusterKey,
        owns_ray: bool = False,
    ) -> None:
        """``config`` says which device each role is on: see ``cluster.devices``. ``key``: what all
        nodes know, those too that are found running.
        """
        self.grpc = config.server.grpc
        self.http = config.server.http
        self.metrics = config.server.metrics
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self.startup_s = 0.0
        self.config = config
        self._model_folder = model_folder
        self._ground = ground
        self._logs = log_settings(config)
        self._owns_ray = owns_ray
        self._key = key
        self._sizes: BlockSizes = choose_block_sizes(config, model_folder, kv_dtype(config))
        self._router: Any = None
        self._actors: list[Any] = []
        self._supervision: Supervision | None = None
        self._scaler: Scaler | None = None
        self._stopped = False
        self._note = write_note(self.ray_address) if owns_ray else None

    @classmethod
    def start(cls, config: Config, model_folder: Path, progress: Say) -> Cluster:
        """Start a Ray of our own, the workers and the router; return when ready.

        Raises whatever kept a part from starting, as the error that it was.
        """
        began = time.monotonic()
        server = config.server
        for port in filter(None, (server.grpc, server.http, server.metrics)):
            check_port(port)
        load_access(access_settings(config))  # before a model is loaded for what cannot be
        progress("starting Ray")
        owns_ray = init_ray(config)
        try:
            placed = on_devices(config, num_gpus())
            for line in placed.lines:
                progress(line)
            ground = OwnGround(placed.config)
            cluster = cls(placed.config, model_folder, ground, new_key(), owns_ray)
        except BaseException:
            if owns_ray:
                ray.shutdown()
            raise
        cluster.open(progress)
        if owns_ray:
            write_note(cluster.ray_address)  # with all that has come since
        cluster.startup_s = time.monotonic() - began
        return cluster

    def open(self, progress: Say) -> None:
        """Start workers and router; return when ready. What was started is ended on failure."""
        try:
            self._open(progress)
        except BaseException:
            self.stop(grace_s=0.0)  # nobody is served yet
            raise

    def _open(self, progress: Say) -> None:
        for line in self._sizes.lines:
            progress(line)
        if self._ground.host != LOOPBACK and self.config.transfer.connector != "shm":
            progress(
                "warning: workers are read on their nodes' addresses (transfer.host): who reads "
                "must know the cluster's key, but KV blocks over TCP are not encrypted; keep "
                "others off that network"
            )
        wanted = first_workers(self.config)
        self._ground.assign(wanted, progress)
        progress(f"starting {len(wanted)} workers and the router")
        self._router = self._new_router()
        started = []
        for name in wanted:
            actor, pending = self._start_worker(name)
            self._actors.append(actor)
            started.append((actor, pending))
        workers: list[WorkerDescription] = [get(pending) for _, pending in started]
        for worker in workers:
            progress(f"{worker.member.ref.node_id}: {worker.pool_arithmetic}")
        for warning in sorted({w.kernels_warning for w in workers if w.kernels_warning}):
            progress(f"warning: {warning}")
        self._model = served_model(workers, self.config.model.served_name)
        self._opened(get(self._router.start.remote(self._model, workers)))
        self._wait_ready(progress)
        router = RunningRouter(self._router, *get(self._router.whereabouts.remote(node_id)))
        running = [
            RunningWorker(actor, description, actor.wait.remote())
            for (actor, _), description in zip(started, workers, strict=True)
        ]
        self._supervise(running, router)
        progress("ready")

    def take_up(self, found: Found) -> None:
        """Go on with the cluster that an earlier launcher has left; what is missing is started.

        A router that lives hears of the workers that it does not know, and tells again what the
        earlier launcher may not have heard.
        """
        self._ground.tidy()
        self._model = found.model
        doors = found.doors
        self.grpc, self.http, self.metrics = doors.grpc, doors.http, doors.metrics
        router = found.router
        if router is None:
            self._router = self._new_router()
            descriptions = [worker.description for worker in found.workers]
            self._opened(get(self._router.start.remote(self._model, descriptions)))
            router = RunningRouter(self._router, *get(self._router.whereabouts.remote(node_id)))
        names = self._ground.names()
        for gone in (w for w in found.workers if w.ref.node_id not in names):
            ray.kill(gone.actor)  # its place is not there any more
        workers = [worker for worker in found.workers if worker.ref.node_id in names]
        self._supervise(workers, router)
        assert self._supervision is not None
        missing = names.keys() - {worker.ref.node_id for worker in workers}
        self._supervision.expect(sorted(missing))

    def _supervise(self, workers: list[RunningWorker], router: RunningRouter) -> None:
        self._supervision = supervision = Supervision(
            Starts(self._start_worker, self._restart_router),
            workers,
            router,
            max(LEAST_ROUTER_SILENCE_S, self.config.router.heartbeat_timeout),
            Orders(lambda order: scaler.take(order), self._ground.release),
        )
        self._scaler = scaler = Scaler(self._ground, supervision, self._sizes.by_role)
        supervision.start()

    def _opened(self, doors: RouterEndpoints) -> None:
        self.grpc, self.http, self.metrics = doors.grpc, doors.http, doors.metrics
        self._ground.opened(doors)

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
        settings = router_settings(
            self.config, self._model_folder, ref, doors, self._key, self._ground.host
        )
        options = self._ground.router_options(ref)
        return remote_actor(RouterActor, 1, options).remote(settings, self._logs)

    def _start_worker(self, name: str) -> tuple[Any, Any]:
        """The worker of this name in a new life, on its way."""
        ref = NodeRef(name, next_epoch())
        role, share = self._ground.names()[name], self._ground.share(name)
        setting = worker_setting(
            self.config, self._model_folder, self._sizes, role, ref, share, self._key
        )
        options = self._ground.worker_options(ref)
        actor = remote_actor(ROLES[role], share.threads, options).remote(setting, self._logs)
        where = actor.__ray_call__.remote(node_id)
        listen, why = self._ground.listen_host(actor), self._ground.why(name, actor)
        return actor, actor.start.remote(where, listen, why)

    def _restart_router(self, workers: list[WorkerDescription]) -> tuple[Any, Any]:
        """The router in a new life, at the same address, on its way."""
        actor = self._new_router()
        return actor, actor.start.remote(self._model, workers)

    # --- what others ask --------------------------------------------------------------------

    def processes(self) -> dict[NodeRef, int]:
        """Process ids of the workers and the router in their present lives."""
        assert self._supervision is not None
        return self._supervision.processes()

    def deaths(self) -> list[Death]:
        """The last deaths that were declared."""
        assert self._supervision is not None
        return self._supervision.deaths()

    def not_ready_reasons(self, timeout_s: float = 2.0) -> list[str]:
        """Why no request could be served now; empty when the router says that it is ready."""
        assert self._supervision is not None
        router, _ = self._supervision.actors()
        try:
            reasons: list[str] = ray.get(router.not_ready_reasons.remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:  # a time-out too
            return [f"the router does not answer ({type(error).__name__})"]
        return reasons

    def request_views(self, timeout_s: float = 2.0) -> list[RequestView] | None:
        """Every live request of the router; None while no router answers."""
        assert self._supervision is not None
        router, _ = self._supervision.actors()
        try:
            views: list[RequestView] = ray.get(router.request_views.remote(), timeout=timeout_s)
        except ray.exceptions.RayError:  # a time-out too
            return None
        return views

    def ended(self) -> bool:
        """Whether somebody else has ended it: on a Ray of one's own they signal this process."""
        return False

    def begin_stop(self, grace_s: float) -> None:
        """Nothing: on a Ray of one's own all ends with this process, however it does."""

    def stop(self, grace_s: float = 0.0) -> None:
        """Let streams finish for ``grace_s`` seconds, end the rest, end every process; idempotent.

        Whatever a process does, or does not, it is over ``2 * LAST_CALL_S`` seconds later.
        """
        if self._stopped:
            return
        self._stopped = True
        router, actors = self._router, self._actors
        if self._scaler is not None:
            self._scaler.stop()
        if self._supervision is not None:
            self._supervision.stop()
            router, actors = self._supervision.actors()
        if router is not None:
            end([router.stop.remote(grace_s)], grace_s + LAST_CALL_S)
        end([actor.stop.remote() for actor in actors], LAST_CALL_S)
        for actor in [*actors, router]:
            if actor is not None:
                ray.kill(actor)
        self._ground.close()
        if self._owns_ray:
            ray.shutdown()
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
