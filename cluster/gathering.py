"""Waiting for the nodes that a configuration's resources name, before anything is settled by them.

Which role is on a GPU and how many threads each has is settled once, when a cluster begins, by the
nodes that are there. ``ray up`` and KubeRay return when the head is, so nodes that offer what
``*.resources`` say are waited for first, and the autoscaler is asked for them. Where no resources
are named there is nothing to wait for. Asks Ray by ``Places`` only.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.cluster.config import Config
from kvferry.cluster.errors import NotPlaced
from kvferry.cluster.ground import Say, first_workers
from kvferry.cluster.joined_ground import TELL_S, Record, clear
from kvferry.cluster.placement import NodeView, Want, describe, place
from kvferry.cluster.places import Places

POLL_S = 0.5


def gather(
    config: Config,
    places: Places,
    record: Record,
    say: Say,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> None:
    """Return when the live nodes have free what every first worker's ``resources`` name.

    ``record``, that of the cluster that begins, notes that the autoscaler was asked; ``say`` hears
    every ``TELL_S`` what is waited for; ``clock`` gives seconds, and ``pause`` waits so many, and
    raises if there is to be no cluster.

    Raises NotPlaced after ``ray.placement_wait``; nothing is asked of the autoscaler any more then.
    """
    wants = [
        Want(name, role, {key: n for key, n in getattr(config, role).resources.items() if n})
        for name, role in first_workers(config).items()
    ]
    began, told, wait_s = clock(), float("-inf"), config.ray.placement_wait
    while True:
        wishes, _ = place(wants, [NodeView(*node) for node in places.nodes()])
        lacking = [wish.want for wish in wishes if wish.node_id is None]
        if not lacking:
            return
        who = ", ".join(f"{want.name} ({describe(want.bundle)})" for want in lacking)
        there = describe(places.total())
        if clock() - began >= wait_s:
            clear(places)
            raise NotPlaced(
                f"no node for {who} after {wait_s:g} s (ray.placement_wait); the whole cluster has "
                f"{there}: add nodes, or ask for fewer workers or resources"
            )
        if clock() - told >= TELL_S:
            told = clock()
            record.asked = True
            places.save(record.to_json())
            places.request([want.bundle for want in wants])
            say(f"waiting for nodes for {who}; the whole cluster has {there}")
        pause(POLL_S)
