"""Keeping the cluster's processes alive: a thread beside the launcher.

Watches the workers and the router, ends what is suspected (a stopped process too, so that it
cannot come back as a second life of itself) and starts it again under a new epoch; the other
side is never restarted. What is due, and when, ``cluster.supervisor`` decides; this shell asks
Ray and the router. It never waits for one process while another needs it.

Detection: Ray tells that a process has died; the router tells, from its own heartbeats, that a
worker is silent; a router that does not answer for as long is taken for dead.

Who is leaving is known here: those that were told to go, and those that somebody drains at the
router. Whenever the router answers, it is told again what it does not know: a worker that it has
not registered, a drain that it has not begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import ray

from kvferry.cluster.deaths import Death
from kvferry.cluster.ray_actors import node_id
from kvferry.cluster.running import Calls, Handles, RunningRouter, RunningWorker
from kvferry.cluster.scaling import RouterNews, ScaleDone, ScaleOrder
from kvferry.cluster.supervisor import Supervisor
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
ANSWER_S = 0.2  # that a router's answer may take beside the limit of silence
ROUTER_START_S = 60.0  # a new router that has not come by then is given up for another


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

    ``expect`` and ``leave`` may be called on any thread; they take effect soon, in their order.

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
        calls: Calls | None = None,
    ) -> None:
        self._calls = calls or Calls()
        self._starts = starts
        self._orders = orders
        self._asked_for: SimpleQueue[tuple[Callable[[str, float], None], str]] = SimpleQueue()
        self._patience_s = silence_limit + ANSWER_S
        self._supervisor = Supervisor()
        self._workers = {w.description.member.ref.node_id: w for w in workers}
        self._router = router
        self._leaving: set[str] = set()  # under the lock; until their places are given back
        self._gone: set[str] = set()  # of those: ended, their places not given back yet
        self._heard = 0  # the last news of this router
        self._starting: dict[str, tuple[Any, Any]] = {}
        self._starting_router: tuple[Any, Any] | None = None
        self._router_start_at = 0.0
        self._deaths: deque[Death] = deque(maxlen=256)
        self._asked: Any = None
        self._asked_at = 0.0
        self._handles = Handles(self._calls.this_node())
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
            self._calls.kill(actor)
        self._handles.close()

    def expect(self, names: Collection[str]) -> None:
        """There are to be workers of these names too; they are started, and again if they die."""
        for name in names:
            self._asked_for.put((self._supervisor.expect, name))

    def leave(self, name: str) -> None:
        """There is to be no worker of this name: one that lives goes when it holds nothing."""
        with self._lock:
            self._leaving.add(name)
        self._asked_for.put((self._leave, name))

    def leaving(self) -> frozenset[str]:
        """Names of the workers that are to go and have not gone."""
        with self._lock:
            return frozenset(self._leaving)

    def alive(self) -> frozenset[str]:
        """Names of the workers that live."""
        with self._lock:
            return frozenset(self._workers)

    def scaled(self, done: ScaleDone) -> None:
        """What became of a scale order, for the router."""
        self.actors()[0].scale_done.remote(done)

    def scale_says(self, order_id: int, line: str) -> None:
        """What a scale order waits for, for the router."""
        self.actors()[0].scale_says.remote(order_id, line)

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
            except Exception as error:  # its place is not there, or Ray: it is tried again
                logger.warning("%s cannot be started now: %r", name, error)
                self._supervisor.failed_to_start(name, now)
        self._give_back()

    def _leave(self, name: str, now: float) -> None:
        if name not in self._leaving or name in self._gone:  # it has gone by itself
            return
        if not self._supervisor.forget(name):
            self._router.actor.begin_drain.remote(name)
            return
        actor, _ = self._starting.pop(name, (None, None))
        if actor is not None:
            self._calls.kill(actor)
        self._gone.add(name)

    def _give_back(self) -> None:
        """The places of those that have gone; where that fails, it is tried again."""
        for name in list(self._gone):
            try:
                self._orders.gone(name)
            except Exception as error:  # Ray's store may be away for a moment
                logger.warning("the place of %s cannot be given back now: %r", name, error)
                continue
            self._gone.discard(name)
            with self._lock:
                self._leaving.discard(name)

    # --- workers ----------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        """What Ray says: a pending call per worker ends when its process does."""
        for worker in list(self._workers.values()):
            if not self._calls.is_done(worker.ended):
                continue
            with contextlib.suppress(ray.exceptions.RayError):
                self._calls.result(worker.ended)
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
        if leaves:  # it was to go
            self._gone.add(ref.node_id)
        if tell:
            self._router.actor.worker_died.remote(ref, death.why)
        self._kill(worker)

    def _retire(self, ref: NodeRef) -> None:
        """A worker has been drained and holds nothing: end it; nobody takes its place."""
        if not self._supervisor.retired(ref):
            return
        with self._lock:
            worker = self._workers.pop(ref.node_id)
            self._leaving.add(ref.node_id)
        self._gone.add(ref.node_id)
        self._kill(worker)

    def _finish_starts(self, now: float) -> None:
        for name, (actor, pending) in list(self._starting.items()):
            if not self._calls.is_done(pending):
                continue
            del self._starting[name]
            try:
                description: WorkerDescription = self._calls.result(pending)
            except ray.exceptions.RayError as error:
                logger.error("%s did not start: %s", name, error)
                self._calls.kill(actor)
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
        self._calls.kill(process.actor)

    # --- the router -------------------------------------------------------------------------

    def _watch_router(self, now: float) -> None:
        """Ask whom it has lost and what is asked of us; the asking shows whether it lives."""
        if self._starting_router is not None:
            self._finish_router_start(now)
            return
        if self._asked is None:
            self._asked, self._asked_at = self._router.actor.news.remote(self._heard), now
            return
        if not self._calls.is_done(self._asked):
            if now - self._asked_at > self._patience_s:
                self._restart_router(f"it has not answered for {now - self._asked_at:.1f} s")
            return
        asked, self._asked = self._asked, None
        try:
            news: RouterNews = self._calls.result(asked)
        except ray.exceptions.RayError as error:
            self._restart_router(type(error).__name__)
            return
        self._heard = news.number
        for death in news.lost:
            if death.drained:
                self._retire(death.ref)
                continue
            self._declared(death)
            worker = self._workers.get(death.ref.node_id)
            if worker is not None and worker.ref == death.ref:
                self._lost(worker, death, tell=False)
        self._agree(news)
        for order in news.orders:  # by then it is known who leaves
            self._orders.scale(order)

    def _agree(self, news: RouterNews) -> None:
        """We know who is to be, the router whom somebody drains: each is told by the other."""
        for name, worker in self._workers.items():
            if worker.ref in news.draining:
                with self._lock:
                    self._leaving.add(name)
                continue
            if worker.ref not in news.members:
                self._router.actor.register.remote(worker.description)
            if name in self._leaving:
                self._router.actor.begin_drain.remote(name)

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
        if not self._calls.is_done(pending) and not late:
            return
        try:
            self._calls.result(pending, 0.0)
            whereabouts = actor.whereabouts.remote(node_id)
            found = RunningRouter(actor, *self._calls.result(whereabouts, self._patience_s))
        except ray.exceptions.RayError as error:  # GetTimeoutError too
            logger.error("the router did not start, trying again: %r", error)
            self._calls.kill(actor)
            self._start_router(now)
            return
        self._starting_router = None
        self._heard = 0
        self._handles.watch(found)
        with self._lock:
            self._router = found
        known = {worker.ref for worker in self._workers.values()}
        logger.warning("a new router serves, with %d workers", len(known))
        for worker in self._workers.values():  # those that came while it was starting
            actor.register.remote(worker.description)
        for name in self._leaving & self._workers.keys():
            actor.begin_drain.remote(name)
