"""Places on a joined Ray: groups, an autoscaler that is asked, a record for whoever comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvferry.cluster.config import Config, load_config
from kvferry.cluster.errors import Cancelled, NotPlaced
from kvferry.cluster.joined_ground import (
    JoinedGround,
    Record,
    Slot,
    clear,
    load_record,
    where_and_why,
)
from kvferry.cluster.placement import Bundle, fits
from kvferry.cluster.places import Places
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import Share
from kvferry.worker.messages import NodeRef

HEAD = "head"


class FakeRay:
    """Nodes with resources, groups that take them, an autoscaler with nodes to add; time passes
    while somebody waits.
    """

    here = HEAD
    address = "10.0.0.1"

    def __init__(self, spare: int = 0, cpus: float = 4.0, **nodes: Bundle) -> None:
        self.free: dict[str, dict[str, float]] = {HEAD: {"CPU": cpus}}
        self.free |= {name: dict(bundle) for name, bundle in nodes.items()}
        self.spare = spare
        self.groups: dict[str, tuple[Bundle, str | None]] = {}
        self.placed: dict[str, str] = {}
        self.requests: list[list[dict[str, float]]] = []
        self.record: bytes | None = None
        self.now = 0.0
        self.fails = 0  # removals that do not work
        self.meanwhile: list[Callable[[], None]] = []  # while it is asked for a node

    def clock(self) -> float:
        return self.now

    def nodes(self) -> list[tuple[str, str, Bundle]]:
        return [(name, f"at {name}", dict(free)) for name, free in self.free.items()]

    def total(self) -> Bundle:
        return {"CPU": 4.0 * len(self.free)}

    def create(self, name: str, bundle: Bundle, target: str | None) -> None:
        assert name not in self.groups
        self.groups[name] = (dict(bundle), target)

    def wait(self, name: str, timeout_s: float) -> bool:
        bundle, target = self.groups[name]
        order = sorted(self.free, key=lambda node: node != target)
        for node in order if name not in self.placed else ():
            if fits(bundle, self.free[node]):
                for key, amount in bundle.items():
                    self.free[node][key] -= amount
                self.placed[name] = node
                break
        if name not in self.placed:
            self.now += timeout_s
        return name in self.placed

    def node_of(self, name: str) -> str | None:
        while self.meanwhile:
            self.meanwhile.pop()()
        return self.placed.get(name)

    def remove(self, name: str) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("the store is away")
        bundle, _ = self.groups.pop(name, ({}, None))
        node = self.placed.pop(name, None)
        if node is not None:
            for key, amount in bundle.items():
                self.free[node][key] += amount

    def names(self) -> list[str]:
        return list(self.groups)

    def in_group(self, name: str) -> dict[str, Any]:
        return {"group": name} if name in self.groups else self._none(name)

    def _none(self, name: str) -> dict[str, Any]:
        raise ValueError(f"no group {name}")

    def beside_us(self) -> dict[str, Any]:
        return {"node": HEAD}

    def request(self, bundles: Sequence[Bundle]) -> None:
        self.requests.append([dict(bundle) for bundle in bundles])
        for at in range(self.spare if bundles else 0):
            self.free[f"new-{at}"] = {"CPU": 4.0, "GPU": 1.0}
        self.spare = 0

    def load(self) -> bytes | None:
        return self.record

    def save(self, record: bytes) -> None:
        self.record = record

    def forget(self) -> None:
        self.record = None


def ground_on(fake: FakeRay, record: Record | None = None, **overrides: object) -> JoinedGround:
    places: Places = fake
    return JoinedGround(config(**overrides), places, record or Record(), fake.clock)


def config(**overrides: object) -> Config:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, {"ray.address": "10.0.0.1:6379", **keys})


class FakeActor:
    """Runs at a node with this address what Ray runs there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.__ray_call__ = self

    def remote(self, function: object, reserved: str, slot: Slot) -> str:
        assert callable(function)
        return where_and_why(self.address, reserved, slot)


def why(ground: JoinedGround, name: str, address: str) -> str:
    said: str = ground.why(name, FakeActor(address))
    return said


def roles(**counts: int) -> dict[str, str]:
    return {f"{role}-{at}": role for role, count in counts.items() for at in range(count)}


