"""Finding what an earlier launcher has left on a joined Ray: which actors live, and what they are.

An actor that does not answer is taken for dead and ended; so is one of an older life. Knows how to
look, not what to do about what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from kvferry.cluster.intake import ServedModel
from kvferry.cluster.joined_ground import KEEPER, Record
from kvferry.cluster.ours import find_actor, kill, our_actors
from kvferry.cluster.ray_actors import node_id
from kvferry.cluster.ray_places import PREFIX
from kvferry.cluster.router_actor import RouterEndpoints, served_model
from kvferry.cluster.running import RunningRouter, RunningWorker
from kvferry.worker.description import WorkerDescription

ANSWER_S = 10.0  # Ray itself may be short of time


@dataclass(frozen=True, slots=True)
class Found:
    """A cluster that runs. ``router`` None: it is to be started anew, behind the same doors."""

    workers: list[RunningWorker]
    router: RunningRouter | None
    doors: RouterEndpoints
    model: ServedModel


def look(namespace: str, record: Record, served_name: str | None) -> Found | None:
    """What lives of the cluster of a record; None if no worker does, and then nothing lives."""
    newest, stale = by_worker(our_actors(namespace))
    for name in stale:
        kill(namespace, name)
    workers: list[RunningWorker] = []
    router: RunningRouter | None = None
    for worker, name in newest.items():
        actor = find_actor(namespace, name)
        found: RunningWorker | RunningRouter | None = None
        if actor is not None and worker in record.slots:
            found = _worker(actor)
        elif actor is not None and worker.startswith("router"):
            found = _router(actor)
        if isinstance(found, RunningWorker):
            workers.append(found)
        elif isinstance(found, RunningRouter):
            router = found
        else:
            kill(namespace, name)
    if not workers or record.doors is None:
        for name in our_actors(namespace):
            if name != KEEPER:
                kill(namespace, name)
        return None
    descriptions = [worker.description for worker in workers]
    return Found(workers, router, record.doors, served_model(descriptions, served_name))


def by_worker(names: list[str]) -> tuple[dict[str, str], list[str]]:
    """The newest life of each, and the actors of older ones."""
    newest: dict[str, tuple[int, str]] = {}
    stale = []
    for name in names:
        if name == KEEPER:
            continue
        worker, _, epoch = name.removeprefix(PREFIX).rpartition("/")
        known = newest.get(worker)
        if known is None or known[0] < int(epoch):
            stale.extend([known[1]] if known is not None else [])
            newest[worker] = (int(epoch), name)
        else:
            stale.append(name)
    return {worker: name for worker, (_, name) in newest.items()}, stale


def _worker(actor: Any) -> RunningWorker | None:
    try:
        description: WorkerDescription | None = ray.get(
            actor.description.remote(), timeout=ANSWER_S
        )
    except ray.exceptions.RayError:  # a time-out too
        return None
    if description is None:
        return None
    return RunningWorker(actor, description, actor.wait.remote())


def _router(actor: Any) -> RunningRouter | None:
    try:
        is_open: bool = ray.get(actor.is_open.remote(), timeout=ANSWER_S)
        where = ray.get(actor.whereabouts.remote(node_id), timeout=ANSWER_S)
    except ray.exceptions.RayError:  # a time-out too
        return None
    return RunningRouter(actor, *where) if is_open else None
