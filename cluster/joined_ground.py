"""A Ray cluster that was joined: detached actors by name, a placement group for each worker.

What is started there outlives the process that starts it. A group holds one bundle, so that what a
worker reserved is free again once it has been drained; where it should be ``cluster.placement``
says, and Ray places it elsewhere where that cannot be. What a successor must know is kept as one
JSON document in Ray's key-value store, under the namespace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray._private import state as ray_state
from ray.autoscaler.sdk import request_resources
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kvferry.cluster.config import Config
from kvferry.cluster.errors import NotPlaced
from kvferry.cluster.ground import Say, ray_options
from kvferry.cluster.placement import (
    NodeView,
    Want,
    Wish,
    bundle_for,
    describe,
    place,
    share_threads,
)
from kvferry.cluster.ray_actors import EPOCH_NAMESPACE, node_address, node_id
from kvferry.cluster.router_actor import RouterEndpoints
from kvferry.cluster.settings import LOOPBACK, Share, fixed_threads
from kvferry.worker.messages import NodeRef

PREFIX = "kvferry/"
KEEPER = f"{PREFIX}keeper"
AT_ONCE_S = 2.0  # what Ray does not place by then needs room that is not there yet
TELL_S = 15.0


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker that there is to be."""

    role: str
    threads: int
    memory: float
    why: str


@dataclass(slots=True)
class Record:
    """What a successor must know. ``asked``: the autoscaler has a request of ours."""

    config: dict[str, Any] = field(default_factory=dict)
    model_folder: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    doors: RouterEndpoints | None = None
    asked: bool = False

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """What ``to_json`` wrote."""
        data = json.loads(text)
        doors = data["doors"]
        return cls(
            data["config"],
            data["model_folder"],
            {name: Slot(**slot) for name, slot in data["slots"].items()},
            None if doors is None else RouterEndpoints(**doors),
            data["asked"],
        )


def actor_name(ref: NodeRef) -> str:
    """The name of an actor in one life: the next one need not wait for Ray to free it."""
    return f"{PREFIX}{ref.node_id}/{ref.epoch}"


def group_name(namespace: str, worker: str) -> str:
    """The name of a worker's placement group; Ray's list of them knows no namespaces."""
    return f"{PREFIX}{namespace}/{worker}"


def record_key(namespace: str) -> bytes:
    """Where the record of a namespace lies."""
    return f"cluster/{namespace}".encode()


def load_record(namespace: str) -> Record | None:
    """The record of a cluster; None where there is none."""
    text = internal_kv._internal_kv_get(record_key(namespace), namespace=EPOCH_NAMESPACE)
    return Record.from_json(text) if text else None


