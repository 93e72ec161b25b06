"""The router as an actor: an event loop in a thread, with router, front door and its servers.

A plain class: the launcher wraps it with ``ray.remote``. Ray starts it and watches it; no token
passes through Ray.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.cluster.access.settings import AccessSettings, load_access
from kvferry.cluster.grpc_server import GrpcServer
from kvferry.cluster.intake import Intake, ServedModel
from kvferry.cluster.metrics.endpoint import MetricsServer
from kvferry.cluster.routed_request import RequestView
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.scaling import RouterNews, ScaleDone
from kvferry.cluster.server_limits import ServerLimits
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.tokenizer import Tokenizer
from kvferry.kv_transfer.authentication import NoKey
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.description import WorkerDescription
from kvferry.worker.logs import LogSettings, set_up_logging
from kvferry.worker.messages import NodeRef

if TYPE_CHECKING:
    from kvferry.cluster.http_door.server import HttpServer

CALL_TIMEOUT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where a router listens: HOST:PORT of each door, None where there is none.

    To be asked for, port 0 picks a free one.
    """

    grpc: str
    http: str | None = None
    metrics: str | None = None


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All that a router needs to know to start.

    Attributes:
        doors: where to listen.
        served_name: the model's name to clients; None: its own.
        prefill_window: tokens that a prefill worker may hold beyond what it runs.
        access: who may call.
        key: what every worker must know.
    """

    ref: NodeRef
    model_folder: str
    doors: RouterEndpoints
    config: RouterConfig
    prefill_window: int
    served_name: str | None = None
    bind_host: str = "127.0.0.1"
    limits: ServerLimits = field(default_factory=ServerLimits)
    access: AccessSettings = field(default_factory=AccessSettings)
    key: ClusterKey | NoKey = field(kw_only=True)


class RouterActor:
    """One router in this process. ``start`` once, with the workers, then it serves."""

    def __init__(self, settings: RouterSettings, logs: LogSettings) -> None:
        set_up_logging(logs, settings.ref.node_id)
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvferry-router", daemon=True
        )
        self._thread.start()
        self._node: RouterNode | None = None
        self._server: GrpcServer | None = None
        self._http: HttpServer | None = None
        self._metrics: MetricsServer | None = None

    def start(self, model: ServedModel, workers: list[WorkerDescription]) -> RouterEndpoints:
        """Listen and register the workers; returns the endpoints. Raises PortUnavailable."""
        return self._call(self._start(model, workers))

    def whereabouts(self, node_id: Callable[[object], str]) -> tuple[NodeRef, int, str]:
        """This life, the process id, and what ``node_id`` says of the host it runs on."""
        return self._settings.ref, os.getpid(), node_id(self)

    def request_views(self) -> list[RequestView]:
        """Every request that has not ended."""
        return self._call(self._request_views())

    def news(self, heard: int) -> RouterNews:
        """See ``RouterNews``; ``heard``: the number of the last that arrived, 0 for none."""
        return self._call(self._news(heard))

    def is_open(self) -> bool:
        """Whether it serves."""
        return self._server is not None

    def begin_drain(self, worker_id: str) -> None:
        """Take a worker out of service; ``news`` tells when it has gone. Unknown: nothing."""
        self._call(self._on_node(lambda node: node.begin_drain(worker_id)))

    def scale_done(self, done: ScaleDone) -> None:
        """What became of a scale order."""
        self._call(self._on_node(lambda node: node.scaling.done(done)))

    def scale_says(self, order_id: int, line: str) -> None:
        """What a scale order waits for."""
        self._call(self._on_node(lambda node: node.scaling.says(order_id, line)))

    def register(self, worker: WorkerDescription) -> None:
        """A worker has joined."""
        self._call(self._on_node(lambda node: node.register(worker)))

    def worker_died(self, ref: NodeRef, why: str) -> None:
        """A worker is known to be dead."""
        self._call(self._on_node(lambda node: node.worker_died(ref, why)))

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be served now; empty when ready."""
        return self._call(self._not_ready_reasons())

    def stop(self, grace_s: float = 0.0) -> None:
        """Let streams finish for ``grace_s`` seconds, end the rest, close."""
        if self._loop.is_closed():
            return
        self._call(self._stop(grace_s), timeout=grace_s + CALL_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _request_views(self) -> list[RequestView]:
        requests = self._node.router.requests if self._node is not None else {}
        return [request.view() for request in requests.values()]

    async def _news(self, heard: int) -> RouterNews:
        return RouterNews() if self._node is None else self._node.news(heard)

    async def _start(self, model: ServedModel, workers: list[WorkerDescription]) -> RouterEndpoints:
        settings = self._settings
        folder = Path(settings.model_folder)
        intake = Intake(
            model,
            Tokenizer(folder),
            ChatTemplate.from_folder(folder),
            secrets.randbits,
            settings.config.ageing is not None,
        )
        self._node = RouterNode(
            settings.ref,
            intake,
            settings.config,
            settings.prefill_window,
            settings.bind_host,
            load_access(settings.access),
            key=settings.key,
        )
        found = self._open(self._node)
        self._server = GrpcServer(
            self._node,
            settings.doors.grpc,
            settings.limits,
            pb.Endpoints(http=_given(found.http), metrics=_given(found.metrics)),
        )
        for worker in workers:
            self._node.register(worker)
        await self._server.start()
        if self._http is not None:
            await self._http.start()
        return replace(found, grpc=self._server.endpoint)

    def _open(self, node: RouterNode) -> RouterEndpoints:
        """Bind the doors beside gRPC's that are asked for."""
        doors, limits = self._settings.doors, self._settings.limits
        if doors.metrics is not None:
            self._metrics = MetricsServer(
                doors.metrics, node.metrics, node.access, node.refusals, limits
            )
            self._metrics.start()
        if doors.http is not None:
            # Loaded where it is wanted only: FastAPI takes half a second of a router's start.
            module = import_module("kvferry.cluster.http_door.server")
            self._http = module.HttpServer(node, doors.http, limits)
        return RouterEndpoints(
            doors.grpc,
            self._http.endpoint if self._http is not None else None,
            self._metrics.endpoint if self._metrics is not None else None,
        )

    async def _not_ready_reasons(self) -> list[str]:
        assert self._node is not None
        return self._node.router.workers.not_ready_reasons()

    async def _on_node(self, action: Any) -> None:
        assert self._node is not None
        action(self._node)

    async def _stop(self, grace_s: float) -> None:
        doors = [door for door in (self._server, self._http) if door is not None]
        await asyncio.gather(*(door.stop(grace_s) for door in doors))
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        if self._node is not None:
            await self._node.stop()

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout: float = CALL_TIMEOUT_S) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)


def _given(endpoint: str | None) -> tuple[str, ...]:
    return () if endpoint is None else (endpoint,)


def served_model(workers: list[WorkerDescription], served_name: str | None) -> ServedModel:
    """The model as every worker can serve it."""
    first = workers[0]
    return ServedModel(
        served_name or first.model.name,
        first.model.revision,
        first.model.architecture,
        first.dtype,
        first.size,
        first.layout,
        min(worker.max_model_len for worker in workers),
        first.model.vocab_size,
        first.model.eos_token_ids,
    )
