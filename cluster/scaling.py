"""How a cluster grows and shrinks: which workers are to come and which to go. Pure.

The newest go first, and those that are going already before all others. New ones get the lowest
free numbers. Knows neither how workers are started nor how they are drained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvferry.cluster.deaths import Death
from kvferry.engine.request import InvalidRequest

ROLES = ("prefill", "decode", "colocated")
MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """How many workers of each role there are to be; of roles not named, as many as there are."""

    order_id: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScaleDone:
    """A scale order has been carried out as far as starting goes; or why it has not."""

    order_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class RouterNews:
    """What a router has for whoever watches it: workers lost or drained, and orders."""

    lost: tuple[Death, ...] = ()
    orders: tuple[ScaleOrder, ...] = ()


def check_counts(counts: Mapping[str, int], present: Mapping[str, int]) -> dict[str, int]:
    """The whole of what is wanted. Raises InvalidRequest where that could not serve."""
    wanted = {role: counts.get(role, present.get(role, 0)) for role in ROLES}
    listed = ", ".join(f"{number} {role}" for role, number in wanted.items())
    if any(not 0 <= number <= MAX_WORKERS for number in wanted.values()):
        raise InvalidRequest(f"got {listed}; wanted 0 to {MAX_WORKERS} of each role")
    if not (wanted["colocated"] or (wanted["prefill"] and wanted["decode"])):
        raise InvalidRequest(
            f"got {listed}; wanted at least one prefill and one decode, or one colocated: "
            "'kvferry down' ends a cluster"
        )
    return wanted


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


def names_to_drain(number: int, names: Collection[str], draining: Collection[str]) -> list[str]:
    """Which of one role's workers go, for ``number`` to stay."""
    going = len(names) - number
    if going <= 0:
        return []
    order = sorted(names, key=lambda name: (name not in draining, -_index(name), name))
    return order[:going]


def _index(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdigit() else -1