class JoinedGround:
    """See the module."""

    def __init__(self, config: Config, record: Record | None = None) -> None:
        self._config = config
        self._namespace = config.ray.namespace
        self._record = record or Record()
        self._here = node_id(None)
        self.host = LOOPBACK if config.transfer.host == "loopback" else node_address(None)

    # --- what there is to be ----------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """See ``Ground``."""
        return {name: slot.role for name, slot in self._record.slots.items()}

    def share(self, name: str) -> Share:
        """See ``Ground``."""
        slot = self._record.slots[name]
        return Share(slot.threads, slot.memory, self._config.ray.pin_cores)

    def why(self, name: str) -> str:
        """See ``Ground``."""
        return self._record.slots[name].why

    def opened(self, doors: RouterEndpoints) -> None:
        """See ``Ground``."""
        self._record.doors = doors
        self._save()

    def _save(self) -> None:
        internal_kv._internal_kv_put(
            record_key(self._namespace),
            self._record.to_json().encode(),
            overwrite=True,
            namespace=EPOCH_NAMESPACE,
        )

    # --- places -----------------------------------------------------------------------------

    def assign(self, roles: Mapping[str, str], say: Say) -> None:
        """See ``Ground``."""
        nodes = self._nodes()
        threads = self._threads(roles, nodes)
        wants = [
            Want(name, role, bundle_for(self._resources(role), threads[role]))
            for name, role in roles.items()
        ]
        wishes, _ = place(wants, nodes)
        groups = {wish.want.name: self._group(wish) for wish in wishes}
        try:
            self._wait(groups, {want.name: want for want in wants}, say)
        except BaseException:
            for group in groups.values():
                ray.util.remove_placement_group(group)
            raise
        where = {name: _node_of(group) for name, group in groups.items()}
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        for wish in wishes:
            name, role = wish.want.name, wish.want.role
            alike = sum(other == where[name] for other in where.values())
            why = wish.why if wish.node_id == where[name] else "where Ray found room"
            reserved = describe(wish.want.bundle)
            self._record.slots[name] = Slot(
                role,
                threads[role],
                1.0 / alike,
                f"{addresses.get(where[name], 'a lost node')}, with {reserved}: {why}",
            )
        self._save()

    def _threads(self, roles: Mapping[str, str], nodes: list[NodeView]) -> dict[str, int]:
        """As those of the role have that are there; else a share of what is free."""
        fixed = {slot.role: slot.threads for slot in self._record.slots.values()}
        for role in set(roles.values()):
            told = fixed_threads(self._config, role)
            if told is not None:
                fixed[role] = told
        counts = {role: list(roles.values()).count(role) for role in dict.fromkeys(roles.values())}
        resources = {role: self._resources(role) for role in counts}
        return share_threads(counts, fixed, resources, nodes)

    def _resources(self, role: str) -> Mapping[str, float]:
        resources: Mapping[str, float] = getattr(self._config, role).resources
        return resources

    def _nodes(self) -> list[NodeView]:
        """The live nodes. The router's CPU may not have been taken yet; it is left free here."""
        free = ray_state.available_resources_per_node()
        ours: dict[str, list[str]] = {}
        for name, slot in self._record.slots.items():
            group = _find_group(group_name(self._namespace, name))
            if group is not None and (there := _node_of(group)) is not None:
                ours.setdefault(there, []).append(slot.role)
        views = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            there = node["NodeID"]
            amounts = dict(free.get(there, {}))
            if there == self._here and not self._record.slots:
                amounts["CPU"] = amounts.get("CPU", 0.0) - 1.0
            roles = tuple(ours.get(there, ()))
            views.append(NodeView(there, node["NodeManagerAddress"], amounts, roles))
        return sorted(views, key=lambda view: view.address)

    def _group(self, wish: Wish) -> PlacementGroup:
        group: PlacementGroup = ray.util.placement_group(
            [dict(wish.want.bundle) or {"CPU": 0.001}],
            strategy="STRICT_PACK",
            name=group_name(self._namespace, wish.want.name),
            lifetime="detached",
            _soft_target_node_id=wish.node_id,
        )
        return group

    def _wait(
        self, groups: Mapping[str, PlacementGroup], wants: Mapping[str, Want], say: Say
    ) -> None:
        """Until all have a node; what has none after a moment the autoscaler is asked for."""
        began = time.monotonic()
        wait_s = self._config.ray.placement_wait
        patience, waiting = AT_ONCE_S, dict(groups)
        while True:
            until = time.monotonic() + min(patience, max(0.0, began + wait_s - time.monotonic()))
            for name, group in list(waiting.items()):
                if group.wait(max(0.01, until - time.monotonic())):
                    del waiting[name]
            if not waiting:
                return
            lacking = ", ".join(f"{name} ({describe(wants[name].bundle)})" for name in waiting)
            there = describe(ray.cluster_resources())
            if time.monotonic() - began >= wait_s:
                raise NotPlaced(
                    f"no room for {lacking} after {wait_s:g} s (ray.placement_wait); the whole "
                    f"cluster has {there}: add nodes, or ask for fewer workers or resources"
                )
            if not self._record.asked:
                self._ask(wants)
            say(f"waiting for Ray to place {lacking}; the whole cluster has {there}")
            patience = TELL_S

    def _ask(self, wants: Mapping[str, Want]) -> None:
        """Tell the autoscaler of all that the cluster needs, at once."""
        present = [
            bundle_for(self._resources(slot.role), slot.threads)
            for slot in self._record.slots.values()
        ]
        self._record.asked = True
        self._save()
        request_resources(bundles=[*present, *(dict(want.bundle) for want in wants.values())])

    def release(self, name: str) -> None:
        """See ``Ground``."""
        if self._record.slots.pop(name, None) is None:
            return  # it has been given back already
        group = _find_group(group_name(self._namespace, name))
        if group is not None:
            ray.util.remove_placement_group(group)
        self._save()

    def close(self) -> None:
        """See ``Ground``."""
        self.clear(self._namespace)

    @staticmethod
    def clear(namespace: str) -> None:
        """Give back every place, and forget the record."""
        record = load_record(namespace)
        if record is not None and record.asked:
            request_resources(bundles=[])
        internal_kv._internal_kv_del(record_key(namespace), namespace=EPOCH_NAMESPACE)
        for group in our_groups(namespace):
            ray.util.remove_placement_group(group)

    # --- actors -----------------------------------------------------------------------------

    def worker_options(self, ref: NodeRef) -> dict[str, Any]:
        """See ``Ground``."""
        slot = self._record.slots[ref.node_id]
        group = ray.util.get_placement_group(group_name(self._namespace, ref.node_id))
        return {
            **ray_options(bundle_for(self._resources(slot.role), slot.threads)),
            **self._detached(ref),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            ),
        }

    def router_options(self, ref: NodeRef) -> dict[str, Any]:
        """On this node, where its doors are known to be. It takes a CPU if there is one."""
        free = ray_state.available_resources_per_node().get(self._here, {})
        return {
            "num_cpus": 1 if free.get("CPU", 0.0) >= 1.0 else 0,
            **self._detached(ref),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._here, soft=False),
        }

    def _detached(self, ref: NodeRef) -> dict[str, Any]:
        return {
            "name": actor_name(ref),
            "namespace": self._namespace,
            "lifetime": "detached",
        }

    def listen_host(self, actor: Any) -> Any:
        """See ``Ground``: what the actor's node is called by the others."""
        return LOOPBACK if self.host == LOOPBACK else actor.__ray_call__.remote(node_address)


def our_actors(namespace: str) -> list[str]:
    """Names of every actor of ours in a namespace."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        each["name"]
        for each in listed
        if each["namespace"] == namespace and each["name"].startswith(PREFIX)
    )


def our_groups(namespace: str) -> list[PlacementGroup]:
    """Every placement group of ours."""
    return [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(entry["placement_group_id"])))
        for entry in ray.util.placement_group_table().values()
        if entry["name"].startswith(group_name(namespace, "")) and entry["state"] != "REMOVED"
    ]


def _find_group(name: str) -> PlacementGroup | None:
    try:
        found: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:  # removed, or never made
        return None
    return found


def _node_of(group: PlacementGroup) -> str | None:
    """The node of a group's bundle; None while it has none."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return nodes.get(0) or None
