"""Ray, as a joined cluster asks it for places: nodes, placement groups, autoscaler, a record.

Groups are known here by our names for them. Decides nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import PlacementGroupID
from ray._private import state as ray_state
from ray.autoscaler.sdk import request_resources
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kvferry.cluster.placement import Bundle
from kvferry.cluster.ray_actors import EPOCH_NAMESPACE, node_address, node_id

PREFIX = "kvferry/"
_OF_GROUP = re.compile(r"_group_(?:[0-9]+_)?[0-9a-f]{36}$")  # Ray's own names for what is reserved
CREATED = "CREATED"  # the state of a group that has its place
WAIT_POLL_S = 0.1
_LEAST = {"CPU": 0.001}  # a bundle cannot be of nothing


class RayPlaces:
    """See the module. For one namespace of the Ray that this process is in."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._prefix = f"{PREFIX}{namespace}/"  # Ray's list of groups knows no namespaces
        self._key = f"cluster/{namespace}".encode()
        self.here = node_id(None)
        self.address = node_address(None)

    def nodes(self) -> list[tuple[str, str, Bundle]]:
        """See ``Places``."""
        free = ray_state.available_resources_per_node()
        return [
            (node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def total(self) -> Bundle:
        """See ``Places``."""
        resources: Bundle = ray.cluster_resources()
        return {
            name: amount
            for name, amount in resources.items()
            if not name.startswith(("node:", "bundle_group")) and not _OF_GROUP.search(name)
        }

    def create(self, name: str, bundle: Bundle, target: str | None) -> None:
        """See ``Places``."""
        ray.util.placement_group(
            [dict(bundle) or _LEAST],
            strategy="STRICT_PACK",
            name=self._prefix + name,
            lifetime="detached",
            _soft_target_node_id=target,
        )

    def wait(self, name: str, timeout_s: float) -> bool:
        """See ``Places``. Asks the table again and again: Ray's own waiting knows whole seconds
        only, and leaves a waiter behind at its store each time.
        """
        until = time.monotonic() + timeout_s
        while self._state_of(name) != CREATED:
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, WAIT_POLL_S))
        return True

    def _state_of(self, name: str) -> str | None:
        states = [state for found, _, state in self._groups() if found == self._prefix + name]
        return states[0] if states else None

    def node_of(self, name: str) -> str | None:
        """See ``Places``."""
        group = self._find(name)
        if group is None:
            return None
        nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return nodes.get(0) or None

    def remove(self, name: str) -> None:
        """See ``Places``."""
        for group in self._all(name):
            ray.util.remove_placement_group(group)

    def names(self) -> list[str]:
        """See ``Places``."""
        names = (name.removeprefix(self._prefix) for name, _, _ in self._groups())
        return list(dict.fromkeys(names))

    def in_group(self, name: str) -> dict[str, Any]:
        """See ``Places``."""
        group = self._find(name)
        if group is None:
            raise ValueError(f"no placement group {self._prefix}{name}")
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy}

    def beside_us(self) -> dict[str, Any]:
        """See ``Places``."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.here, soft=False)}

    def request(self, bundles: Sequence[Bundle]) -> None:
        """See ``Places``."""
        request_resources(bundles=[dict(bundle) for bundle in bundles])

    def load(self) -> bytes | None:
        """See ``Places``."""
        found: bytes | None = internal_kv._internal_kv_get(self._key, namespace=EPOCH_NAMESPACE)
        return found

    def save(self, record: bytes) -> None:
        """See ``Places``."""
        internal_kv._internal_kv_put(self._key, record, overwrite=True, namespace=EPOCH_NAMESPACE)

    def forget(self) -> None:
        """See ``Places``."""
        internal_kv._internal_kv_del(self._key, namespace=EPOCH_NAMESPACE)

    def _find(self, name: str) -> PlacementGroup | None:
        """None: removed, or never made."""
        return next(iter(self._all(name)), None)

    def _all(self, name: str) -> list[PlacementGroup]:
        return [
            PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
            for found, group_id, _ in self._groups()
            if found == self._prefix + name
        ]

    def _groups(self) -> list[tuple[str, str, str]]:
        """Name, id and state of every group of ours, by whichever job it was made: Ray finds a
        group by its name in the namespace of its job only, and a Serve replica's is not a
        command's.
        """
        return [
            (entry["name"], entry["placement_group_id"], entry["state"])
            for entry in ray.util.placement_group_table().values()
            if entry["name"].startswith(self._prefix) and entry["state"] != "REMOVED"
        ]
