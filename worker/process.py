"""A running worker: the engine thread and the network thread around a ``Worker``.

The engine thread alone touches worker, pool and scheduler, and never a socket. The network thread
owns the sockets and sends the heartbeats, with the age of the step now running: a long prefill is
not a death, and a hung step is seen. Knows neither roles nor Ray.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvferry.kv_transfer.authentication import NoKey
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.messages import Envelope, WorkerHeartbeat
from kvferry.worker.network import Network, Outgoing
from kvferry.worker.worker import Worker

logger = logging.getLogger(__name__)

STALLED_WAIT_S = 0.002  # between steps that could not do anything yet


class WorkerProcess:
    """See the module. ``on_death`` is called if the engine thread ends by an error."""

    def __init__(
        self,
        worker: Worker,
        bind_host: str = "127.0.0.1",
        audit_every_step: bool = False,
        on_death: Callable[[], None] | None = None,
        *,
        key: ClusterKey | NoKey,
    ) -> None:
        self._worker = worker
        self._audit_every_step = audit_every_step
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._beats: list[Outgoing] = []
        self._beats_at = 0.0
        self._turn_began: float | None = None
        self._stopping = threading.Event()
        self._network = Network(
            bind_host, self._inbox.put, self._heartbeats, worker.times.heartbeat, key=key
        )
        self._engine_thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    @property
    def address(self) -> str:
        """Where this worker listens."""
        return self._network.address

    def start(self) -> None:
        """Begin to serve."""
        self._network.start()
        self._engine_thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Finish the running step, then close everything; idempotent."""
        self._stopping.set()
        self._inbox.put(None)
        if self._engine_thread.ident is not None:
            self._engine_thread.join(timeout)
        self._network.stop()
        self._worker.close()

    def _heartbeats(self) -> Iterable[Outgoing]:
        """The latest load, with the age of the running step and what the doors have refused; on
        the network thread.
        """
        if not self._engine_thread.is_alive():
            return []
        began = self._turn_began
        age = None if began is None else time.monotonic() - began
        return [
            (address, replace(envelope, body=self._with_refusals(envelope.body, age)))
            for address, envelope in self._beats
            if isinstance(envelope.body, WorkerHeartbeat)
        ]

    def _with_refusals(self, beat: WorkerHeartbeat, age: float | None) -> WorkerHeartbeat:
        readers = {"unauthenticated": 0, **self._worker.connector.refused()}
        doors = (("control", self._network.refused), ("kv", readers))
        refused = tuple(
            (port, reason, count) for port, counter in doors for reason, count in counter.items()
        )
        tallies = replace(beat.load.tallies, connections_refused=refused)
        return replace(beat, step_age_s=age, load=replace(beat.load, tallies=tallies))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception:  # the thread's boundary: without its engine the worker is dead
            logger.exception("the engine thread has ended")
            self._beats = []
            if self._on_death is not None:
                self._on_death()

    def _turn(self) -> None:
        """Drain the inbox, drive the timers, run one step, hand over what it produced."""
        worker = self._worker
        self._turn_began = time.monotonic()
        self._deliver_all()
        worker.tick(time.monotonic())
        busy = worker.step()
        if busy and self._audit_every_step:
            found = worker.audit(time.monotonic())
            for problem in found.problems:
                logger.error("audit: %s", problem)
        self._hand_over()
        self._turn_began = None
        if not busy:
            self._wait(STALLED_WAIT_S if worker.has_work else worker.times.list_period / 4)

    def _deliver_all(self) -> None:
        while True:
            try:
                envelope = self._inbox.get_nowait()
            except queue.Empty:
                return
            if envelope is not None:
                self._worker.deliver(envelope, time.monotonic())

    def _wait(self, seconds: float) -> None:
        """Until a message comes or a timer is due."""
        try:
            envelope = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if envelope is not None:
            self._worker.deliver(envelope, time.monotonic())

    def _hand_over(self) -> None:
        worker = self._worker
        now = time.monotonic()
        if now - self._beats_at >= worker.times.heartbeat / 2:
            self._beats_at = now
            self._beats = list(self._addressed(worker.heartbeats()))
        if worker.outbox:
            envelopes = list(worker.outbox)
            worker.outbox.clear()
            self._network.send(self._addressed(envelopes))

    def _addressed(self, envelopes: Iterable[Envelope]) -> Iterable[Outgoing]:
        for envelope in envelopes:
            address = self._worker.address_of(envelope.receiver)
            if address is not None:
                yield address, envelope