def test_workers_share_the_cpus_and_the_memory_of_their_nodes() -> None:
    fake = FakeRay(cpus=5.0, one={"CPU": 4.0})
    ground = ground_on(fake)
    ground.assign(roles(prefill=1, decode=2), pytest.fail)
    assert fake.placed == {"prefill-0": HEAD, "decode-0": "one", "decode-1": HEAD}
    assert ground.share("decode-1") == Share(2, 0.5, pin_cores=True)
    assert ground.share("decode-0") == Share(2, 1.0, pin_cores=True)
    assert fake.requests == []
    assert why(ground, "decode-0", "at one") == (
        "at one, with 2 CPU: decode workers are spread: no other decode there"
    )
    assert why(ground, "decode-0", HEAD) == "head, with 2 CPU: Ray moved it there from at one"


def test_what_fits_nowhere_is_asked_of_the_autoscaler_with_all_the_rest() -> None:
    fake = FakeRay(spare=1)
    ground = ground_on(fake, decode__resources={"GPU": 1.0}, prefill__threads=2)
    said: list[str] = []
    ground.assign(roles(prefill=1, decode=1), said.append)
    wanted = [{"CPU": 2}, {"CPU": 1, "GPU": 1.0}]
    assert fake.requests == [wanted]
    assert fake.placed["decode-0"] == "new-0"
    assert len(said) == 1 and "waiting for Ray to place decode-0 (1 CPU, 1 GPU)" in said[0]
    assert why(ground, "decode-0", "at new-0") == (
        "at new-0, with 1 CPU, 1 GPU: where Ray found room"
    )
    ground.release("decode-0")
    assert fake.requests == [wanted, [{"CPU": 2}]]  # nobody holds a node for what has gone
    ground.close()
    assert fake.requests[-1] == []
    assert (fake.groups, fake.record) == ({}, None)


def test_no_room_in_time_leaves_nothing_behind_and_says_what_there_is() -> None:
    fake = FakeRay()
    ground = ground_on(fake, decode__resources={"GPU": 1.0}, ray__placement_wait="1m")
    said: list[str] = []
    with pytest.raises(NotPlaced, match=r"no room for decode-0 \(.* after 60 s .* has 4 CPU"):
        ground.assign(roles(prefill=1, decode=1), said.append)
    assert fake.now == 60.0
    assert len(said) == 4  # after 2, 17, 32 and 47 s
    assert (fake.groups, ground.names()) == ({}, {})
    assert fake.requests[-1] == [], "nobody holds a node for what did not come"
    clear(fake)
    assert fake.requests[-1] == []


def test_an_order_that_found_no_room_leaves_the_autoscaler_asked_for_what_is_there() -> None:
    fake = FakeRay()
    ground = ground_on(fake, decode__threads=1, prefill__threads=2)
    ground.assign(roles(prefill=1, decode=1), pytest.fail)
    with pytest.raises(NotPlaced):
        ground.assign({"decode-1": "decode", "decode-2": "decode"}, lambda line: None)
    assert fake.requests[0] == [{"CPU": 2}, {"CPU": 1}, {"CPU": 1}, {"CPU": 1}]
    assert fake.requests[-1] == [{"CPU": 2}, {"CPU": 1}]


def test_whoever_is_not_needed_any_more_waits_no_longer() -> None:
    fake = FakeRay()
    ground = ground_on(fake, decode__resources={"GPU": 1.0})

    def check() -> None:
        if fake.now > 5.0:
            raise Cancelled("another order")

    with pytest.raises(Cancelled, match="another order"):
        ground.assign(roles(decode=1), lambda line: None, check=check)
    assert fake.now < 6.0
    assert (fake.groups, fake.requests[-1]) == ({}, [])


@pytest.mark.parametrize("spare", [0, 1])
def test_what_is_closed_amid_waiting_saves_and_asks_no_more(spare: int) -> None:
    """Whether or not there is room by then."""
    fake = FakeRay(spare=spare)
    ground = ground_on(fake, decode__resources={"GPU": 1.0})
    asked: list[int] = []

    def close(line: str) -> None:
        ground.close()
        asked.append(len(fake.requests))

    with pytest.raises(Cancelled, match="being taken down"):
        ground.assign(roles(decode=1), close)
    assert asked == [len(fake.requests)]
    assert (fake.record, fake.groups, ground.names()) == (None, {}, {})
    with pytest.raises(Cancelled):
        ground.assign(roles(decode=1), pytest.fail)
    ground.release("decode-0")
    ground.opened(RouterEndpoints("127.0.0.1:1"))
    assert (fake.record, fake.groups) == (None, {})


