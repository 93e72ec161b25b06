"""The keeper without Ray: what it says of a start, what it cannot take up, when it gives up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from kvferry.cluster import keeper as module
from kvferry.cluster.config import Config, load_config
from kvferry.cluster.errors import NotReady, PortUnavailable
from kvferry.cluster.following import KeeperNews
from kvferry.cluster.joined_ground import Record, Slot
from kvferry.cluster.keeper import Keeper
from kvferry.cluster.router_actor import RouterEndpoints
from tests.cluster.test_joined_ground import FakeRay

CONFIG = load_config(None, {"ray.address": "auto"})
US, THEM = "command/1", "command/2"
RECORD = Record(
    config=CONFIG.model_dump(mode="json"),
    model_folder="/models/theirs",
    slots={"decode-0": Slot("decode", 1, 1.0, "there")},
    doors=RouterEndpoints("127.0.0.1:7"),
    maker=THEM,
)
LONG_S = 30.0  # a bound that only a fault exceeds


class World:
    """A Ray in which a keeper lives: what it did there, and what its cluster does."""

    def __init__(self) -> None:
        self.places = FakeRay()
        self.swept: list[str] = []
        self.killed = threading.Event()
        self.found: object | None = None
        self.opening = threading.Event()  # a start goes on until this is set
        self.error: Exception | None = None
        self.stops: list[float] = []
        self.stop_ends = threading.Event()
        self.stop_ends.set()
        self.keepers: list[Keeper] = []

    def sweep(self, namespace: str, me: str | None) -> None:
        self.swept.append(namespace)
        self.places.forget()

    def keeper(self, record: Record | bytes | None = None) -> Keeper:
        if record is not None:
            self.places.save(record if isinstance(record, bytes) else record.to_json())
        self.keepers.append(Keeper(CONFIG, "/models/ours", US))
        return self.keepers[-1]

    def end(self) -> None:
        """Let every thread of the keepers end."""
        self.opening.set()
        self.stop_ends.set()
        for keeper in self.keepers:
            keeper._stopping.set()
            keeper._claimed.set()


class FakeCluster:
    grpc, http, metrics = "127.0.0.1:50051", None, None

    def __init__(self, world: World) -> None:
        self.world = world

    def take_up(self, found: object) -> None:
        if self.world.error is not None:
            raise self.world.error

    def open(self, say: Callable[[str], None]) -> None:
        say("starting")
        assert self.world.opening.wait(LONG_S)
        say("ready")
        if self.world.error is not None:
            raise self.world.error

    def stop(self, grace_s: float) -> None:
        self.world.stops.append(grace_s)
        assert self.world.stop_ends.wait(LONG_S)


class FakeContext:
    current_actor = None

    def get_actor_id(self) -> str:
        return "me"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(module, "RayPlaces", lambda namespace: made.places)
    monkeypatch.setattr(module, "sweep", made.sweep)
    monkeypatch.setattr(module, "look", lambda *about: made.found)
    monkeypatch.setattr(module, "num_gpus", lambda: 0.0)
    monkeypatch.setattr(module, "set_up_logging", lambda *about: None)
    monkeypatch.setattr(Keeper, "_cluster_on", lambda self, record, say=None: FakeCluster(made))
    monkeypatch.setattr(ray, "get_runtime_context", FakeContext)
    monkeypatch.setattr(ray, "kill", lambda actor: made.killed.set())
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "AGAIN_LATER_S", 0.02)
    monkeypatch.setattr(module, "ATTENTION_S", 0.01)
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.0)
    yield made
    made.end()


def until(keeper: Keeper, holds: Callable[[KeeperNews], bool]) -> KeeperNews:
    deadline = time.monotonic() + LONG_S
    while not holds(news := keeper.news(0)):
        assert time.monotonic() < deadline, news
        time.sleep(0.001)
    return news


def test_a_start_is_told_and_is_the_maker_s(world: World) -> None:
    keeper = world.keeper()
    assert until(keeper, lambda news: news.lines == ("starting",)).doors is None
    world.opening.set()
    news = until(keeper, lambda news: news.doors is not None)
    assert (news.lines, news.maker, news.stopping_s) == (("starting", "ready"), US, None)


def test_what_is_taken_up_is_the_first_maker_s_and_runs_by_its_own(world: World) -> None:
    world.found = Found()
    theirs = CONFIG.model_copy(update={"decode": CONFIG.decode.model_copy(update={"threads": 7})})
    keeper = world.keeper(replace(RECORD, config=theirs.model_dump(mode="json")))
    news = until(keeper, lambda news: news.doors is not None)
    assert (news.maker, world.swept) == (THEM, [])
    assert keeper.config().decode.threads == 7


class Found:
    workers = ("decode-0",)


def test_who_asks_while_it_ends_is_told_so_and_for_how_long(world: World) -> None:
    world.opening.set()
    world.stop_ends.clear()
    keeper = world.keeper()
    until(keeper, lambda news: news.doors is not None)
    keeper.begin_stop(60.0)
    keeper.begin_stop(1.0)  # the first one counts
    assert keeper.news(0).stopping_s == 60.0
    world.stop_ends.set()
    keeper.stop(1.0)
    assert world.stops == [60.0]
    assert world.killed.wait(LONG_S)


def test_what_cannot_be_taken_up_is_said_each_time_then_given_up_and_left_alone(
    world: World,
) -> None:
    world.found, world.error = Found(), PortUnavailable("127.0.0.1:7 is taken")
    keeper = world.keeper(RECORD)
    news = until(keeper, lambda news: news.failure is not None)
    assert len(news.lines) == module.TRIES - 1
    assert "cannot take up the cluster that runs: 127.0.0.1:7 is taken; again" in news.lines[0]
    assert "its workers are left alone: 'kvferry down', then serve anew" in str(news.failure)
    assert (news.maker, world.swept, world.killed.is_set()) == (THEM, [], False)
    world.error = None  # whatever hindered has gone
    news = until(keeper, lambda news: news.doors is not None)
    assert (news.failure, len(news.lines)) == (None, module.TRIES)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"{", "cannot be read"),
        (b'{"slots": {"decode-0": {"role": "decode"}}}', "cannot be read"),
        (
            replace(RECORD, config={"decode": {"warmth": 3}}).to_json(),
            r"cannot use \(decode.warmth\)",
        ),
    ],
)
def test_another_version_s_cluster_is_named_and_left_alone(
    world: World, record: bytes, said: str
) -> None:
    world.found = Found()
    news = world.keeper(record).news(0)
    assert isinstance(news.failure, NotReady)
    with pytest.raises(NotReady, match=f"{said}.*'kvferry down'"):
        raise news.failure
    assert (news.maker, world.swept) == ("", [])


def test_a_later_version_s_record_is_taken_up_as_far_as_it_is_known(world: World) -> None:
    world.found = Found()
    data: dict[str, Any] = json.loads(RECORD.to_json())
    data["mood"] = "good"
    data["slots"]["decode-0"]["warmth"] = 3
    del data["asked"], data["num_gpus"]
    keeper = world.keeper(json.dumps(data).encode())
    assert until(keeper, lambda news: news.doors is not None).failure is None
    assert asdict(Record.from_json(json.dumps(data).encode())) == asdict(RECORD)


def test_a_start_that_nobody_waits_for_is_undone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABANDONED_S", 0.05)
    world.keeper()  # and its maker dies
    world.opening.set()
    assert world.killed.wait(LONG_S)
    assert world.places.record is None and world.swept


def test_one_that_has_served_needs_nobody_to_ask(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.opening.set()
    first = world.keeper()
    until(first, lambda news: news.doors is not None)
    world.found = Found()
    monkeypatch.setattr(module, "ABANDONED_S", 0.02)
    remade = world.keeper(RECORD)  # by Ray: nobody waits
    assert not world.killed.wait(0.3)
    assert until(remade, lambda news: news.doors is not None).maker == THEM


def test_what_is_not_its_own_outlives_a_keeper_that_nobody_asks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABANDONED_S", 0.02)
    world.keeper(b"{")
    assert world.killed.wait(LONG_S)
    assert (world.swept, world.places.record) == ([], b"{")


def test_the_model_s_folder_is_the_keeper_s(world: World) -> None:
    keeper: Any = world.keeper()
    assert keeper._model_folder == Path("/models/ours")
    assert isinstance(keeper.config(), Config)
