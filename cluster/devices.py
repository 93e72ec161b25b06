"""Which workers compute on a GPU: what the configuration leaves open, settled before any starts.

Ray knows the GPUs of its cluster and gives each worker its own, so they are counted here and not
in the worker, which may be on another host. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.cluster.config import Config
from kvferry.engine.device.choice import AUTO, CPU, CUDA, DeviceUnavailable

ROUNDING = 1e-6  # thirds of a GPU add up to one


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
    """GPUs that hold workers, given as (number, part of a GPU); none spans two.

    Largest first, each on the first GPU that has room for it.
    """
    room: list[float] = []
    for part in sorted((part for count, part in workers for _ in range(count)), reverse=True):
        place = next((i for i, left in enumerate(room) if part <= left + ROUNDING), None)
        if place is None:
            room.append(1.0 - part)
        else:
            room[place] -= part
    return len(room)


def on_devices(config: Config, num_gpus: float) -> Placed:
    """Settle the devices.

    ``auto`` is ``cuda`` where there is a GPU for every worker that may use one, else ``cpu`` for
    all of them: workers of one role are alike. ``model.dtype: auto`` is bfloat16 as soon as any
    worker computes on a GPU, so that all pools have one dtype.

    Args:
        config: the configuration, which is in order by itself.
        num_gpus: GPUs of the Ray cluster.

    Raises DeviceUnavailable if there are too few for those that have to be on one.
    """
    replicas = config.replicas()
    counts = {
        "prefill": replicas.prefill,
        "decode": replicas.decode,
        "colocated": replicas.colocated,
    }
    asked = {role: getattr(config, role).device for role, count in counts.items() if count}
    needs = {role: (counts[role], getattr(config, role).gpus) for role in asked}
    must = [role for role, device in asked.items() if device == CUDA]
    may = [role for role, device in asked.items() if device == AUTO]
    wanted = gpus_for(needs[role] for role in must)
    if wanted > num_gpus + ROUNDING:
        named = ", ".join(f"{counts[role]} {role}" for role in must)
        raise DeviceUnavailable(
            f"{named} on cuda need {wanted} GPUs, Ray's cluster has {num_gpus:g}: set "
            + " and ".join(f"{role}.device" for role in must)
            + " to cpu or auto, or lower replicas or gpus"
        )
    wanted = gpus_for(needs[role] for role in (*must, *may))
    fits = bool(may) and wanted <= num_gpus + ROUNDING
    devices = {role: CUDA if role in must or (fits and role in may) else CPU for role in asked}
    lines = []
    if num_gpus and may and not fits:
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
