"""The supervision and a router agree on who is there and who leaves, whatever either has missed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ray

from kvferry.cluster.deaths import Death
from kvferry.cluster.running import Calls, RunningRouter, RunningWorker
from kvferry.cluster.scaling import RouterNews, ScaleOrder
from kvferry.cluster.supervision import Orders, Starts, Supervision
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import NodeRef, Role
from tests.cluster.routing import member
from tests.stack import MODEL, SIZE


@dataclass
class Call:
    """A promise: not kept, kept or broken."""

    value: Any = None
    done: bool = True


@dataclass
class Remote:
    """What ``actor.method`` is; keeps what it was called with, and answers."""

    answer: Any = None
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def remote(self, *args: Any) -> Call:
        self.told.append(args)
        return Call(self.answer(*args) if callable(self.answer) else self.answer)


class FakeRouter:
    """As much of a router as the supervision sees; ``news`` is what it says next."""

    def __init__(self, epoch: int = 1) -> None:
        self.ref = NodeRef("router-0", epoch)
        self.next = RouterNews()
        self.news = Remote(lambda heard: self.next)
        self.begin_drain = Remote()
        self.register = Remote()
        self.worker_died = Remote()
        self.scale_done = Remote()
        self.scale_says = Remote()
        self.whereabouts = Remote((self.ref, 0, "elsewhere"))

    def drains(self) -> list[str]:
        return [name for (name,) in self.begin_drain.told]


class FakeCalls(Calls):
    def __init__(self) -> None:
        self.killed: list[Any] = []

    def this_node(self) -> str:
        return "here"

    def is_done(self, pending: Any) -> bool:
        return bool(pending.done)

    def result(self, pending: Any, timeout_s: float | None = None) -> Any:
        if isinstance(pending.value, Exception):
            raise pending.value
        return pending.value

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Actor:
    """A worker's; ``over`` when its process has ended."""

    def __init__(self) -> None:
        self.over = Call(done=False)
        self.wait = Remote(lambda: self.over)


def description(name: str, epoch: int = 1) -> WorkerDescription:
    its = member(NodeRef(name, epoch), (Role.DECODE,))
    layout = its.peer_info.layout
    return WorkerDescription(
        its, 0, "there", 1, "stub", None, ("shm",), MODEL, SIZE, layout, "float32", 64, ""
    )


class Watched:
    """A supervision over fakes, a turn at a time."""

    def __init__(self, *names: str) -> None:
        self.router, self.calls = FakeRouter(), FakeCalls()
        self.started: list[str] = []
        self.given_back: list[str] = []
        self.orders: list[tuple[ScaleOrder, frozenset[str]]] = []
        self.refuse: dict[str, Exception] = {}
        self.refuse_gone: list[Exception] = []
        self.now = 0.0
        workers = []
        for name in names:
            actor = Actor()
            workers.append(RunningWorker(actor, description(name), actor.over))
        self.actors = {worker.ref.node_id: worker.actor for worker in workers}
        self.refs = {worker.ref for worker in workers}
        self.made = Supervision(
            Starts(self._start, self._start_router),
            workers,
            RunningRouter(self.router, self.router.ref, 0, "elsewhere"),
            1.0,
            Orders(self._order, self._gone),
            self.calls,
        )
        self.hears(RouterNews(members=frozenset(self.refs)))

    def _start(self, name: str) -> tuple[Any, Any]:
        if name in self.refuse:
            raise self.refuse.pop(name)
        self.started.append(name)
        return Actor(), Call(description(name, 2))

    def _start_router(self, workers: list[WorkerDescription]) -> tuple[Any, Any]:
        self.router = FakeRouter(2)
        return self.router, Call()

    def _order(self, order: ScaleOrder) -> None:
        self.orders.append((order, self.made.leaving()))

    def _gone(self, name: str) -> None:
        if self.refuse_gone:
            raise self.refuse_gone.pop()
        self.given_back.append(name)

    def hears(self, news: RouterNews) -> None:
        """The router says this from now on."""
        self.router.next = news

    def turns(self, number: int = 2) -> None:
        """Time for a question and its answer."""
        for _ in range(number):
            self.now += 100.0
            self.made._turn(self.now)


def ref(name: str, epoch: int = 1) -> NodeRef:
    return NodeRef(name, epoch)


