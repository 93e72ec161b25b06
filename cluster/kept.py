"""A cluster on a joined Ray, from outside: found or started, followed, ended.

The process that serves only looks on: what it has started lives on when it dies, and the next one
finds it. Knows the keeper and no worker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.cluster.adopting import our_actors
from kvferry.cluster.config import Config, ConfigError
from kvferry.cluster.errors import NotReady
from kvferry.cluster.ground import Say
from kvferry.cluster.joined_ground import KEEPER
from kvferry.cluster.keeper import Keeper, KeeperNews, sweep
from kvferry.cluster.launcher import LAST_CALL_S
from kvferry.cluster.ray_actors import START_TIMEOUT_S, get, node_id
from kvferry.cluster.ray_places import RayPlaces
from kvferry.cluster.ray_session import init_ray
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import absolute_paths
from kvferry.kv_cache.errors import KVFerryError

POLL_S = 0.1
ANSWER_S = 5.0
OPENNESS = ("server.tls", "server.auth", "tenants", "transfer.host")  # who gets in, and where
STOP_S = 3 * LAST_CALL_S + 5.0  # beside the grace that streams have


@dataclass(frozen=True, slots=True)
class TakenDown:
    """What ``take_down`` found and removed."""

    ray_address: str
    had_keeper: bool
    num_actors: int
    num_groups: int


class KeptCluster:
    """See the module; attributes as those of ``launcher.Cluster``."""

    def __init__(
        self, keeper: Any, config: Config, doors: RouterEndpoints, owns_connection: bool
    ) -> None:
        """``config``: what the cluster runs by."""
        self.config = config
        self.grpc, self.http, self.metrics = doors.grpc, doors.http, doors.metrics
        self.ray_address: str = ray.get_runtime_context().gcs_address
        self.startup_s = 0.0
        self._keeper = keeper
        self._namespace = config.ray.namespace
        self._owns_connection = owns_connection  # else we are in an actor, or somebody's driver
        self._stopped = False

    @classmethod
    def join(
        cls, config: Config, resolve: Callable[[], tuple[Config, Path]], say: Say
    ) -> KeptCluster:
        """Find the cluster of the namespace, or start one by ``resolve``'s configuration and model.

        Returns when it is ready. Raises whatever kept a part from starting, and ConfigError if the
        cluster that runs is open to others than ``config`` says.
        """
        began = time.monotonic()
        config = absolute_paths(config)  # the keeper runs in another folder
        say(f"joining the Ray cluster at {config.ray.address}")
        owns_connection = init_ray(config)
        namespace = config.ray.namespace
        keeper = _find(namespace)
        is_new = keeper is None
        if keeper is None:
            resolved, folder = resolve()
            keeper = _start(absolute_paths(resolved), folder)
        else:
            say(f"found a running cluster in namespace {namespace}: serving it on")
        try:
            doors = _follow(keeper, say, is_new)
        except BaseException as error:
            if is_new or isinstance(error, KVFerryError):  # it says itself that nothing came of it
                take_down(namespace, 0.0)
            raise
        running: Config = get(keeper.config.remote())
        if not is_new:
            check_openness(config, running)
            for line in differences(config.model_dump(), running.model_dump()):
                say(f"warning: {line}: 'kvferry down' and serve again to change it")
        cluster = cls(keeper, running, doors, owns_connection)
        cluster.startup_s = time.monotonic() - began
        return cluster

    def ended(self) -> bool:
        """Whether somebody else has ended it."""
        try:
            ray.get(self._keeper.news.remote(0), timeout=ANSWER_S)
        except (ray.exceptions.ActorDiedError, ValueError):
            return _find(self._namespace) is None
        except ray.exceptions.RayError:  # it is being started again, or is slow
            return False
        return False

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
        """Let streams finish for ``grace_s`` seconds, then end every process; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        take_down(self._namespace, grace_s)
        self._disconnect()

    def leave(self) -> None:
        """Let it run, and look on no longer."""
        self._stopped = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_connection:
            ray.shutdown()


def take_down(namespace: str, grace_s: float) -> TakenDown:
    """End all that is ours in a namespace of the Ray that this process is in; nothing else."""
    address = ray.get_runtime_context().gcs_address
    keeper = _find(namespace)
    actors, groups = len(our_actors(namespace)), len(RayPlaces(namespace).names())
    if keeper is not None:
        stopping = keeper.stop.remote(grace_s)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([stopping], timeout=grace_s + STOP_S)
        ray.kill(keeper)
    sweep(namespace)  # what a keeper has left that could not answer
    return TakenDown(address, keeper is not None, actors, groups)


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


def _find(namespace: str) -> Any:
    try:
        return ray.get_actor(KEEPER, namespace)
    except ValueError:  # there is none
        return None


def _start(config: Config, folder: Path) -> Any:
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
    return ray.remote(Keeper).options(**options).remote(config, str(folder))


def _follow(keeper: Any, say: Say, is_new: bool) -> RouterEndpoints:
    """Repeat what the keeper says until its doors are open. Raises what it failed with."""
    known = 0
    while True:
        try:
            news: KeeperNews = ray.get(keeper.news.remote(known), timeout=START_TIMEOUT_S)
        except ray.exceptions.ActorDiedError as error:
            raise NotReady(f"the keeper died before the cluster was ready: {error}") from error
        except ray.exceptions.ActorUnavailableError:  # Ray starts it again
            time.sleep(POLL_S)
            known = 0
            continue
        for line in news.lines:
            if is_new or news.doors is None:  # else it is the story of an earlier start
                say(line)
        known += len(news.lines)
        if news.failure is not None:
            raise news.failure
        if news.doors is not None:
            return news.doors
        time.sleep(POLL_S)  # a keeper tells when it is asked only
