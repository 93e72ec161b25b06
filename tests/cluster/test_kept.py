"""A cluster that is looked on: whose end is whose, on a fake Ray of keepers and a record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from kvferry.cluster import kept as module
from kvferry.cluster import ours
from kvferry.cluster.config import Config, ConfigError, load_config
from kvferry.cluster.errors import Internal, NotReady
from kvferry.cluster.following import KeeperNews
from kvferry.cluster.kept import KeptCluster
from kvferry.cluster.router_actor import RouterEndpoints

DOORS = RouterEndpoints("127.0.0.1:50051")
CONFIG = load_config(None, {"ray.address": "auto"})
Answer = Callable[[], Any]


class FakeKeeper:
    """A handle: calls become answers that ``ray.get`` asks for."""

    def __init__(self, name: str, maker: str, **more: Any) -> None:
        self.name, self.error = name, more.pop("error", None)
        self.told = KeeperNews(
            (), more.pop("doors", DOORS), more.pop("failure", None), maker, **more
        )
        self.running = CONFIG
        self.stops: list[float] = []
        self._actor_id = self
        self.news = self.config = self.stop = self

    def hex(self) -> str:
        return self.name

    def remote(self, *arguments: Any) -> Answer:
        if arguments and isinstance(arguments[0], float):
            self.stops.append(arguments[0])
        return self._config if not arguments else self._answer

    def _answer(self) -> KeeperNews:
        if self.error is not None:
            raise self.error
        return self.told

    def _config(self) -> Config:
        return self.running


class FakeRay:
    def __init__(self) -> None:
        self.there: FakeKeeper | None = None
        self.next: list[FakeKeeper] = []  # what is made, in order
        self.record: bytes | None = b"{}"
        self.taken_down: list[str] = []
        self.makers: list[str] = []
        self.folders: list[Path] = []
        self.now = 0.0

    def start(self, config: Config, folder: Path, maker: str) -> FakeKeeper:
        self.makers.append(maker)
        self.folders.append(folder)
        self.there = self.next.pop(0)
        if self.there.told.maker == "us":
            told = self.there.told
            self.there.told = KeeperNews(told.lines, told.doors, told.failure, maker)
        return self.there

    def take_down(self, namespace: str, grace_s: float, only: FakeKeeper) -> None:
        self.taken_down.append(only.name)
        self.there = None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.there is not None and self.there.told.stopping_s is not None:
            self.there = None  # it has ended meanwhile

    def load(self) -> bytes | None:
        return self.record


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(module, "find_keeper", lambda namespace: made.there)
    monkeypatch.setattr(module, "take_down", made.take_down)
    monkeypatch.setattr(module, "_start", made.start)
    monkeypatch.setattr(module, "init_ray", lambda config: False)
    monkeypatch.setattr(module, "RayPlaces", lambda namespace: made)
    clock = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer())
    monkeypatch.setattr(ray, "get_runtime_context", lambda: FakeContext())
    return made


class FakeContext:
    gcs_address = "127.0.0.1:6379"


def join(config: Config = CONFIG, anew: bool = False) -> tuple[KeptCluster, list[str]]:
    said: list[str] = []
    return KeptCluster.join(config, lambda: (config, Path("model")), said.append, anew), said


def died() -> Exception:
    return ray.exceptions.ActorDiedError()


def test_what_it_starts_is_its_own_with_a_folder_that_any_process_finds(world: FakeRay) -> None:
    world.next = [FakeKeeper("a", "us")]
    _, said = join()
    assert world.folders == [Path("model").absolute()]
    assert not any("found a running cluster" in line for line in said)


def test_the_loser_of_two_starts_finds_and_is_held_to_what_runs(world: FakeRay) -> None:
    world.next = [FakeKeeper("theirs", "command/other")]
    _, said = join()
    assert any("found a running cluster" in line for line in said)
    world.there, world.next = None, [FakeKeeper("theirs", "command/other")]
    world.next[0].running = load_config(None, {"server.auth": {"tokens_file": "/tokens"}})
    with pytest.raises(ConfigError, match=r"otherwise: server\.auth"):
        join()
    assert world.taken_down == []


@pytest.mark.parametrize("error", [Internal("no"), KeyboardInterrupt()])
def test_a_failure_ends_what_it_began_and_nothing_else(
    world: FakeRay, error: BaseException
) -> None:
    theirs = FakeKeeper("theirs", "command/other", doors=None)
    world.there, theirs.error = theirs, error
    with pytest.raises(type(error)):
        join()
    assert world.taken_down == []
    failed = FakeKeeper("ours", "us", doors=None, failure=Internal("no"))
    world.there, world.next = None, [failed]
    with pytest.raises(Internal):
        join()
    assert world.taken_down == ["ours"]


def test_one_that_ends_is_waited_for_then_there_is_another(world: FakeRay) -> None:
    world.there = FakeKeeper("old", "command/other", stopping_s=60.0)
    world.next = [FakeKeeper("new", "us")]
    _, said = join()
    assert "waiting for the cluster that is being taken down: its streams have 60 s" in said
    assert world.taken_down == []


def test_an_application_s_successor_ends_its_forerunner_s_and_no_other_s(world: FakeRay) -> None:
    world.there = FakeKeeper("old", "application/1")
    world.next = [FakeKeeper("new", "us")]
    join(anew=True)
    assert world.taken_down == ["old"]
    world.there = FakeKeeper("somebody's", "command/1")
    with pytest.raises(ConfigError, match="'kvferry serve' began"):
        join(anew=True)
    assert world.taken_down == ["old"]


def looking_on(world: FakeRay) -> tuple[KeptCluster, FakeKeeper]:
    keeper = FakeKeeper("ours", "us")
    world.next = [keeper]
    cluster, _ = join()
    return cluster, keeper


def test_it_has_ended_when_keeper_and_record_have_gone(world: FakeRay) -> None:
    cluster, keeper = looking_on(world)
    assert not cluster.ended()
    keeper.error = died()
    assert not cluster.ended()  # Ray still knows its name
    world.there, world.record = None, None
    assert cluster.ended()


def test_a_keeper_that_has_died_for_good_is_no_end_and_that_is_said(world: FakeRay) -> None:
    cluster, keeper = looking_on(world)
    keeper.error, world.there = died(), None
    assert not cluster.ended()  # 'down' may be about to end the rest
    world.now += module.SWEPT_S
    with pytest.raises(NotReady, match="has died, and what it watched is left alone"):
        cluster.ended()
    keeper.error = ray.exceptions.ActorUnschedulableError("the node is dead")
    with pytest.raises(NotReady, match="its node is lost"):
        cluster.ended()


def test_another_cluster_in_its_place_is_its_end(world: FakeRay) -> None:
    cluster, keeper = looking_on(world)
    keeper.error, world.there = died(), FakeKeeper("new", "command/other")
    assert cluster.ended()


def test_a_new_keeper_of_the_same_cluster_is_looked_on(world: FakeRay) -> None:
    cluster, keeper = looking_on(world)
    keeper.error, world.there = died(), FakeKeeper("new", keeper.told.maker)
    assert not cluster.ended()
    cluster.stop(1.0)
    assert world.taken_down == ["new"]


def test_one_that_cannot_be_taken_up_is_told(world: FakeRay) -> None:
    cluster, keeper = looking_on(world)
    keeper.told = KeeperNews((), None, NotReady("port taken"), keeper.told.maker)
    with pytest.raises(NotReady, match="port taken"):
        cluster.ended()


class Ground:
    """Actors of a namespace by name, for the enders themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **actors: FakeKeeper) -> None:
        self.actors = {f"kvferry/{name}": actor for name, actor in actors.items()}
        self.killed: list[str] = []
        self.cleared = 0
        monkeypatch.setattr(ours, "our_actors", lambda namespace: sorted(self.actors))
        monkeypatch.setattr(ours, "find_actor", lambda namespace, name: self.actors.get(name))
        monkeypatch.setattr(ours, "RayPlaces", lambda namespace: self)
        monkeypatch.setattr(ours, "clear", self.clear)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: FakeContext())
        monkeypatch.setattr(ray, "wait", lambda refs, timeout: None)
        monkeypatch.setattr(ray, "kill", self.kill)

    def clear(self, places: object) -> None:
        self.cleared += 1

    def names(self) -> list[str]:
        return ["decode-0"]

    def kill(self, actor: FakeKeeper) -> None:
        self.killed.append(actor.name)


def test_ending_one_cluster_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, worker = FakeKeeper("old", "a"), FakeKeeper("new", "b"), FakeKeeper("worker", "")
    ground = Ground(monkeypatch, keeper=new, worker=worker)
    assert ours.take_down("kvferry", 5.0, only=old).num_actors == 0
    ours.sweep("kvferry", "old")
    assert (ground.killed, ground.cleared, new.stops) == ([], 0, [])
    assert ours.take_down("kvferry", 5.0).num_actors == 2
    assert (ground.killed, ground.cleared, new.stops) == (["new", "worker"], 1, [5.0])


def test_what_a_lost_keeper_left_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch, worker=FakeKeeper("worker", ""))
    ours.take_down("kvferry", 5.0, only=FakeKeeper("lost", "a"))
    assert (ground.killed, ground.cleared) == (["worker"], 1)
