"""Which cores the systems get: one hardware thread of each physical core, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def usable_cores() -> list[int]:
    """One CPU number for each core that this process may use."""
    return one_per_core(sorted(os.sched_getaffinity(0)), _siblings)


def one_per_core(cpus: Iterable[int], siblings: Callable[[int], str]) -> list[int]:
    """The first of ``cpus`` for each distinct value of ``siblings``."""
    first: dict[str, int] = {}
    for cpu in cpus:
        first.setdefault(siblings(cpu), cpu)
    return list(first.values())


def _siblings(cpu: int) -> str:
    """What names the core of a CPU; the CPU itself where Linux does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)