def test_what_belongs_to_nobody_is_given_back_when_a_successor_takes_up() -> None:
    fake = FakeRay(cpus=8.0)
    ground = ground_on(fake, decode__threads=1, prefill__threads=1)
    ground.assign(roles(prefill=1, decode=2), pytest.fail)
    fake.create("decode-7", {"CPU": 1.0}, None)  # its keeper died amid assigning
    fake.remove("decode-1")  # and amid releasing
    record = load_record(fake)
    assert record is not None
    heir = ground_on(fake, record)
    heir.tidy()
    assert set(fake.groups) == set(heir.names()) == {"prefill-0", "decode-0"}
    again = load_record(fake)
    assert again is not None and again.slots.keys() == heir.names().keys()


def test_a_name_is_taken_until_its_place_is_given_back() -> None:
    fake = FakeRay()
    ground = ground_on(fake, decode__threads=1, prefill__threads=1)
    ground.assign(roles(prefill=1, decode=1), pytest.fail)
    fake.fails = 1
    with pytest.raises(OSError, match="away"):
        ground.release("decode-0")
    assert "decode-0" in ground.names()
    ground.release("decode-0")
    assert (set(fake.groups), set(ground.names())) == ({"prefill-0"}, {"prefill-0"})


def test_the_record_may_change_while_places_are_looked_for() -> None:
    """As when a worker has drained while an order looks at the nodes."""
    fake = FakeRay(cpus=8.0)
    ground = ground_on(fake, decode__threads=1, prefill__threads=1)
    ground.assign(roles(prefill=1, decode=2), pytest.fail)
    fake.meanwhile = [lambda: ground.release("decode-1")]
    ground.assign({"decode-2": "decode"}, pytest.fail)
    record = load_record(fake)
    assert record is not None
    assert record.slots.keys() == ground.names().keys() == {"prefill-0", "decode-0", "decode-2"}


def test_more_workers_get_the_threads_of_those_of_their_role() -> None:
    fake = FakeRay(cpus=9.0)
    ground = ground_on(fake)
    ground.assign(roles(prefill=1, decode=1), pytest.fail)
    assert ground.share("decode-0").threads == 4
    with pytest.raises(NotPlaced):
        ground.assign({"decode-1": "decode"}, lambda line: None)
    ground.release("prefill-0")
    ground.assign({"decode-1": "decode"}, pytest.fail)
    assert ground.share("decode-1").threads == 4
    assert ground.names() == {"decode-0": "decode", "decode-1": "decode"}


def test_a_successor_reads_what_there_is_to_be_and_where_the_doors_are() -> None:
    fake = FakeRay()
    known = Record(config={"ray": {}}, model_folder="m", num_gpus=2.0, secret="00ff")
    assert "00ff" not in repr(known)
    ground = ground_on(fake, known)
    ground.assign(roles(prefill=1, decode=1), pytest.fail)
    ground.opened(RouterEndpoints("127.0.0.1:1", None, "127.0.0.1:2"))
    record = load_record(fake)
    assert record is not None
    assert (record.config, record.model_folder) == ({"ray": {}}, "m")
    assert (record.num_gpus, record.secret) == (2.0, "00ff")
    assert record.doors == RouterEndpoints("127.0.0.1:1", None, "127.0.0.1:2")
    heir = ground_on(fake, record)
    assert heir.names() == ground.names()
    assert heir.share("decode-0") == ground.share("decode-0")


def test_actors_are_detached_with_their_life_in_their_name() -> None:
    fake = FakeRay(one={"CPU": 1.0, "mine": 1.0})
    ground = ground_on(fake, decode__resources={"mine": 1.0})
    ground.assign(roles(prefill=1, decode=1), pytest.fail)
    options = ground.worker_options(NodeRef("decode-0", 7))
    assert options == {
        "num_cpus": 1,
        "resources": {"mine": 1.0},
        "name": "kvferry/decode-0/7",
        "namespace": "kvferry",
        "lifetime": "detached",
        "group": "decode-0",
    }
    router = ground.router_options(NodeRef("router-0", 8))
    assert (router["num_cpus"], router["node"]) == (1, HEAD)
    fake.free[HEAD]["CPU"] = 0.0
    assert ground.router_options(NodeRef("router-0", 9))["num_cpus"] == 0
    ground.release("decode-0")
    ground.release("decode-0")
    with pytest.raises(KeyError):
        ground.worker_options(NodeRef("decode-0", 10))


@pytest.mark.parametrize(
    ("host", "expected"), [("auto", "10.0.0.1"), ("node", "10.0.0.1"), ("loopback", "127.0.0.1")]
)
def test_the_router_listens_where_other_nodes_reach_it_unless_told_not_to(
    host: str, expected: str
) -> None:
    assert ground_on(FakeRay(), transfer__host=host).host == expected
