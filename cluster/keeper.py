"""The keeper: a detached actor that starts a cluster on a joined Ray, watches it, and ends it.

It outlives whoever made it, and Ray starts it again if it dies; either way it takes up what it
finds running, by the record that its last life left. There is one per namespace, by its name.
Decides nothing that ``cluster.launcher`` does not, but this: a start that nobody waits for any more
is given up, and what cannot be taken up is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import ray
from pydantic import ValidationError

from kvferry.cluster.access.settings import load_access
from kvferry.cluster.adopting import look
from kvferry.cluster.config import Config
from kvferry.cluster.devices import on_devices
from kvferry.cluster.errors import Cancelled, Internal, NotReady
from kvferry.cluster.following import KeeperNews
from kvferry.cluster.gathering import gather
from kvferry.cluster.ground import Say
from kvferry.cluster.joined_ground import JoinedGround, Record, clear, load_record
from kvferry.cluster.launcher import Cluster
from kvferry.cluster.ours import sweep
from kvferry.cluster.ray_actors import num_gpus
from kvferry.cluster.ray_places import RayPlaces
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import access_settings, log_settings
from kvferry.kv_cache.errors import KVFerryError
from kvferry.worker.cluster_key import ClusterKey, new_key
from kvferry.worker.logs import set_up_logging

logger = logging.getLogger(__name__)

AGAIN_S, AGAIN_LATER_S = 5.0, 60.0  # between the first tries to take up what runs, and later ones
TRIES = 4  # that whoever waits is told of; then it hears that it cannot be done
LAST_WORDS_S = 0.5  # for the answer to ``stop`` to leave before the process does
START_ENDS_S = 10.0
ABANDONED_S = 30.0  # whoever waits for a start asks for news many times a second
ATTENTION_S = 1.0


class Keeper:
    """See the module. Starts by itself, in a thread; ``news`` tells of it."""

    def __init__(self, config: Config, model_folder: str, maker: str) -> None:
        """``maker``: who wants it, and began the cluster if it has to be begun."""
        set_up_logging(log_settings(config), "keeper")
        self._namespace = config.ray.namespace
        self._places = RayPlaces(self._namespace)
        self._me = ray.get_runtime_context().get_actor_id()
        self._config, self._model_folder = config, Path(model_folder)
        self._maker = self._own_maker = maker
        self._lines: list[str] = []
        self._failure: Exception | None = None
        self._cluster: Cluster | None = None
        self._ground: JoinedGround | None = None  # of the cluster that is being started
        self._unready: Cluster | None = None  # that one, until it is ready
        self._is_begun = False  # what is there was started in this life
        self._claimed = threading.Event()
        self._is_asked_for = True
        self._stopping = threading.Event()
        self._grace_s = 0.0
        self._stopper: threading.Thread | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper", daemon=True)
        try:
            self._read_record()
        except NotReady as error:
            self._maker, self._failure = "", error
        else:
            self._thread.start()
        threading.Thread(target=self._heed, name="kvferry-heed", daemon=True).start()

    def _read_record(self) -> None:
        """What runs runs by its own. Raises NotReady if that cannot be understood."""
        record = load_record(self._places)
        if record is None or not record.slots:
            return
        try:
            self._config = Config.model_validate(record.config)
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            raise NotReady(
                f"a cluster runs in namespace {self._namespace} by a configuration that this "
                f"version of KVFerry cannot use ({keys}): 'kvferry down', then serve anew"
            ) from None
        self._model_folder = Path(record.model_folder)
        self._maker = record.maker
        if record.doors is not None:  # it has served: nobody has to wait for it
            self._claimed.set()

    def news(self, known: int) -> KeeperNews:
        """What there is to tell beyond the first ``known`` lines."""
        self._is_asked_for = True
        cluster, doors = self._cluster, None
        if cluster is not None:
            doors = RouterEndpoints(cluster.grpc, cluster.http, cluster.metrics)
            self._claimed.set()
        stopping_s = self._grace_s if self._stopping.is_set() else None
        lines = tuple(self._lines[known:])
        return KeeperNews(lines, doors, self._failure, self._maker, stopping_s)

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
                self._grace_s = grace_s
                self._stopping.set()  # before this returns: whoever asks now must not stay
                self._stopper = threading.Thread(target=self._stop, args=(grace_s,), daemon=True)
                self._stopper.start()

    def stop(self, grace_s: float) -> None:
        """Likewise; returns when it is done."""
        self.begin_stop(grace_s)
        assert self._stopper is not None
        self._stopper.join()

    def _stop(self, grace_s: float) -> None:
        try:
            if self._cluster is not None:
                self._cluster.stop(grace_s)
            else:
                self._end_start()
            sweep(self._namespace, self._me)
        except Exception:  # the thread's boundary: this actor must not stay
            logger.exception("the cluster could not be ended in order")
        finally:
            self._end_itself()

    def _end_start(self) -> None:
        """What is being started, or taken up, is taken away from under it."""
        if self._ground is not None:
            self._ground.close()
        sweep(self._namespace, self._me)
        if self._thread.is_alive():
            self._thread.join(START_ENDS_S)
        if self._unready is not None:  # it may have begun to watch, and would start them anew
            self._unready.stop(0.0)

    def _end_itself(self) -> None:
        me = ray.get_runtime_context().current_actor
        threading.Timer(LAST_WORDS_S, lambda: ray.kill(me)).start()

    def _heed(self) -> None:
        """Until somebody knows the doors: give up what nobody has asked for in a while.

        Turns are counted, not seconds: while this process stands still, nobody can ask it.
        """
        unasked = 0
        while not self._claimed.wait(ATTENTION_S):
            if self._stopping.is_set():
                return
            unasked = 0 if self._is_asked_for else unasked + 1
            self._is_asked_for = False
            if unasked * ATTENTION_S < ABANDONED_S:
                continue
            logger.warning("nobody has asked for %g s: the start is given up", ABANDONED_S)
            if self._is_begun:
                self.begin_stop(0.0)
            else:  # what is there is not this keeper's to end
                self._end_itself()
            return

    def _say(self, line: str) -> None:
        if self._stopping.is_set():
            raise Cancelled("the cluster is being taken down")
        self._lines.append(line)

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise Cancelled("the cluster is being taken down")

    def _run(self) -> None:
        tries = 0
        while True:
            try:
                cluster = self._open()
            except Exception as error:  # the thread's boundary: whoever asks is told
                if self._stopping.is_set():
                    return
                logger.exception("the cluster could not be started")
                ours = isinstance(error, KVFerryError)
                told = error if ours else Internal(f"{type(error).__name__}: {error}")
                if not self._has_left_something():
                    self._failure = told
                    return
                tries += 1
                if self._stopping.wait(self._failed_again(told, tries)):
                    return
                continue
            self._failure = None
            self._cluster = cluster
            return

    def _has_left_something(self) -> bool:
        try:
            return self._places.load() is not None
        except ray.exceptions.RayError:  # there may be something
            return True

    def _failed_again(self, error: Exception, tries: int) -> float:
        """Tell of it; seconds to the next try. What hinders may go away, so tries do not end."""
        if tries < TRIES:
            self._lines.append(
                f"cannot take up the cluster that runs: {error}; again in {AGAIN_S:g} s"
            )
            return AGAIN_S
        self._failure = NotReady(
            f"the cluster in namespace {self._namespace} cannot be taken up: {error}; its workers "
            "are left alone: 'kvferry down', then serve anew"
        )
        return AGAIN_LATER_S

    def _open(self) -> Cluster:
        record = load_record(self._places)
        if record is not None and record.slots:
            found = look(self._namespace, record, self._config.model.served_name)
            if found is not None:
                cluster = self._cluster_on(record)
                cluster.take_up(found)
                self._say(f"took up the cluster that runs: {len(found.workers)} workers")
                return cluster
        self._maker, self._is_begun = self._own_maker, True
        sweep(self._namespace, self._me)  # of a life that did not get far
        load_access(access_settings(self._config))  # before a model is loaded for what cannot be
        fresh = Record(
            config=self._config.model_dump(mode="json"),
            model_folder=str(self._model_folder),
            secret=new_key().secret.hex(),
            maker=self._own_maker,
        )
        try:
            gather(self._config, self._places, fresh, self._say, time.monotonic, self._pause)
            fresh.num_gpus = num_gpus()
            cluster = self._cluster_on(fresh, self._say)
        except BaseException:
            clear(self._places)  # what was asked of the autoscaler
            raise
        cluster.open(self._say)
        return cluster

    def _cluster_on(self, record: Record, say: Say = logger.info) -> Cluster:
        """With the record's key, on the devices that it settled; ``say`` hears which."""
        placed = on_devices(self._config, record.num_gpus, can_grow=True)
        for line in placed.lines:
            say(line)
        self._ground = JoinedGround(placed.config, self._places, record, time.monotonic)
        key = ClusterKey(bytes.fromhex(record.secret))
        self._unready = Cluster(placed.config, self._model_folder, self._ground, key)
        return self._unready
