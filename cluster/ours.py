"""What is ours in a namespace of a joined Ray, and ending it: actors by name, places, the record.

Every ender of actors by name goes through here: the keeper's, those of commands and of the Serve
application. Knows no worker's answers (``cluster.adopting`` asks those) and not why something ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import ray

from kvferry.cluster.joined_ground import KEEPER, clear
from kvferry.cluster.ray_places import PREFIX, RayPlaces

LAST_CALL_S = 2.0  # as ``cluster.launcher``, which brings torch, has it
STOP_S = 3 * LAST_CALL_S + 5.0  # that ``Keeper.stop`` takes beside the grace that streams have


@dataclass(frozen=True, slots=True)
class TakenDown:
    """What ``take_down`` found and removed."""

    ray_address: str
    num_actors: int
    num_groups: int


def our_actors(namespace: str) -> list[str]:
    """Names of every actor of ours in a namespace."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        each["name"]
        for each in listed
        if each["namespace"] == namespace and each["name"].startswith(PREFIX)
    )


def find_actor(namespace: str, name: str) -> Any:
    """The actor of a name; None where there is none, or not any more."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def find_keeper(namespace: str) -> Any:
    """The keeper of a namespace, or None."""
    return find_actor(namespace, KEEPER)


def id_of(actor: Any) -> str:
    """Ray's id of an actor, in hexadecimal digits: another one of its name has another."""
    found: str = actor._actor_id.hex()
    return found


def kill(namespace: str, name: str) -> None:
    """End the actor of a name at once, if there is one."""
    actor = find_actor(namespace, name)
    if actor is not None:
        ray.kill(actor)


def sweep(namespace: str, keeper_id: str | None) -> None:
    """End every actor but the keeper, and give every place back.

    Nothing is done where a keeper other than ``keeper_id`` is: what is there now is its.
    """
    names = our_actors(namespace)  # before the look at the keeper: what comes later is another's
    if _has_another(namespace, keeper_id):
        return
    for name in names:
        if name != KEEPER:
            kill(namespace, name)
    if not _has_another(namespace, keeper_id):
        clear(RayPlaces(namespace))


def _has_another(namespace: str, keeper_id: str | None) -> bool:
    keeper = find_keeper(namespace)
    return keeper is not None and id_of(keeper) != keeper_id


def take_down(namespace: str, grace_s: float, only: Any = None) -> TakenDown:
    """End all that is ours in a namespace of the Ray that this process is in; nothing else.

    ``only``: a keeper; where another one is in its place by now, nothing is done.
    """
    address = ray.get_runtime_context().gcs_address
    keeper = find_keeper(namespace)
    if only is not None and keeper is not None and id_of(keeper) != id_of(only):
        return TakenDown(address, 0, 0)
    actors, groups = len(our_actors(namespace)), len(RayPlaces(namespace).names())
    if keeper is not None:
        stopping = keeper.stop.remote(grace_s)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([stopping], timeout=grace_s + STOP_S)
        ray.kill(keeper)
    sweep(namespace, None if keeper is None else id_of(keeper))  # what it has left
    return TakenDown(address, actors, groups)
