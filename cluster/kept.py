"""A cluster on a joined Ray, from outside: found or started, followed, ended.

The process that serves only looks on: what it has started lives on when it dies, and the next one
finds it. It ends what it began itself, and otherwise only what it is asked to. Knows the keeper and
no worker.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.cluster.config import Config, ConfigError
from kvferry.cluster.errors import NotReady
from kvferry.cluster.following import LOST, POLL_S, Fate, Following, KeeperNews
from kvferry.cluster.ground import Say
from kvferry.cluster.joined_ground import KEEPER
from kvferry.cluster.keeper import Keeper
from kvferry.cluster.ours import STOP_S, find_keeper, id_of, take_down
from kvferry.cluster.ray_actors import get, node_id
from kvferry.cluster.ray_places import RayPlaces
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import absolute_paths

ANSWER_S = 5.0
FIRST_ANSWER_S = 60.0  # of a keeper whose process is being started
SWEPT_S = 15.0  # after the keeper's end, and all else has ended as well
ROUNDS = 5  # of finding a keeper that has gone when it is asked
OPENNESS = ("server.tls", "server.auth", "tenants", "transfer.host")  # who gets in, and where
APPLICATION, COMMAND = "application/", "command/"  # what makers' names begin with
REPLACED_GRACE_S = 5.0  # for streams of a cluster that makes room for another


class KeptCluster:
    """See the module; attributes as those of ``launcher.Cluster``."""

    def __init__(
        self,
        keeper: Any,
        config: Config,
        doors: RouterEndpoints,
        maker: str,
        owns_connection: bool,
    ) -> None:
        """``config``: what the cluster runs by; ``maker``: who began it."""
        self.config = config
        self.grpc, self.http, self.metrics = doors.grpc, doors.http, doors.metrics
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self.startup_s = 0.0
        self._keeper, self._maker = keeper, maker
        self._namespace = config.ray.namespace
        self._owns_connection = owns_connection  # else we are in an actor, or somebody's driver
        self._stopped = False
        self._dead_since: float | None = None

    @classmethod
    def join(
        cls,
        config: Config,
        resolve: Callable[[], tuple[Config, Path]],
        say: Say,
        anew: bool = False,
    ) -> KeptCluster:
        """Find the cluster of the namespace, or start one by ``resolve``'s configuration and model.

        Returns when it is ready. ``anew``: one that an earlier call with ``anew`` began is ended
        first, and one that others began is not taken up. Raises whatever kept a part from starting,
        and ConfigError if the cluster that runs is open to others than ``config`` says.
        """
        began = time.monotonic()
        config = absolute_paths(config)  # the keeper runs in another folder
        say(f"joining the Ray cluster at {config.ray.address}")
        owns_connection = init_ray(config)
        namespace = config.ray.namespace
        maker = f"{APPLICATION if anew else COMMAND}{uuid.uuid4().hex}"
        for _ in range(ROUNDS):
            keeper = find_keeper(namespace)
            was_there = keeper is not None
            if keeper is None:
                resolved, folder = resolve()
                keeper = _start(absolute_paths(resolved), folder.absolute(), maker)
            following = Following(_asking(keeper), maker, time.sleep, time.monotonic)
            try:
                fate = following.run(say, only_ours=anew)
                if fate is Fate.SERVING:
                    running: Config = get(keeper.config.remote())
                    check_openness(config, running)
            except BaseException:
                if not was_there or following.is_ours:
                    _undo(namespace, keeper, following)
                raise
            if fate is Fate.SERVING:
                told = following.news
                assert told is not None and told.doors is not None
                if not following.is_ours:
                    say(f"found a running cluster in namespace {namespace}: serving it on")
                for line in differences(config.model_dump(), running.model_dump()):
                    say(f"warning: {line}: 'kvferry down' and serve again to change it")
                cluster = cls(keeper, running, told.doors, told.maker, owns_connection)
                cluster.startup_s = time.monotonic() - began
                return cluster
            if fate is Fate.OTHERS:
                _make_room(namespace, keeper, following, say)
            elif fate is Fate.DEAD and following.is_ours:
                take_down(namespace, 0.0, only=keeper)
                break
            _wait_gone(namespace, keeper, following.news, say)
        raise NotReady(f"the keeper died before the cluster was ready: {following.cause}")

    def ended(self) -> bool:
        """Whether somebody else has ended it.

        Raises NotReady if it has not been ended, but is not watched by a keeper any more, or cannot
        be taken up by it.
        """
        try:
            news = self._ask(self._keeper)
        except (ray.exceptions.ActorDiedError, ValueError):
            return self._has_gone()
        except ray.exceptions.ActorUnschedulableError as error:
            raise NotReady(f"the keeper has died: {LOST}") from error
        except ray.exceptions.RayError:  # it is being started again, or is slow
            return False
        if news.failure is not None and news.stopping_s is None:
            raise news.failure
        return False

    def _ask(self, keeper: Any) -> KeeperNews:
        news: KeeperNews = ray.get(keeper.news.remote(sys.maxsize), timeout=ANSWER_S)
        return news

    def _has_gone(self) -> bool:
        """The keeper will not answer any more. Whether the cluster has gone, too."""
        keeper = find_keeper(self._namespace)
        if keeper is not None:
            if id_of(keeper) == id_of(self._keeper):
                return False  # Ray has not yet struck it off
            try:
                news = self._ask(keeper)
            except ray.exceptions.RayError:  # it is on its way
                return False
            if news.maker != self._maker:
                return True  # another cluster is there
            self._keeper = keeper  # it has taken up what the lost one watched
            self._dead_since = None
            return False
        now = time.monotonic()
        self._dead_since = now if self._dead_since is None else self._dead_since
        if RayPlaces(self._namespace).load() is None:
            return True
        if now - self._dead_since < SWEPT_S:  # whoever ended the keeper is about to end the rest
            return False
        raise NotReady(
            "the keeper has died, and what it watched is left alone: serve again to take it up, or "
            "'kvferry down' to end it"
        )

    def begin_stop(self, grace_s: float) -> None:
        """From when this returns the cluster ends, whatever becomes of this process."""
        with contextlib.suppress(ray.exceptions.RayError):  # then ``stop`` does it without a keeper
            ray.get(self._keeper.begin_stop.remote(grace_s), timeout=ANSWER_S)

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be served now; empty when ready."""
        try:
            asked = self._keeper.not_ready_reasons.remote()
            reasons: list[str] = ray.get(asked, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:  # a time-out too
            return [f"the keeper does not answer ({type(error).__name__})"]
        return reasons

    def stop(self, grace_s: float) -> None:
        """Let streams finish for ``grace_s`` seconds, then end every process; idempotent.

        A cluster that has taken this one's place is left alone.
        """
        if self._stopped:
            return
        self._stopped = True
        take_down(self._namespace, grace_s, only=self._keeper)
        self._disconnect()

    def leave(self) -> None:
        """Let it run, and look on no longer."""
        self._stopped = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_connection:
            ray.shutdown()


def _asking(keeper: Any) -> Callable[[int], KeeperNews]:
    def ask(known: int) -> KeeperNews:
        news: KeeperNews = ray.get(keeper.news.remote(known), timeout=FIRST_ANSWER_S)
        return news

    return ask


def _undo(namespace: str, keeper: Any, following: Following) -> None:
    """End what we began, and nothing else. A keeper that cannot say gives up by itself."""
    if following.news is None:
        with contextlib.suppress(Exception):  # it is on its way, or has died at once
            following.look()
    if following.is_ours:
        take_down(namespace, 0.0, only=keeper)


def _make_room(namespace: str, keeper: Any, following: Following, say: Say) -> None:
    """End what an earlier replica of the application began. Raises ConfigError if it was not."""
    assert following.news is not None
    if not following.news.maker.startswith(APPLICATION):
        raise ConfigError(
            f"a cluster runs in namespace {namespace} that 'kvferry serve' began: end it first "
            "with 'kvferry down', or give the application a ray.namespace of its own"
        )
    say("ending the cluster of an earlier replica")
    take_down(namespace, REPLACED_GRACE_S, only=keeper)


def _wait_gone(namespace: str, keeper: Any, news: KeeperNews | None, say: Say) -> None:
    """Until the namespace is free of a keeper that ends. Raises NotReady if it does not end."""
    grace_s = (news.stopping_s or 0.0) if news is not None else 0.0
    deadline = time.monotonic() + grace_s + 2 * STOP_S
    if grace_s:
        say(f"waiting for the cluster that is being taken down: its streams have {grace_s:g} s")
    while (there := find_keeper(namespace)) is not None and id_of(there) == id_of(keeper):
        if time.monotonic() > deadline:
            raise NotReady(
                f"a cluster in namespace {namespace} is being taken down and does not end: "
                "'kvferry down' ends it"
            )
        time.sleep(POLL_S)


def check_openness(ours: Config, theirs: Config) -> None:
    """Raise ConfigError if a cluster that runs lets others in than ``ours`` would.

    Only keys are named: values may be secret.
    """
    keys = [key for key in OPENNESS if _at(ours, key) != _at(theirs, key)]
    if keys:
        raise ConfigError(
            f"a cluster runs in namespace {theirs.ray.namespace} that has otherwise: "
            f"{', '.join(keys)}; end it first with 'kvferry down', or serve with its values"
        )


def _at(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], section: str = ""
) -> Iterator[str]:
    """What the running cluster's configuration has otherwise, a line for each key."""
    for name, value in ours.items():
        key, other = f"{section}{name}", theirs.get(name)
        if key in ("ray.address", "model.served_name", "logging"):
            continue
        if isinstance(value, Mapping) and isinstance(other, Mapping) and name != "resources":
            yield from differences(value, other, f"{key}.")
        elif value != other:
            yield f"{key} is {other!r} in the running cluster, not {value!r}"


def _start(config: Config, folder: Path, maker: str) -> Any:
    """The keeper, on this node; if another process makes one at this moment, that one."""
    options = {
        "name": KEEPER,
        "namespace": config.ray.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 8,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id(None), soft=False),
    }
    return ray.remote(Keeper).options(**options).remote(config, str(folder), maker)
