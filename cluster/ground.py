"""What a cluster stands on: where its actors go, what they are called, what they may take.

``Ground`` is what the launcher asks of it. ``OwnGround`` is a Ray of one's own, on this host:
actors without names, that end with this process. ``cluster.joined_ground`` is a Ray that was
joined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import ray

from kvferry.cluster.config import Config
from kvferry.cluster.devices import reserved
from kvferry.cluster.errors import NotPlaced
from kvferry.cluster.placement import Bundle, describe, fits
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import LOOPBACK, Share, fixed_threads, role_counts
from kvferry.worker.messages import NodeRef

RAY_DIGITS = 4  # Ray counts in ten thousandths

Say = Callable[[str], None]
Check = Callable[[], None]


def nothing() -> None:
    """A check that finds no fault."""


class Ground(Protocol):
    """See the module. Workers are known by name, ``ROLE-NUMBER``, whatever life they are in."""

    @property
    def host(self) -> str:
        """Where the router listens for workers."""
        ...

    def names(self) -> dict[str, str]:
        """The workers that there are to be: role by name."""
        ...

    def assign(
        self,
        roles: Mapping[str, str],
        say: Say,
        going: Collection[str] = (),
        check: Check = nothing,
    ) -> None:
        """Find places for more workers, role by name; waits.

        ``going``: workers whose places will be free. ``check`` is called now and then, and ends
        the waiting by raising. Raises NotPlaced: there is none.
        """
        ...

    def tidy(self) -> None:
        """Give back what belongs to nobody: an earlier life may have ended amid assigning."""
        ...

    def release(self, name: str) -> None:
        """A worker is not to be any more."""
        ...

    def share(self, name: str) -> Share:
        """A worker's part of its host."""
        ...

    def why(self, name: str, actor: Any) -> Any:
        """Why its actor is where it is, for people; or a promise of it, from there."""
        ...

    def worker_options(self, ref: NodeRef) -> dict[str, Any]:
        """Ray's options for a worker's actor in this life."""
        ...

    def router_options(self, ref: NodeRef) -> dict[str, Any]:
        """Ray's options for the router's actor in this life."""
        ...

    def listen_host(self, actor: Any) -> Any:
        """The address for a worker to listen on, or a promise of it; None: that of its settings."""
        ...

    def opened(self, doors: RouterEndpoints) -> None:
        """The router's doors, for it to have the same in its next life."""
        ...

    def close(self) -> None:
        """Give every place back."""
        ...


class OwnGround:
    """A Ray that nobody else uses. Cores and memory are shared out among the first workers.

    ``config`` says which device each role is on.
    """

    host = LOOPBACK

    def __init__(self, config: Config, total: Callable[[], Bundle] = ray.cluster_resources) -> None:
        """``total``: what this Ray has."""
        self._config = config
        self._total = total
        self._names: dict[str, str] = {}
        self._first = max(1, sum(role_counts(config).values()))
        self._threads = max(1, len(os.sched_getaffinity(0)) // self._first)

    def names(self) -> dict[str, str]:
        """See ``Ground``."""
        return dict(self._names)

    def assign(
        self,
        roles: Mapping[str, str],
        say: Say,
        going: Collection[str] = (),
        check: Check = nothing,
    ) -> None:
        """See ``Ground``. Raises NotPlaced where all together want more than this Ray has."""
        staying = {name: role for name, role in self._names.items() if name not in going}
        there = self._total()
        wanted: dict[str, float] = {}
        for role in (*staying.values(), *roles.values()):
            for key, amount in self._resources(role).items():
                wanted[key] = wanted.get(key, 0.0) + amount
        wanted = {key: round(amount, RAY_DIGITS) for key, amount in wanted.items()}
        if not fits(wanted, there):
            beside = f" beside the {len(staying)} workers that stay" if staying else ""
            raise NotPlaced(
                f"no room for {', '.join(roles)}{beside}: all together want {describe(wanted)} "
                f"(prefill.resources, decode.resources, gpus); this host's Ray has "
                f"{describe({key: there.get(key, 0.0) for key in wanted})}"
            )
        self._names.update(roles)

    def tidy(self) -> None:
        """See ``Ground``: nothing outlives this process."""

    def release(self, name: str) -> None:
        """See ``Ground``."""
        self._names.pop(name, None)

    def share(self, name: str) -> Share:
        """See ``Ground``."""
        fixed = fixed_threads(self._config, self._names[name])
        return Share(fixed or self._threads, 1.0 / self._first)

    def why(self, name: str, actor: Any) -> Any:
        """See ``Ground``."""
        return "a Ray of its own, on this host"

    def worker_options(self, ref: NodeRef) -> dict[str, Any]:
        """See ``Ground``. No CPU is reserved: a small host may have fewer than workers."""
        return ray_options(self._resources(self._names[ref.node_id]))

    def router_options(self, ref: NodeRef) -> dict[str, Any]:
        """See ``Ground``."""
        return {"num_cpus": 0}

    def listen_host(self, actor: Any) -> Any:
        """See ``Ground``."""
        return None

    def opened(self, doors: RouterEndpoints) -> None:
        """See ``Ground``: the launcher itself remembers."""

    def close(self) -> None:
        """See ``Ground``."""
        self._names.clear()

    def _resources(self, role: str) -> dict[str, float]:
        resources = reserved(getattr(self._config, role))
        return {name: amount for name, amount in resources.items() if amount}


def ray_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """A bundle as the options of an actor."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options.update({named[name]: amount for name, amount in bundle.items() if name in named})
    custom = {name: amount for name, amount in bundle.items() if name not in named}
    return {**options, "resources": custom} if custom else options


def first_workers(config: Config) -> dict[str, str]:
    """The workers that a configuration asks for: role by name, in order."""
    return {
        f"{role}-{index}": role
        for role, count in role_counts(config).items()
        for index in range(count)
    }
