"""Keeping the cluster's processes alive: a thread beside the launcher.

Watches the workers and the router, ends what is suspected (a stopped process too, so that it
cannot come back as a second life of itself) and starts it again under a new epoch; the other
side is never restarted. What is due, and when, ``cluster.supervisor`` decides; this shell asks
Ray and the router. It never waits for one process while another needs it.

Detection: Ray tells that a process has died; the router tells, from its own heartbeats, that a
worker is silent; a router that does not answer for as long is taken for dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import ray

from kvferry.cluster.deaths import Death
from kvferry.cluster.ray_actors import node_id
from kvferry.cluster.scaling import RouterNews, ScaleOrder
from kvferry.cluster.supervisor import Supervisor
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
ANSWER_S = 0.2  # that a router's answer may take beside the limit of silence
ROUTER_START_S = 60.0  # a new router that has not come by then is given up for another


@dataclass(slots=True)
class RunningWorker:
    """A worker's actor; ``ended`` is a pending call that fails or returns when it has ended."""

    actor: Any
    description: WorkerDescription
    ended: Any

    @property
    def pid(self) -> int:
        """The worker's process id on its node."""
        return self.description.pid

    @property
    def node_id(self) -> str | None:
        """Ray's id of that node."""
        return self.description.node_id

    @property
    def ref(self) -> NodeRef:
        """The worker in this life."""
        return self.description.member.ref


@dataclass(slots=True)
class RunningRouter:
    """The router's actor in one life, and its process on a node."""

    actor: Any
    ref: NodeRef
    pid: int
    node_id: str


