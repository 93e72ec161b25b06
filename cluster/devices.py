"""Which workers compute on a GPU: what the configuration leaves open, settled before any starts.

Ray knows the GPUs of its cluster and gives each worker its own, so they are counted here and not
in the worker, which may be on another host. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.cluster.config import Config
from kvferry.cluster.config_schema import RoleConfig
from kvferry.engine.device.choice import AUTO, CPU, CUDA, DeviceUnavailable

GPU = "GPU"  # Ray's name for them
ROUNDING = 1e-6  # thirds of a GPU add up to one


def reserved(section: RoleConfig) -> Mapping[str, float]:
    """What each worker of a role reserves with Ray, by name, its part of a GPU among it.

    ``section`` says which device it is on. A ``GPU`` in its ``resources`` stands before ``gpus``.
    """
    if section.device == CUDA and GPU not in section.resources:
        return {**section.resources, GPU: section.gpus}
    return section.resources


def gpus_of(section: RoleConfig) -> float:
    """The part of one GPU that each worker of a role has, where it computes on one."""
    return min(1.0, _gpus_reserved(section))


def _gpus_reserved(section: RoleConfig) -> float:
    return section.resources.get(GPU, section.gpus)


@dataclass(frozen=True, slots=True)
class Placed:
    """What holds for a cluster.

    Attributes:
        config: the configuration with ``cpu`` or ``cuda`` for each role, and the dtype that follows
            from it where that was left open.
        lines: what start-up has to say about it.
    """

    config: Config
    lines: tuple[str, ...]


def gpus_for(workers: Iterable[tuple[int, float]]) -> int:
    """GPUs that hold workers, given as (number, GPUs of each).

    A worker of less than one GPU does not span two: largest first, each on the first GPU that has
    room for it. One of more has whole GPUs.
    """
    parts = [part for count, part in workers for _ in range(count)]
    whole = sum(math.ceil(part - ROUNDING) for part in parts if part > 1)
    room: list[float] = []
    for part in sorted((part for part in parts if 0 < part <= 1), reverse=True):
        place = next((i for i, left in enumerate(room) if part <= left + ROUNDING), None)
        if place is None:
            room.append(1.0 - part)
        else:
            room[place] -= part
    return whole + len(room)


def on_devices(config: Config, num_gpus: float, can_grow: bool = False) -> Placed:
    """Settle the devices.

    ``auto`` is ``cuda`` where there is a GPU for every worker that may use one, else ``cpu`` for
    all of them: workers of one role are alike. Who reserves a ``GPU`` by ``resources`` is on one,
    whatever ``auto`` is for others. ``model.dtype: auto`` is bfloat16 as soon as any worker
    computes on a GPU, so that all pools have one dtype.

    Args:
        config: the configuration, which is in order by itself.
        num_gpus: GPUs of the Ray cluster.
        can_grow: more may come, and who has to be on one waits for it.

    Raises DeviceUnavailable if there are too few for those that have to be on one.
    """
    replicas = config.replicas()
    counts = {
        "prefill": replicas.prefill,
        "decode": replicas.decode,
        "colocated": replicas.colocated,
    }
    asked = {role: getattr(config, role).device for role, count in counts.items() if count}
    needs = {role: (counts[role], _gpus_reserved(getattr(config, role))) for role in asked}
    named = {role for role in asked if getattr(config, role).resources.get(GPU)}
    must = [role for role, its in asked.items() if its == CUDA or (its == AUTO and role in named)]
    may = [
        role for role, its in asked.items() if its == AUTO and needs[role][1] and role not in named
    ]
    wanted = gpus_for(needs[role] for role in must)
    if wanted > num_gpus + ROUNDING and not can_grow:
        who = ", ".join(f"{counts[role]} {role}" for role in must)
        raise DeviceUnavailable(
            f"{who} on cuda need {wanted} GPUs, Ray's cluster has {num_gpus:g}: set "
            + " and ".join(f"{role}.device" for role in must)
            + " to cpu or auto, or lower replicas or gpus"
        )
    wanted = gpus_for(needs[role] for role in (*must, *may))
    fits = bool(may) and wanted <= num_gpus + ROUNDING
    devices = {role: CUDA if role in must or (fits and role in may) else CPU for role in asked}
    lines = []
    if may and not fits and num_gpus:
        lines.append(
            f"device: auto is the CPU: {', '.join(may)} would need {wanted} GPUs in all, Ray's "
            f"cluster has {num_gpus:g}"
        )
    changed = {
        role: getattr(config, role).model_copy(update={"device": device})
        for role, device in devices.items()
    }
    if CUDA in devices.values():
        lines.append("device: " + ", ".join(f"{role} {name}" for role, name in devices.items()))
        if config.model.dtype == AUTO:
            changed["model"] = config.model.model_copy(update={"dtype": "bfloat16"})
    return Placed(config.model_copy(update=changed), tuple(lines))
