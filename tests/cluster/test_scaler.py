"""Orders to scale are carried out one at a time, the latest counts, and each is answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest

from kvferry.cluster.config import load_config
from kvferry.cluster.errors import Cancelled, InvalidRequest, NotPlaced, NotReady
from kvferry.cluster.ground import Check, OwnGround, Say, nothing
from kvferry.cluster.scaler import Scaler
from kvferry.cluster.scaling import ScaleDone, ScaleOrder


class FakeGround(OwnGround):
    """Has room for so many; ``while_waiting`` is what happens before it finds some."""

    def __init__(self, room: int = 100, **counts: int) -> None:
        super().__init__(load_config(None, {}), dict)
        self.room = room
        self.while_waiting: Callable[[], None] = nothing
        self._names = {f"{role}-{at}": role for role, n in counts.items() for at in range(n)}

    def assign(
        self,
        roles: Mapping[str, str],
        say: Say,
        going: Collection[str] = (),
        check: Check = nothing,
    ) -> None:
        say(f"waiting for {', '.join(roles)}")
        self.while_waiting()
        check()
        if len(self._names) - len(going) + len(roles) > self.room:
            raise NotPlaced("no room")
        self._names.update(roles)


class FakeCrew:
    """Does what it is told, when it is told to."""

    def __init__(self, *down: str) -> None:
        self.down = frozenset(down)
        self.lively = frozenset({f"{role}-{at}" for role in ("prefill", "decode") for at in (0, 1)})
        self.left: list[str] = []
        self.expected: list[str] = []
        self.answers: list[ScaleDone] = []
        self.said: list[tuple[int, str]] = []

    def leaving(self) -> frozenset[str]:
        return frozenset(self.left)

    def alive(self) -> frozenset[str]:
        return self.lively - self.down

    def expect(self, names: Collection[str]) -> None:
        self.expected += names

    def leave(self, name: str) -> None:
        self.left.append(name)

    def scaled(self, done: ScaleDone) -> None:
        self.answers.append(done)

    def scale_says(self, order_id: int, line: str) -> None:
        self.said.append((order_id, line))


def scaler_on(ground: FakeGround, crew: FakeCrew) -> Scaler:
    return Scaler(ground, crew, ("prefill", "decode"), lambda work: work())


def test_a_worker_that_is_down_is_not_given_up_by_an_order_for_others() -> None:
    crew = FakeCrew("decode-1")
    scaler_on(FakeGround(prefill=1, decode=2), crew).take(ScaleOrder(1, {"prefill": 2}))
    (done,) = crew.answers
    assert (done.error, done.wanted) == (None, {"prefill": 2, "decode": 2, "colocated": 0})
    assert (crew.left, crew.expected) == ([], ["prefill-1"])
    assert crew.said == [(1, "waiting for prefill-1")]


def test_who_leaves_is_not_counted_by_the_next_order() -> None:
    crew, ground = FakeCrew(), FakeGround(prefill=1, decode=2)
    scaler = scaler_on(ground, crew)
    scaler.take(ScaleOrder(1, {"decode": 1}))
    assert (crew.left, crew.answers[0].going) == (["decode-1"], {"decode-1"})
    scaler.take(ScaleOrder(2, {"decode": 2}))
    assert (crew.left, crew.expected) == (["decode-1"], ["decode-2"])


def test_an_order_that_cannot_be_carried_out_sends_nobody_away() -> None:
    crew = FakeCrew()
    scaler = scaler_on(FakeGround(prefill=2, decode=2), crew)
    scaler.take(ScaleOrder(1, {"prefill": 1, "colocated": 1}))
    scaler.take(ScaleOrder(2, {"prefill": 1, "decode": 0}))
    first, second = (done.error for done in crew.answers)
    assert isinstance(first, NotReady) and "began without colocated workers" in str(first)
    assert isinstance(second, InvalidRequest) and "got 1 prefill, 0 decode" in str(second)
    assert crew.left == []


def test_what_found_no_room_is_told_and_not_expected() -> None:
    crew = FakeCrew()
    scaler_on(FakeGround(3, prefill=1, decode=2), crew).take(ScaleOrder(1, {"decode": 3}))
    assert isinstance(crew.answers[0].error, NotPlaced)
    assert crew.expected == []


def test_the_places_of_those_that_leave_count_as_free() -> None:
    crew = FakeCrew()
    order = ScaleOrder(1, {"prefill": 2, "decode": 1})
    scaler_on(FakeGround(3, prefill=1, decode=2), crew).take(order)
    assert (crew.left, crew.expected) == (["decode-1"], ["prefill-1"])


def test_an_order_that_comes_again_is_answered_again_and_carried_out_once() -> None:
    crew = FakeCrew()
    scaler = scaler_on(FakeGround(prefill=1, decode=1), crew)
    for _ in range(3):
        scaler.take(ScaleOrder(7, {"decode": 2}))
    assert crew.expected == ["decode-1"]
    assert [done.order_id for done in crew.answers] == [7, 7, 7]
    scaler.take(ScaleOrder(6, {"decode": 5}))  # of the router's earlier life
    assert len(crew.answers) == 3


def test_a_later_order_ends_the_wait_of_an_earlier_one() -> None:
    crew, ground, queued = FakeCrew(), FakeGround(prefill=1, decode=1), list[Callable[[], None]]()
    scaler = Scaler(ground, crew, ("prefill", "decode"), queued.append)

    def another() -> None:
        ground.while_waiting = nothing
        scaler.take(ScaleOrder(2, {"decode": 2}))

    ground.while_waiting = another
    scaler.take(ScaleOrder(1, {"decode": 900}))
    while queued:
        queued.pop(0)()
    assert crew.expected == ["decode-1"]
    first, second = crew.answers
    assert isinstance(first.error, Cancelled) and "another order" in str(first.error)
    assert (second.order_id, second.error) == (2, None)


@pytest.mark.parametrize("amid", [False, True])
def test_nobody_comes_once_it_is_stopped(amid: bool) -> None:
    crew, ground = FakeCrew(), FakeGround(prefill=1, decode=1)
    scaler = scaler_on(ground, crew)
    if amid:
        ground.while_waiting = scaler.stop
    else:
        scaler.stop()
    scaler.take(ScaleOrder(1, {"decode": 2}))
    assert isinstance(crew.answers[0].error, Cancelled)
    assert crew.expected == []
