"""Orders to scale, as the router takes them: one at a time, from whoever calls to whoever watches.

Whoever watches this router is told of an order until it has answered, so that one that has died
meanwhile costs nothing. An order is done when the answer's numbers are there and its leavers are
not. Lives on the router's loop; knows neither who is to come nor how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.cluster.errors import DeadlineExceeded, NotReady
from kvferry.cluster.registry import WorkerRegistry, role_name
from kvferry.cluster.scaling import ROLES, ScaleDone, ScaleOrder, check_range, listed

POLL_S = 0.1
OVERTAKEN = "another order to scale came after this one"


@dataclass(slots=True)
class _Open:
    """An order that somebody waits for; ``told``: whoever watches has it."""

    order: ScaleOrder
    answer: asyncio.Future[ScaleDone]
    told: bool = False
    said: str = ""
    overtaken: str = ""


class ScaleDesk:
    """See the module. ``epoch``: the router's, which makes its orders later than its elders'."""

    def __init__(self, epoch: int, workers: WorkerRegistry) -> None:
        self._epoch = epoch
        self._workers = workers
        self._number = 0
        self._unanswered: ScaleOrder | None = None
        self._open: dict[int, _Open] = {}

    def num_workers(self) -> dict[str, int]:
        """How many workers there are that are not leaving, by role."""
        names = [role_name(r.member.roles) for r in self._workers if not r.draining]
        return {role: names.count(role) for role in ROLES}

    async def scale(self, counts: Mapping[str, int], timeout_s: float | None) -> dict[str, int]:
        """Grow and shrink to so many workers of these roles; returns when there are. Of the others
        it returns how many there are to be.

        Goes on when the caller has gone. Raises InvalidRequest, NotReady if there was no place,
        DeadlineExceeded after ``timeout_s``.
        """
        check_range(counts)
        for earlier in self._open.values():
            self._overtake(earlier, OVERTAKEN)
        self._number += 1
        order = ScaleOrder(self._epoch << 32 | self._number, dict(counts))
        self._unanswered = order
        waits = _Open(order, asyncio.get_running_loop().create_future())
        self._open[order.order_id] = waits
        wanted: Mapping[str, int] = counts
        try:
            async with asyncio.timeout(timeout_s):
                done = await waits.answer
                if done.error is not None:
                    raise done.error
                wanted = done.wanted
                while not self._is_done(order, done):
                    if waits.overtaken:
                        raise NotReady(waits.overtaken)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            there = {role: number for role, number in self.num_workers().items() if number}
            raise DeadlineExceeded(
                f"after {timeout_s:g} s there are {listed(there)}, wanted "
                f"{listed({role: n for role, n in wanted.items() if n or role in counts})}; it "
                f"goes on{f': {waits.said}' if waits.said else ''}"
            ) from None
        finally:
            del self._open[order.order_id]
        return dict(done.wanted)

    def _is_done(self, order: ScaleOrder, done: ScaleDone) -> bool:
        present, names = self.num_workers(), {record.ref.node_id for record in self._workers}
        there = all(present[role] == done.wanted[role] for role in order.counts)
        return there and names.isdisjoint(done.going)

    def _overtake(self, waits: _Open, why: str) -> None:
        waits.overtaken = why
        if not waits.answer.done():
            waits.answer.set_result(ScaleDone(waits.order.order_id, NotReady(why)))

    def drains(self, worker_id: str, role: str) -> None:
        """Somebody takes a worker out of service. An order that reckons with it will not be."""
        for waits in self._open.values():
            if waits.told and role in waits.order.counts:
                self._overtake(waits, f"{worker_id} was drained meanwhile: order again")

    def unanswered(self) -> tuple[ScaleOrder, ...]:
        """Orders to be told, again too."""
        if self._unanswered is None:
            return ()
        waits = self._open.get(self._unanswered.order_id)
        if waits is not None:
            waits.told = True
        return (self._unanswered,)

    def done(self, done: ScaleDone) -> None:
        """Places were found for an order, or not; what was asked for is on its way."""
        if self._unanswered is not None and self._unanswered.order_id == done.order_id:
            self._unanswered = None
        waits = self._open.get(done.order_id)
        if waits is not None and not waits.answer.done():
            waits.answer.set_result(done)

    def says(self, order_id: int, line: str) -> None:
        """What an order waits for at this moment."""
        waits = self._open.get(order_id)
        if waits is not None:
            waits.said = line
