"""What a joined cluster asks of Ray: a protocol, so that it can be tried without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvferry.cluster.placement import Bundle


class Places(Protocol):
    """Nodes, placement groups, autoscaler and a record. ``cluster.ray_places`` asks Ray.

    Attributes:
        here, address: this node's id, and its address as the others know it.
    """

    here: str
    address: str

    def nodes(self) -> list[tuple[str, str, Bundle]]:
        """Live nodes: id, address, what is free."""
        ...

    def total(self) -> Bundle:
        """What all nodes have together."""
        ...

    def create(self, name: str, bundle: Bundle, target: str | None) -> None:
        """Ask for a group of one bundle, on the target if that is possible."""
        ...

    def wait(self, name: str, timeout_s: float) -> bool:
        """Whether a group has its place, within a time."""
        ...

    def node_of(self, name: str) -> str | None:
        """The node of a group; None while it has none, or is not."""
        ...

    def remove(self, name: str) -> None:
        """Give a group back; one that is not has been."""
        ...

    def names(self) -> list[str]:
        """Every group of ours."""
        ...

    def in_group(self, name: str) -> dict[str, Any]:
        """Options of an actor that takes a group's bundle. Raises ValueError if there is none."""
        ...

    def beside_us(self) -> dict[str, Any]:
        """Options of an actor on this node."""
        ...

    def request(self, bundles: Sequence[Bundle]) -> None:
        """Have the autoscaler make room for all of these at once; it takes this Ray's one request.
        None withdraws it.
        """
        ...

    def load(self) -> bytes | None:
        """The record that lies under the namespace."""
        ...

    def save(self, record: bytes) -> None:
        """Put one there."""
        ...

    def forget(self) -> None:
        """Put none there."""
        ...