class Handles:
    """Handles of the watched processes on this node, by life.

    A process id may be another's by the time it is signalled; a handle never is.
    """

    def __init__(self, this_node: str) -> None:
        self._this_node = this_node
        self._open: dict[NodeRef, int] = {}

    def watch(self, process: RunningWorker | RunningRouter) -> None:
        """Open a handle while the process is known to live."""
        if process.node_id == self._this_node and process.ref not in self._open:
            with contextlib.suppress(ProcessLookupError):
                self._open[process.ref] = os.pidfd_open(process.pid)

    def kill(self, ref: NodeRef) -> None:
        """End the process, however it stands, and close the handle."""
        handle = self._open.pop(ref, None)
        if handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)

    def close(self) -> None:
        """Close what is open; ends nobody."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True, slots=True)
class Starts:
    """How processes are started: each call returns at once with (actor, pending result)."""

    worker: Callable[[str], tuple[Any, Any]]
    router: Callable[[list[WorkerDescription]], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Orders:
    """Whom to tell: of a scale order that a router has, and of a worker that has left for good."""

    scale: Callable[[ScaleOrder], None]
    gone: Callable[[str], None]


class Supervision:
    """See the module. ``stop`` ends the watching, not the processes.

    ``expect``, ``drain`` and ``forget`` may be called on any thread; they take effect soon.

    Args:
        silence_limit: seconds after which a router that does not answer is taken for dead.
    """

    def __init__(
        self,
        starts: Starts,
        workers: list[RunningWorker],
        router: RunningRouter,
        silence_limit: float,
        orders: Orders,
    ) -> None:
        self._starts = starts
        self._orders = orders
        self._asked_for: SimpleQueue[tuple[Callable[[str, float], None], str]] = SimpleQueue()
        self._patience_s = silence_limit + ANSWER_S
        self._supervisor = Supervisor()
        self._workers = {w.description.member.ref.node_id: w for w in workers}
        self._router = router
        self._leaving: set[str] = set()
        self._starting: dict[str, tuple[Any, Any]] = {}
        self._starting_router: tuple[Any, Any] | None = None
        self._router_start_at = 0.0
        self._deaths: deque[Death] = deque(maxlen=256)
        self._asked: Any = None
        self._asked_at = 0.0
        self._handles = Handles(node_id(None))
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvferry-supervision", daemon=True)
        self._handles.watch(router)
        for worker in workers:
            self._handles.watch(worker)
            self._supervisor.started(worker.ref.node_id, worker.ref, time.monotonic())

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; what is being started is ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        for actor, _ in [*self._starting.values(), *filter(None, [self._starting_router])]:
            ray.kill(actor)
        self._handles.close()

    def expect(self, names: Sequence[str]) -> None:
        """There are to be workers of these names too; they are started, and again if they die."""
        for name in names:
            self._asked_for.put((self._supervisor.expect, name))

    def drain(self, name: str) -> None:
        """A worker is to leave when it holds nothing any more."""
        self._asked_for.put((self._drain, name))

    def forget(self, name: str) -> None:
        """A worker that has no life now is not to come back."""
        self._asked_for.put((self._forget, name))

    def actors(self) -> tuple[Any, list[Any]]:
        """The present router actor and worker actors."""
        with self._lock:
            return self._router.actor, [worker.actor for worker in self._workers.values()]

    def processes(self) -> dict[NodeRef, int]:
        """Process ids of the present lives."""
        with self._lock:
            workers = [worker.description for worker in self._workers.values()]
            router = (
                {} if self._starting_router is not None else {self._router.ref: self._router.pid}
            )
        return router | {worker.member.ref: worker.pid for worker in workers}

    def deaths(self) -> list[Death]:
        """The last deaths that were declared, here or by the router, each life's first."""
        return list(self._deaths)

    def _declared(self, death: Death) -> None:
        if all(known.ref != death.ref for known in self._deaths):
            self._deaths.append(death)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._turn(time.monotonic())
            except Exception:  # the thread's boundary: watching must go on
                logger.exception("supervision: a turn failed")

    def _turn(self, now: float) -> None:
        while not self._asked_for.empty():
            act, name = self._asked_for.get()
            act(name, now)
        self._watch_workers()
        self._watch_router(now)
        self._finish_starts(now)
        for name in self._supervisor.due(now):
            logger.warning("starting %s", name)
            try:
                self._starting[name] = self._starts.worker(name)
            except (KeyError, ValueError) as error:  # its place has just been given up
                logger.warning("%s cannot be started now: %r", name, error)
                self._supervisor.failed_to_start(name, now)

    def _drain(self, name: str, now: float) -> None:
        if name in self._workers:
            self._leaving.add(name)
            self._router.actor.begin_drain.remote(name)
        else:
            self._forget(name, now)

    def _forget(self, name: str, now: float) -> None:
        if not self._supervisor.forget(name):
            self._drain(name, now)  # it lives after all
            return
        actor, _ = self._starting.pop(name, (None, None))
        if actor is not None:
            ray.kill(actor)
        self._orders.gone(name)

    # --- workers ----------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        """What Ray says: a pending call per worker ends when its process does."""
        for worker in list(self._workers.values()):
            if not _is_done(worker.ended):
                continue
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(worker.ended)
            ref = worker.ref
            self._lost(worker, Death(ref, "its process has ended", time.monotonic()), tell=True)

    def _lost(self, worker: RunningWorker, death: Death, tell: bool) -> None:
        ref = death.ref
        self._declared(death)
        leaves = ref.node_id in self._leaving
        known = (
            self._supervisor.retired(ref)
            if leaves
            else self._supervisor.lost(ref, time.monotonic())
        )
        if not known:
            return
        logger.warning("%s (epoch %d) is lost: %s", ref.node_id, ref.epoch, death.why)
        with self._lock:
            del self._workers[ref.node_id]
        self._kill(worker)
        if tell:
            self._router.actor.worker_died.remote(ref, death.why)
        if leaves:  # it was to go: it has gone
            self._leaving.discard(ref.node_id)
            self._orders.gone(ref.node_id)

    def _retire(self, ref: NodeRef) -> None:
        """A worker has been drained and holds nothing: end it; nobody takes its place."""
        if not self._supervisor.retired(ref):
            return
        with self._lock:
            worker = self._workers.pop(ref.node_id)
        self._kill(worker)
        self._leaving.discard(ref.node_id)
        self._orders.gone(ref.node_id)

    def _finish_starts(self, now: float) -> None:
        for name, (actor, pending) in list(self._starting.items()):
            if not _is_done(pending):
                continue
            del self._starting[name]
            try:
                description: WorkerDescription = ray.get(pending)
            except ray.exceptions.RayError as error:
                logger.error("%s did not start: %s", name, error)
                ray.kill(actor)
                self._supervisor.failed_to_start(name, now)
                continue
            restarts = self._supervisor.num_restarts(name)
            description = replace(description, num_restarts=restarts)
            worker = RunningWorker(actor, description, actor.wait.remote())
            self._handles.watch(worker)
            with self._lock:
                self._workers[name] = worker
            self._supervisor.started(name, description.member.ref, now)
            self._router.actor.register.remote(description)

    def _kill(self, process: RunningWorker | RunningRouter) -> None:
        """Make sure that a suspect is dead: a stopped process does not answer Ray."""
        self._handles.kill(process.ref)
        ray.kill(process.actor)

    # --- the router -------------------------------------------------------------------------

    def _watch_router(self, now: float) -> None:
        """Ask whom it has lost and what is asked of us; the asking shows whether it lives."""
        if self._starting_router is not None:
            self._finish_router_start(now)
            return
        if self._asked is None:
            self._asked, self._asked_at = self._router.actor.news.remote(), now
            return
        if not _is_done(self._asked):
            if now - self._asked_at > self._patience_s:
                self._restart_router(f"it has not answered for {now - self._asked_at:.1f} s")
            return
        asked, self._asked = self._asked, None
        try:
            news: RouterNews = ray.get(asked)
        except ray.exceptions.RayError as error:
            self._restart_router(type(error).__name__)
            return
        for order in news.orders:
            self._orders.scale(order)
        for death in news.lost:
            if death.drained:
                self._retire(death.ref)
                continue
            self._declared(death)
            worker = self._workers.get(death.ref.node_id)
            if worker is not None and worker.ref == death.ref:
                self._lost(worker, death, tell=False)

    def _restart_router(self, why: str) -> None:
        logger.warning("the router is lost (%s): starting another", why)
        self._declared(Death(self._router.ref, why, time.monotonic()))
        self._kill(self._router)
        self._asked = None
        self._start_router(time.monotonic())

    def _start_router(self, now: float) -> None:
        workers = [worker.description for worker in self._workers.values()]
        self._starting_router, self._router_start_at = self._starts.router(workers), now

    def _finish_router_start(self, now: float) -> None:
        assert self._starting_router is not None
        actor, pending = self._starting_router
        late = now - self._router_start_at > ROUTER_START_S
        if not _is_done(pending) and not late:
            return
        try:
            ray.get(pending, timeout=0)
            whereabouts = actor.whereabouts.remote(node_id)
            found = RunningRouter(actor, *ray.get(whereabouts, timeout=self._patience_s))
        except ray.exceptions.RayError as error:  # GetTimeoutError too
            logger.error("the router did not start, trying again: %r", error)
            ray.kill(actor)
            self._start_router(now)
            return
        self._starting_router = None
        self._handles.watch(found)
        with self._lock:
            self._router = found
        known = {worker.ref for worker in self._workers.values()}
        logger.warning("a new router serves, with %d workers", len(known))
        for worker in self._workers.values():  # those that came while it was starting
            actor.register.remote(worker.description)


def _is_done(ref: Any) -> bool:
    ready, _ = ray.wait([ref], timeout=0)
    return bool(ready)
