"""The keeper: a detached actor that starts a cluster on a joined Ray, watches it, and ends it.

It outlives whoever made it, and Ray starts it again if it dies; either way it takes up what it
finds running, by the record that its last life left. There is one per namespace, by its name.
Decides nothing that ``cluster.launcher`` does not.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from kvferry.cluster.access.settings import load_access
from kvferry.cluster.adopting import look, our_actors
from kvferry.cluster.config import Config
from kvferry.cluster.devices import on_devices
from kvferry.cluster.errors import Cancelled, Internal
from kvferry.cluster.gathering import gather
from kvferry.cluster.ground import Say
from kvferry.cluster.joined_ground import KEEPER, JoinedGround, Record, clear, load_record
from kvferry.cluster.launcher import Cluster
from kvferry.cluster.ray_actors import num_gpus
from kvferry.cluster.ray_places import RayPlaces
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import access_settings, log_settings
from kvferry.kv_cache.errors import KVFerryError
from kvferry.worker.cluster_key import ClusterKey, new_key
from kvferry.worker.logs import set_up_logging

logger = logging.getLogger(__name__)

AGAIN_S = 5.0  # between tries to take up what runs
LAST_WORDS_S = 0.5  # for the answer to ``stop`` to leave before the process does
START_ENDS_S = 10.0


@dataclass(frozen=True, slots=True)
class KeeperNews:
    """How far a keeper is: lines since those that are known, the doors once they are open."""

    lines: tuple[str, ...]
    doors: RouterEndpoints | None
    failure: Exception | None


class Keeper:
    """See the module. Starts by itself, in a thread; ``news`` tells of it."""

    def __init__(self, config: Config, model_folder: str) -> None:
        set_up_logging(log_settings(config), "keeper")
        self._namespace = config.ray.namespace
        self._places = RayPlaces(self._namespace)
        self._config, self._model_folder = config, Path(model_folder)
        record = load_record(self._places)
        if record is not None and record.slots:  # what runs runs by its own
            self._config = Config.model_validate(record.config)
            self._model_folder = Path(record.model_folder)
        self._lines: list[str] = []
        self._failure: Exception | None = None
        self._cluster: Cluster | None = None
        self._stopping = threading.Event()
        self._stopper: threading.Thread | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper", daemon=True)
        self._thread.start()

    def news(self, known: int) -> KeeperNews:
        """What there is to tell beyond the first ``known`` lines."""
        cluster = self._cluster
        doors = (
            None
            if cluster is None
            else RouterEndpoints(cluster.grpc, cluster.http, cluster.metrics)
        )
        return KeeperNews(tuple(self._lines[known:]), doors, self._failure)

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be served now; empty when ready."""
        cluster = self._cluster
        return ["the cluster is being started"] if cluster is None else cluster.not_ready_reasons()

    def config(self) -> Config:
        """What the cluster runs by."""
        return self._config

    def begin_stop(self, grace_s: float) -> None:
        """End the cluster, and then this actor, whatever becomes of the caller; idempotent."""
        with self._lock:
            if self._stopper is None:
                self._stopper = threading.Thread(target=self._stop, args=(grace_s,), daemon=True)
                self._stopper.start()

    def stop(self, grace_s: float) -> None:
        """Likewise; returns when it is done."""
        self.begin_stop(grace_s)
        assert self._stopper is not None
        self._stopper.join()

    def _stop(self, grace_s: float) -> None:
        self._stopping.set()
        if self._cluster is not None:
            self._cluster.stop(grace_s)
        else:  # what is being started is taken away from under it
            sweep(self._namespace)
            self._thread.join(START_ENDS_S)
        sweep(self._namespace)
        me = ray.get_runtime_context().current_actor
        threading.Timer(LAST_WORDS_S, lambda: ray.kill(me)).start()

    def _say(self, line: str) -> None:
        if self._stopping.is_set():
            raise Cancelled("the cluster is being taken down")
        self._lines.append(line)

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise Cancelled("the cluster is being taken down")

    def _run(self) -> None:
        while True:
            try:
                cluster = self._open()
            except Exception as error:  # the thread's boundary: whoever asks is told
                if self._stopping.is_set():
                    return
                logger.exception("the cluster could not be started")
                if load_record(self._places) is None:
                    ours = isinstance(error, KVFerryError)
                    self._failure = error if ours else Internal(f"{type(error).__name__}: {error}")
                    return
                self._stopping.wait(AGAIN_S)
                continue
            self._cluster = cluster
            return

    def _open(self) -> Cluster:
        record = load_record(self._places)
        if record is not None and record.slots:
            found = look(self._namespace, record, self._config.model.served_name)
            if found is not None:
                cluster = self._cluster_on(record)
                cluster.take_up(found)
                self._say(f"took up the cluster that runs: {len(found.workers)} workers")
                return cluster
        sweep(self._namespace)  # of a life that did not get far
        load_access(access_settings(self._config))  # before a model is loaded for what cannot be
        fresh = Record(
            config=self._config.model_dump(mode="json"),
            model_folder=str(self._model_folder),
            secret=new_key().secret.hex(),
        )
        gather(self._config, self._places, fresh, self._say, time.monotonic, self._pause)
        fresh.num_gpus = num_gpus()
        cluster = self._cluster_on(fresh, self._say)
        cluster.open(self._say)
        return cluster

    def _cluster_on(self, record: Record, say: Say = logger.info) -> Cluster:
        """With the record's key, on the devices that it settled; ``say`` hears which."""
        placed = on_devices(self._config, record.num_gpus, can_grow=True)
        for line in placed.lines:
            say(line)
        ground = JoinedGround(placed.config, self._places, record, time.monotonic)
        key = ClusterKey(bytes.fromhex(record.secret))
        return Cluster(placed.config, self._model_folder, ground, key)


def sweep(namespace: str) -> None:
    """End every actor of ours but the keeper, and give every place back."""
    for name in our_actors(namespace):
        if name == KEEPER:
            continue
        try:
            actor: Any = ray.get_actor(name, namespace)
        except ValueError:  # it has just ended
            continue
        ray.kill(actor)
    clear(RayPlaces(namespace))
