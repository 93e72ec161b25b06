"""Carrying out orders to scale: a thread for each, beside the launcher; the latest counts.

Finding places may take long, and the cluster must be watched meanwhile. A later order ends an
earlier one's wait; what that one has started or sent away by then stands, and the later one plans
from there. Who comes and who goes ``cluster.scaling`` decides.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from kvferry.cluster.errors import Cancelled, Internal, NotReady
from kvferry.cluster.ground import Ground
from kvferry.cluster.scaling import ScaleDone, ScaleOrder, Staff, plan
from kvferry.kv_cache.errors import KVFerryError

logger = logging.getLogger(__name__)


class Crew(Protocol):
    """Whoever keeps the workers alive: ``cluster.supervision``."""

    def leaving(self) -> frozenset[str]:
        """Names of the workers that have been told to go and have not gone."""
        ...

    def alive(self) -> frozenset[str]:
        """Names of the workers that have a life."""
        ...

    def expect(self, names: Collection[str]) -> None:
        """There are to be workers of these names."""
        ...

    def leave(self, name: str) -> None:
        """There is to be none of this name."""
        ...

    def scaled(self, done: ScaleDone) -> None:
        """What became of an order, for whoever gave it."""
        ...

    def scale_says(self, order_id: int, line: str) -> None:
        """What an order waits for, for whoever gave it."""
        ...


def in_thread(work: Callable[[], None]) -> None:
    """Begin it, and return."""
    threading.Thread(target=work, name="kvferry-scale", daemon=True).start()


class Scaler:
    """See the module. ``roles``: those that this cluster can have workers of."""

    def __init__(
        self,
        ground: Ground,
        crew: Crew,
        roles: Collection[str],
        start: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self._start = start
        self._ground = ground
        self._crew = crew
        self._roles = roles
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._latest = 0
        self._done: ScaleDone | None = None
        self._stopped = False

    def take(self, order: ScaleOrder) -> None:
        """An order came, perhaps again; returns at once."""
        with self._lock:
            is_new, answered = order.order_id > self._latest, self._done
            if is_new:
                self._latest, self._done = order.order_id, None
        if is_new:
            self._start(lambda: self._carry_out(order))
        elif answered is not None and answered.order_id == order.order_id:  # it was not heard
            self._crew.scaled(answered)

    def stop(self) -> None:
        """Nobody is to come any more."""
        with self._lock:
            self._stopped = True

    def _carry_out(self, order: ScaleOrder) -> None:
        with self._one_at_a_time:
            try:
                done = self._scale(order)
            except KVFerryError as error:
                done = ScaleDone(order.order_id, error)
            except Exception as error:  # the thread's boundary: whoever ordered it is told
                logger.exception("a scale order failed")
                done = ScaleDone(order.order_id, Internal(f"{type(error).__name__}: {error}"))
        with self._lock:
            if order.order_id == self._latest:
                self._done = done
        self._crew.scaled(done)

    def _scale(self, order: ScaleOrder) -> ScaleDone:
        self._check(order)
        leaving = self._crew.leaving()  # before the names: who has gone is in neither
        names = self._ground.names()
        staff = Staff(names, leaving, frozenset(names) - self._crew.alive())
        wants = plan(order.counts, staff)
        for role in wants.adding.values():
            if role not in self._roles:
                raise NotReady(
                    f"this cluster began without {role} workers: their block size is not settled; "
                    f"start it with {role}.replicas of at least 1"
                )
        for name in wants.draining:
            self._crew.leave(name)
        if wants.adding:
            self._ground.assign(
                wants.adding,
                lambda line: self._say(order, line),
                going=leaving | set(wants.draining),
                check=lambda: self._check(order),
            )
            self._crew.expect(list(wants.adding))
        return ScaleDone(order.order_id, None, wants.wanted, wants.going)

    def _say(self, order: ScaleOrder, line: str) -> None:
        logger.warning("%s", line)
        self._crew.scale_says(order.order_id, line)

    def _check(self, order: ScaleOrder) -> None:
        with self._lock:
            if self._stopped:
                raise Cancelled("the cluster is being taken down")
            if order.order_id != self._latest:
                raise Cancelled("another order to scale came after this one")
