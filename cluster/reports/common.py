"""The fields that every document has, and the summary of a distribution.

Owns what is said of this machine and this installation; does not know any command.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import psutil

Json: TypeAlias = dict[str, Any]

# The widest set that a processor has, widest first; as named in /proc/cpuinfo.
_ISA_FLAGS = (("avx512f", "avx512"), ("avx2", "avx2"), ("asimd", "neon"))


def common_fields(name: str, argv: Sequence[str], now: datetime) -> Json:
    """The head of document ``kvferry.NAME/1`` of the command ``kvferry ARGV``, made at ``now``."""
    return {
        "schema": f"kvferry.{name}/1",
        "version": distribution_version("kvferry"),
        "commit": commit(Path(__file__).resolve().parent),
        "created_at": now.isoformat(timespec="seconds"),
        "command": shlex.join(["kvferry", *argv]),
        "machine": machine(),
    }


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The commit of the checkout that holds ``folder``; None outside one or without git.

    A folder inside somebody else's repository, such as a virtual environment, is outside ours:
    git must know this very file.
    """
    try:
        known = _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(folder, "rev-parse", "HEAD") if known is not None else None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=5,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> Json:
    """This machine: processor, instruction set, usable cores, memory, system, Python, torch.

    Asks the package index of the installation for torch's version, so that torch stays unloaded.
    """
    cpu, isa = _processor(Path("/proc/cpuinfo"))
    return {
        "cpu": cpu or platform.processor() or None,
        "isa": isa,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": distribution_version("torch"),
    }


def _processor(cpuinfo: Path) -> tuple[str | None, str | None]:
    """Model name and widest vector instruction set in Linux's ``/proc/cpuinfo``."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None, None
    pairs = (line.partition(":") for line in lines)
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    isa = next((name for flag, name in _ISA_FLAGS if flag in flags), None)
    return fields.get("model name"), isa


def dist(values: Sequence[float]) -> Json | None:
    """DIST of some measurements: n, mean, p50, p90, p99, max; None of none.

    Percentiles interpolate linearly between the closest ranks, as ``numpy.percentile`` does.
    """
    if not values:
        return None
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "mean": math.fsum(ordered) / len(ordered),
        "p50": _percentile(ordered, 0.50),
        "p90": _percentile(ordered, 0.90),
        "p99": _percentile(ordered, 0.99),
        "max": ordered[-1],
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
