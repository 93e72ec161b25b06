"""Nodes that resources name are waited for before devices and threads are settled by them."""

from __future__ import annotations

import pytest

from kvferry.cluster.errors import Cancelled, NotPlaced
from kvferry.cluster.gathering import gather
from kvferry.cluster.joined_ground import Record, load_record
from tests.cluster.test_joined_ground import FakeRay, config

ROLES = {"prefill__resources": {"P": 1.0}, "decode__resources": {"D": 1.0, "CPU": 0.0}}


class Coming(FakeRay):
    """A Ray whose nodes come one after the other while somebody pauses."""

    def __init__(self, *coming: dict[str, float]) -> None:
        super().__init__()
        self.coming = list(coming)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.coming:
            self.free[f"node-{len(self.free)}"] = self.coming.pop(0)


def never(_seconds: float) -> None:
    pytest.fail("nothing is to be waited for")


def test_nodes_that_offer_what_is_named_are_waited_for() -> None:
    fake, record = Coming({"D": 1.0}, {"GPU": 8.0}, {"P": 1.0}), Record()
    said: list[str] = []
    gather(config(**ROLES), fake, record, said.append, fake.clock, fake.pause)
    assert len(fake.free) == 4 and not fake.coming
    assert fake.requests == [[{"P": 1.0}, {"D": 1.0}]], "asked of the autoscaler, once, for all"
    assert said == [
        "waiting for nodes for prefill-0 (1 P), decode-0 (1 D); the whole cluster has 4 CPU"
    ]
    noted = load_record(fake)
    assert noted is not None and noted.asked and record.asked, "so that 'down' takes it back"


def test_where_nothing_is_named_or_all_is_there_nothing_is_asked() -> None:
    fake = Coming()
    gather(config(decode__replicas=9), fake, Record(), pytest.fail, fake.clock, never)
    fake.free["one"] = {"P": 1.0, "D": 1.0}
    gather(config(**ROLES), fake, Record(), pytest.fail, fake.clock, never)
    assert fake.requests == [] and fake.record is None


def test_each_worker_needs_what_it_names() -> None:
    fake = Coming({"D": 1.0})
    fake.free["one"] = {"P": 1.0, "D": 1.0}
    gather(config(**ROLES, decode__replicas=2), fake, Record(), print, fake.clock, fake.pause)
    assert not fake.coming


def test_after_the_wait_it_fails_and_asks_for_nothing_any_more() -> None:
    fake, said = Coming({"P": 1.0}), list[str]()
    asked = config(**ROLES, ray__placement_wait="1m")
    with pytest.raises(NotPlaced, match=r"no node for decode-0 \(1 D\) after 60 s"):
        gather(asked, fake, Record(), said.append, fake.clock, fake.pause)
    assert len(said) == 4 and 60 <= fake.now < 61
    assert fake.requests[-1] == [] and fake.record is None


def test_who_is_to_stop_stops_waiting() -> None:
    def stopped(_seconds: float) -> None:
        raise Cancelled("enough")

    fake = Coming()
    with pytest.raises(Cancelled):
        gather(config(**ROLES), fake, Record(), print, fake.clock, stopped)