def test_a_drain_is_told_again_until_the_router_knows_of_it() -> None:
    watched = Watched("decode-0", "decode-1")
    watched.made.leave("decode-1")
    assert watched.made.leaving() == {"decode-1"}, "at once: a later order must not count it"
    watched.turns()
    assert set(watched.router.drains()) == {"decode-1"}
    watched.hears(RouterNews(0, (), (), frozenset(watched.refs), frozenset({ref("decode-1")})))
    watched.turns()
    told = len(watched.router.drains())
    watched.turns()
    assert len(watched.router.drains()) == told


def test_a_new_router_is_told_who_leaves() -> None:
    watched = Watched("decode-0", "decode-1")
    watched.made.leave("decode-1")
    watched.turns()
    watched.router.news.answer = ray.exceptions.RayError("it is dead")
    watched.turns()
    while not watched.router.register.told:
        watched.turns(1)
    assert watched.router.ref.epoch == 2
    assert watched.router.drains() == ["decode-1"], "before it places anything there"
    assert {d.member.ref for (d,) in watched.router.register.told[:2]} == watched.refs


def test_who_is_drained_at_the_router_is_leaving_here_before_an_order_is_heard() -> None:
    watched = Watched("decode-0", "decode-1")
    order = ScaleOrder(1, {"decode": 1})
    draining = frozenset({ref("decode-0"), ref("decode-9")})
    watched.hears(RouterNews(1, (), (order,), frozenset(watched.refs), draining))
    watched.turns()
    assert watched.orders == [(order, frozenset({"decode-0"}))]
    watched.hears(RouterNews(2, (Death(ref("decode-0"), "drained", 0.0, drained=True),)))
    watched.turns()
    assert watched.given_back == ["decode-0"]
    assert watched.made.leaving() == frozenset()
    assert watched.calls.killed == [watched.actors["decode-0"]]
    watched.turns(5)
    assert watched.started == []


def test_a_living_router_hears_of_a_worker_that_it_does_not_know() -> None:
    watched = Watched("decode-0", "decode-1")
    watched.hears(RouterNews(members=frozenset({ref("decode-0")})))
    watched.turns()
    assert {d.member.ref for (d,) in watched.router.register.told} == {ref("decode-1")}


def test_a_leaving_worker_that_dies_has_left_and_one_that_is_down_leaves_at_once() -> None:
    watched = Watched("decode-0", "decode-1")
    watched.made.leave("decode-1")
    watched.actors["decode-1"].over.done = True
    watched.made.expect(["decode-2"])
    watched.refuse["decode-2"] = ray.exceptions.RayError("away")
    watched.turns(1)
    watched.made.leave("decode-2")
    watched.turns(5)
    assert watched.given_back == ["decode-1", "decode-2"]
    assert watched.started == []


def test_one_that_cannot_be_started_keeps_no_other_from_it() -> None:
    watched = Watched("decode-0")
    watched.made.expect(["decode-1", "decode-2", "decode-3"])
    watched.refuse["decode-1"] = ray.exceptions.RayError("its store is away")
    watched.turns(1)
    assert watched.started == ["decode-2", "decode-3"]
    watched.turns(1)
    assert watched.started == ["decode-2", "decode-3", "decode-1"]


def test_a_place_that_cannot_be_given_back_now_is_given_back_later() -> None:
    watched = Watched("decode-0", "decode-1")
    watched.refuse_gone = [ray.exceptions.RayError("its store is away")] * 2
    watched.made.leave("decode-1")
    watched.actors["decode-1"].over.done = True
    watched.turns(1)
    assert watched.made.leaving() == {"decode-1"}, "its name is not free yet"
    watched.turns(2)
    assert watched.given_back == ["decode-1"]
    assert watched.made.leaving() == frozenset()


def test_news_are_acknowledged_and_a_new_router_counts_from_nothing() -> None:
    watched = Watched("decode-0")
    watched.hears(RouterNews(5, members=frozenset(watched.refs)))
    watched.turns(3)
    assert watched.router.news.told == [(0,), (5,)]
    watched.router.news.answer = ray.exceptions.RayError("it is dead")
    watched.turns(6)
    assert watched.router.ref.epoch == 2
    assert watched.router.news.told[0] == (0,)
