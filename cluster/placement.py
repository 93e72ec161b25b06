"""Where workers go in a Ray cluster, with how many threads, and why. Pure.

A decode worker goes where the fewest decode workers are: a node's loss then takes the fewest
streams. A prefill worker goes where most of the cluster is: its blocks are then read through shared
memory by as many as can. Both only where their bundle fits now; where it fits nowhere Ray places it
once there is room, and the autoscaler may make some. Knows no Ray: nodes come in, wishes go out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

Bundle = Mapping[str, float]

SPREAD_ROLES = frozenset({"decode"})


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node: what of it is free, by resource, and the roles of our workers there."""

    node_id: str
    address: str
    free: Bundle
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """A worker to be placed, and what it reserves."""

    name: str
    role: str
    bundle: Bundle = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """The node that a worker should go to; None: none has room. ``why`` is for people."""

    want: Want
    node_id: str | None
    why: str


def share_threads(
    counts: Mapping[str, int],
    fixed: Mapping[str, int],
    resources: Mapping[str, Bundle],
    nodes: Sequence[NodeView],
) -> dict[str, int]:
    """Threads of a role's workers: as ``fixed``; for all others one number, the largest with which
    every one of them fits somewhere, given its other ``resources`` too. 1 if they do not even then.
    """
    free = [role for role in counts if role not in fixed]
    most = max((int(node.free.get("CPU", 0.0)) for node in nodes), default=0) if free else 0
    for share in range(most, 1, -1):
        threads = {role: fixed.get(role, share) for role in counts}
        wants = [
            Want(role, role, bundle_for(resources.get(role, {}), threads[role]))
            for role in sorted(counts, key=lambda role: role in free)  # those first that are told
            for _ in range(counts[role])
        ]
        wishes, _ = place(wants, nodes)
        if all(wish.node_id is not None for wish in wishes if wish.want.role in free):
            return threads
    return {role: fixed.get(role, 1) for role in counts}


def bundle_for(resources: Bundle, threads: int) -> dict[str, float]:
    """What a worker reserves: a CPU per thread unless ``resources`` say other; no zeros."""
    return {name: amount for name, amount in {"CPU": threads, **resources}.items() if amount}


def place(wants: Sequence[Want], nodes: Sequence[NodeView]) -> tuple[list[Wish], list[NodeView]]:
    """A node for each worker, one after the other, each seeing those before it; and the nodes as
    they are then.
    """
    state = {node.node_id: node for node in nodes}
    wishes = []
    for want in wants:
        wish = _place_one(want, list(state.values()))
        wishes.append(wish)
        if wish.node_id is not None:
            node = state[wish.node_id]
            free = {name: amount - want.bundle.get(name, 0.0) for name, amount in node.free.items()}
            state[wish.node_id] = replace(node, free=free, roles=(*node.roles, want.role))
    return wishes, list(state.values())


def _place_one(want: Want, nodes: Sequence[NodeView]) -> Wish:
    fitting = [node for node in nodes if fits(want.bundle, node.free)]
    if not fitting:
        return Wish(want, None, f"no node had {describe(want.bundle)} free: Ray placed it later")
    if want.role in SPREAD_ROLES:
        best = min(fitting, key=lambda n: (n.roles.count(want.role), len(n.roles), _rank(n)))
        others = best.roles.count(want.role)
        why = f"{want.role} workers are spread: {_count(others, want.role)} there"
    else:
        best = min(fitting, key=lambda n: (-len(n.roles), _rank(n)))
        others = len(best.roles)
        why = f"{want.role} workers go where most others are: {_count(others, '')} there"
    if len(fitting) == 1 and len(nodes) > 1:
        why = f"the only node with {describe(want.bundle)} free"
    return Wish(want, best.node_id, why)


def _rank(node: NodeView) -> tuple[float, str]:
    return -node.free.get("CPU", 0.0), node.address


def _count(number: int, role: str) -> str:
    return f"{number or 'no'} other{f' {role}' if role else ''}"


def fits(bundle: Bundle, free: Bundle) -> bool:
    """Whether a node with so much free has room for a bundle."""
    return all(free.get(name, 0.0) >= amount for name, amount in bundle.items())


def describe(bundle: Bundle) -> str:
    """``1 CPU, 1 GPU``, for people."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"
