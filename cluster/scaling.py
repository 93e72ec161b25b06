"""How a cluster grows and shrinks: which workers are to come and which to go. Pure.

Those that are leaving count as gone. The newest go first, and those that are down before all
others. New ones get the lowest free numbers. Knows neither how workers are started nor how they are
drained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvferry.cluster.deaths import Death
from kvferry.engine.request import InvalidRequest
from kvferry.kv_cache.errors import KVFerryError
from kvferry.worker.messages import NodeRef

ROLES = ("prefill", "decode", "colocated")
MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """How many workers there are to be of the roles that are named; of others, as many as are."""

    order_id: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScaleDone:
    """A scale order has been carried out as far as starting goes; or why it has not.

    Attributes:
        wanted: workers that there are to be now, of every role.
        going: names of workers that must have gone before the order is done.
    """

    order_id: int
    error: KVFerryError | None = None
    wanted: Mapping[str, int] = field(default_factory=dict)
    going: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class RouterNews:
    """What a router has for whoever watches it.

    Attributes:
        number: to be named when asked again; what is new here is then told no more.
        lost: workers lost or drained, until it is known that this was heard.
        orders: those to scale that nobody has answered yet.
        members, draining: the workers as they are, and those that take nothing new.
    """

    number: int = 0
    lost: tuple[Death, ...] = ()
    orders: tuple[ScaleOrder, ...] = ()
    members: frozenset[NodeRef] = frozenset()
    draining: frozenset[NodeRef] = frozenset()


@dataclass(frozen=True, slots=True)
class Staff:
    """The workers that there are to be, as whoever starts them knows: role by name.

    ``leaving``: those that have been told to go; ``down``: those without a life at this moment.
    """

    names: Mapping[str, str]
    leaving: frozenset[str] = frozenset()
    down: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What an order comes to: role by name of those to add, and who is to go; see ``ScaleDone``."""

    wanted: Mapping[str, int]
    adding: Mapping[str, str]
    draining: tuple[str, ...]
    going: frozenset[str]


def plan(counts: Mapping[str, int], staff: Staff) -> Plan:
    """Who comes and who goes for ``counts``. Raises InvalidRequest where the rest cannot serve.

    Nobody of a role that is not named comes or goes. The order waits for those who leave, but not
    in a role that grows.
    """
    staying = {role: _of_role(staff, role) for role in ROLES}
    wanted = check_counts(counts, {role: len(names) for role, names in staying.items()})
    adding: dict[str, str] = {}
    draining: list[str] = []
    going: set[str] = set()
    for role in counts:
        new = names_to_add(role, wanted[role] - len(staying[role]), staff.names)
        adding.update(dict.fromkeys(new, role))
        draining += names_to_drain(wanted[role], staying[role], staff.down)
        if not new:
            going |= {name for name in staff.leaving if staff.names.get(name) == role}
    return Plan(wanted, adding, tuple(draining), frozenset(going | set(draining)))


def _of_role(staff: Staff, role: str) -> list[str]:
    return [name for name, its in staff.names.items() if its == role and name not in staff.leaving]


def check_range(counts: Mapping[str, int]) -> None:
    """Raise InvalidRequest for numbers that no cluster has."""
    if any(not 0 <= number <= MAX_WORKERS for number in counts.values()):
        raise InvalidRequest(f"got {listed(counts)}; wanted 0 to {MAX_WORKERS} of each role")


def check_counts(counts: Mapping[str, int], present: Mapping[str, int]) -> dict[str, int]:
    """The whole of what is wanted. Raises InvalidRequest where that could not serve."""
    check_range(counts)
    wanted = {role: counts.get(role, present.get(role, 0)) for role in ROLES}
    if not (wanted["colocated"] or (wanted["prefill"] and wanted["decode"])):
        raise InvalidRequest(
            f"got {', '.join(f'{number} {role}' for role, number in wanted.items())}; wanted at "
            "least one prefill and one decode, or one colocated: 'kvferry down' ends a cluster"
        )
    return wanted


def listed(counts: Mapping[str, int]) -> str:
    """``1 prefill, 2 decode``, for people."""
    return ", ".join(f"{number} {role}" for role, number in counts.items()) or "none"


def names_to_add(role: str, number: int, taken: Collection[str]) -> list[str]:
    """Names of so many new workers."""
    names: list[str] = []
    index = 0
    while len(names) < number:
        name = f"{role}-{index}"
        if name not in taken:
            names.append(name)
        index += 1
    return names


def names_to_drain(number: int, names: Collection[str], down: Collection[str]) -> list[str]:
    """Which of one role's workers go, for ``number`` to stay; ``down``: those without a life."""
    going = len(names) - number
    if going <= 0:
        return []
    order = sorted(names, key=lambda name: (name not in down, -_index(name), name))
    return order[:going]


def _index(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else -1
