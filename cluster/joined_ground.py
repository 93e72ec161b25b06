"""A Ray cluster that was joined: detached actors by name, a placement group for each worker.

What is started there outlives the process that starts it. A group holds one bundle, so that what a
worker reserved is free again once it has been drained; where it should be ``cluster.placement``
says, and Ray places it elsewhere where that cannot be. What a successor must know is kept as one
JSON document beside the actors. Asks Ray by ``Places`` only.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvferry.cluster.config import Config
from kvferry.cluster.devices import reserved
from kvferry.cluster.errors import Cancelled, NotPlaced, NotReady
from kvferry.cluster.ground import Check, Say, nothing, ray_options
from kvferry.cluster.placement import (
    Bundle,
    NodeView,
    Want,
    Wish,
    bundle_for,
    describe,
    place,
    share_threads,
)
from kvferry.cluster.places import Places
from kvferry.cluster.ray_actors import node_address
from kvferry.cluster.ray_places import PREFIX
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import LOOPBACK, Share, fixed_threads
from kvferry.worker.messages import NodeRef

logger = logging.getLogger(__name__)

KEEPER = f"{PREFIX}keeper"
AT_ONCE_S = 2.0  # what Ray does not place by then needs room that is not there yet
TELL_S = 15.0
SLICE_S = 0.5  # between looks whether there is still to be waited


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker that there is to be. ``address``: the node that it was placed on, for ``why``."""

    role: str
    threads: int
    memory: float
    why: str
    address: str = ""


@dataclass(slots=True)
class Record:
    """What a successor must know.

    ``num_gpus``: GPUs of Ray's cluster when it began, which settled the devices; ``secret``: the
    cluster's key, in hexadecimal digits; ``asked``: the autoscaler has a request of ours;
    ``maker``: who began it, see ``cluster.following``.
    """

    config: dict[str, Any] = field(default_factory=dict)
    model_folder: str = ""
    num_gpus: float = 0.0
    secret: str = field(default="", repr=False)
    slots: dict[str, Slot] = field(default_factory=dict)
    doors: RouterEndpoints | None = None
    asked: bool = False
    maker: str = ""

    def to_json(self) -> bytes:
        """As one line."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Record:
        """What ``to_json`` wrote; another version's, too, as far as it says what this one needs.

        Raises NotReady if it does not.
        """
        try:
            data = json.loads(text)
            slots = {
                name: Slot(**_known(Slot, slot)) for name, slot in data.get("slots", {}).items()
            }
            doors = data.get("doors")
            opened = None if doors is None else RouterEndpoints(**_known(RouterEndpoints, doors))
            return cls(**{**_known(cls, data), "slots": slots, "doors": opened})
        except (ValueError, TypeError, AttributeError) as error:
            raise NotReady(
                f"the record of the cluster that runs cannot be read ({error}); another version of "
                "KVFerry may have left it: 'kvferry down', then serve anew"
            ) from error


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries that are fields of a dataclass."""
    return {each.name: data[each.name] for each in fields(cls) if each.name in data}


def was_asked(text: bytes) -> bool:
    """Whether the autoscaler has a request of ours; True if the record cannot be read."""
    try:
        return bool(json.loads(text).get("asked", False))
    except (ValueError, AttributeError):
        return True


def load_record(places: Places) -> Record | None:
    """The record of a cluster; None where there is none. Raises NotReady for an unreadable one."""
    text = places.load()
    return Record.from_json(text) if text else None


def clear(places: Places) -> None:
    """Give back every place, take back what was asked of the autoscaler, forget the record."""
    record = places.load()
    if record and was_asked(record):
        places.request([])
    places.forget()
    for name in places.names():
        places.remove(name)


def where_and_why(address: str, reserved: str, slot: Slot) -> str:
    """For people: where a worker is now, with what, and why there."""
    why = slot.why if address == slot.address else f"Ray moved it there from {slot.address}"
    return f"{address}, with {reserved}: {why}"


def _where_and_why(actor: object, reserved: str, slot: Slot) -> str:
    """Likewise; runs in the actor's process, wherever Ray has put it by then."""
    return where_and_why(node_address(actor), reserved, slot)


def actor_name(ref: NodeRef) -> str:
    """The name of an actor in one life: the next one need not wait for Ray to free it."""
    return f"{PREFIX}{ref.node_id}/{ref.epoch}"


class JoinedGround:
    """See the module. ``config`` says which device each role is on; ``clock``: seconds.

    For any thread. Whoever reads or changes the record holds the lock, and nobody does while
    waiting for a place. Once closed it saves nothing and asks for nothing.
    """

    def __init__(
        self, config: Config, places: Places, record: Record, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._places = places
        self._record = record
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self.host = LOOPBACK if config.transfer.host == "loopback" else places.address

    # --- what there is to be ----------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """See ``Ground``."""
        return {name: slot.role for name, slot in self._slots().items()}

    def share(self, name: str) -> Share:
        """See ``Ground``."""
        slot = self._slots()[name]
        return Share(slot.threads, slot.memory, self._config.ray.pin_cores)

    def why(self, name: str, actor: Any) -> Any:
        """See ``Ground``: a promise, for Ray may have moved the group meanwhile."""
        slot = self._slots()[name]
        return actor.__ray_call__.remote(_where_and_why, describe(self._bundle(slot)), slot)

    def opened(self, doors: RouterEndpoints) -> None:
        """See ``Ground``."""
        with self._lock:
            self._record.doors = doors
            self._save()

    def _slots(self) -> dict[str, Slot]:
        with self._lock:
            return dict(self._record.slots)

    def _bundle(self, slot: Slot) -> Bundle:
        return bundle_for(self._resources(slot.role), slot.threads)

    def _save(self) -> None:
        """With the lock held."""
        if not self._closed:
            self._places.save(self._record.to_json())

    # --- places -----------------------------------------------------------------------------

    def assign(
        self,
        roles: Mapping[str, str],
        say: Say,
        going: Collection[str] = (),
        check: Check = nothing,
    ) -> None:
        """See ``Ground``. Raises Cancelled if the ground is closed meanwhile."""
        nodes = self._nodes()
        threads = self._threads(roles, nodes)
        wants = [
            Want(name, role, bundle_for(self._resources(role), threads[role]))
            for name, role in roles.items()
        ]
        wishes, _ = place(wants, nodes)
        try:
            with self._lock:  # or what is closed now would miss some
                self._check_open()
                for wish in wishes:
                    self._places.create(wish.want.name, wish.want.bundle, wish.node_id)
            self._wait({want.name: want.bundle for want in wants}, say, check)
            self._placed(wishes, threads)
        except BaseException:
            self._take_back(roles)
            raise

    def _placed(self, wishes: list[Wish], threads: Mapping[str, int]) -> None:
        """All groups have a node: they belong to workers from now on."""
        where = {wish.want.name: self._places.node_of(wish.want.name) for wish in wishes}
        addresses = {node: address for node, address, _ in self._places.nodes()}
        slots = {}
        for wish in wishes:
            name, role = wish.want.name, wish.want.role
            alike = sum(other == where[name] for other in where.values())
            why = wish.why if wish.node_id == where[name] else "where Ray found room"
            address = addresses.get(where[name] or "", "a lost node")
            slots[name] = Slot(role, threads[role], 1.0 / alike, why, address)
        with self._lock:
            self._check_open()
            self._record.slots.update(slots)
            self._save()

    def _take_back(self, names: Collection[str]) -> None:
        """What came to nothing is held no longer, nor asked for."""
        with self._lock:
            for name in names:
                self._record.slots.pop(name, None)
                self._places.remove(name)
            if self._record.asked:
                self._ask({})

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the cluster is being taken down")

    def tidy(self) -> None:
        """See ``Ground``. A worker whose group is not there any more was being given up."""
        with self._lock:
            groups = set(self._places.names())
            for name in groups - self._record.slots.keys():
                self._places.remove(name)
            for name in self._record.slots.keys() - groups:
                logger.warning("%s has no placement group any more: it is given up", name)
                del self._record.slots[name]
            self._save()
            if self._record.asked:
                self._ask({})

    def _threads(self, roles: Mapping[str, str], nodes: list[NodeView]) -> dict[str, int]:
        """As those of the role have that are there; else a share of what is free."""
        fixed = {slot.role: slot.threads for slot in self._slots().values()}
        for role in set(roles.values()):
            told = fixed_threads(self._config, role)
            if told is not None:
                fixed[role] = told
        counts = {role: list(roles.values()).count(role) for role in dict.fromkeys(roles.values())}
        resources = {role: self._resources(role) for role in counts}
        return share_threads(counts, fixed, resources, nodes)

    def _resources(self, role: str) -> Bundle:
        return reserved(getattr(self._config, role))

    def _nodes(self) -> list[NodeView]:
        """The live nodes. The router will take a CPU here, if it has not yet."""
        ours: dict[str, list[str]] = {}
        slots = self._slots()
        for name, slot in slots.items():
            there = self._places.node_of(name)
            if there is not None:
                ours.setdefault(there, []).append(slot.role)
        views = []
        for node_id, address, free in self._places.nodes():
            amounts = dict(free)
            if node_id == self._places.here and not slots:
                amounts["CPU"] = max(0.0, amounts.get("CPU", 0.0) - 1.0)
            views.append(NodeView(node_id, address, amounts, tuple(ours.get(node_id, ()))))
        return sorted(views, key=lambda view: view.address)

    def _wait(self, bundles: Mapping[str, Bundle], say: Say, check: Check) -> None:
        """Until all have a node; what has none after a moment the autoscaler is asked for."""
        began, wait_s = self._clock(), self._config.ray.placement_wait
        patience, waiting = AT_ONCE_S, list(bundles)
        while True:
            waiting = self._unplaced(waiting, min(self._clock() + patience, began + wait_s), check)
            if not waiting:
                return
            lacking = ", ".join(f"{name} ({describe(bundles[name])})" for name in waiting)
            there = describe(self._places.total())
            if self._clock() - began >= wait_s:
                raise NotPlaced(
                    f"no room for {lacking} after {wait_s:g} s (ray.placement_wait); the whole "
                    f"cluster has {there}: add nodes, or ask for fewer workers or resources"
                )
            self._ask(bundles)
            say(f"waiting for Ray to place {lacking}; the whole cluster has {there}")
            patience = TELL_S

    def _unplaced(self, names: list[str], until: float, check: Check) -> list[str]:
        """Which have no node by then; none is waited for any longer once ``check`` raises."""
        while True:
            self._check_open()
            check()
            slice_end = min(until, self._clock() + SLICE_S)
            names = [
                name
                for name in names
                if not self._places.wait(name, max(0.0, slice_end - self._clock()))
            ]
            if not names or self._clock() >= until:
                return names

    def _ask(self, more: Mapping[str, Bundle]) -> None:
        """Tell the autoscaler of all that the cluster needs, at once."""
        with self._lock:
            if self._closed:
                return
            present = [
                self._bundle(slot) for name, slot in self._record.slots.items() if name not in more
            ]
            self._record.asked = True
            self._save()
            self._places.request([*present, *more.values()])

    def release(self, name: str) -> None:
        """See ``Ground``. Until it is done the name is taken; again is harmless."""
        with self._lock:
            if name in self._record.slots:
                self._places.remove(name)
                del self._record.slots[name]
                self._save()
            if self._record.asked:
                self._ask({})  # or what has been given up would be held for us

    def close(self) -> None:
        """See ``Ground``."""
        with self._lock:
            self._closed = True
            clear(self._places)

    # --- actors -----------------------------------------------------------------------------

    def worker_options(self, ref: NodeRef) -> dict[str, Any]:
        """See ``Ground``. Raises KeyError or ValueError if it is not to be any more."""
        return {
            **ray_options(self._bundle(self._slots()[ref.node_id])),
            **self._detached(ref),
            **self._places.in_group(ref.node_id),
        }

    def router_options(self, ref: NodeRef) -> dict[str, Any]:
        """On this node, where its doors are known to be. It takes a CPU if there is one."""
        here = next(
            (free for node, _, free in self._places.nodes() if node == self._places.here), {}
        )
        return {
            "num_cpus": 1 if here.get("CPU", 0.0) >= 1.0 else 0,
            **self._detached(ref),
            **self._places.beside_us(),
        }

    def _detached(self, ref: NodeRef) -> dict[str, Any]:
        namespace = self._config.ray.namespace
        return {"name": actor_name(ref), "namespace": namespace, "lifetime": "detached"}

    def listen_host(self, actor: Any) -> Any:
        """See ``Ground``: what the actor's node is called by the others."""
        return LOOPBACK if self.host == LOOPBACK else actor.__ray_call__.remote(node_address)
