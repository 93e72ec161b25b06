"""How many KV blocks a worker gets: the arithmetic, and the memory limit it starts from.

``size_pool`` is pure; ``memory_limit`` reads the limit of this process's control group. Neither
allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.kv_cache.errors import KVFerryError

MIB = 1 << 20
CPU_POOL_CAP_BYTES = 1 << 30
"""What ``auto`` takes at most on a CPU, unless one request of maximal length needs more."""


class PoolTooSmall(KVFerryError):
    """The pool cannot hold one request of maximal length; names blocks got and wanted."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The result: blocks, and one line that says how they came about."""

    num_blocks: int
    arithmetic: str


def size_pool(
    memory_limit_bytes: int,
    share: float,
    weights_bytes: int,
    peak_step_bytes: int,
    reserve_bytes: int,
    block_bytes: int,
    useful_blocks: int,
    requested_memory: int | None = None,
    requested_blocks: int | None = None,
    min_blocks: int = 1,
    cap_bytes: int = CPU_POOL_CAP_BYTES,
) -> PoolSize:
    """Decide the number of blocks of a pool.

    Requested blocks come first, then requested memory; neither is capped. Otherwise the pool gets
    ``memory_limit_bytes * share - weights_bytes - peak_step_bytes - reserve_bytes``, at most
    ``cap_bytes`` and at most ``useful_blocks``.

    Args:
        memory_limit_bytes: what the machine or the control group allows, all workers together.
        share: this worker's part of it, in (0, 1].
        weights_bytes: the model's weights.
        peak_step_bytes: what a maximal step takes beside weights and pool.
        reserve_bytes: for everything else in the process.
        block_bytes: bytes of one block.
        useful_blocks: blocks that ``max_num_seqs`` requests of maximal length fill.
        requested_memory: bytes of the pool asked for (``cache.memory``).
        requested_blocks: blocks asked for (``cache.num_blocks``).
        min_blocks: blocks of one request of maximal length; the cap does not go below them.
        cap_bytes: limit of the automatic size.

    Raises PoolTooSmall for fewer than ``min_blocks`` (at least one) blocks.
    """
    each = f"blocks of {_mib(block_bytes)}"
    if requested_blocks is not None:
        num_blocks, origin = requested_blocks, "as requested"
    elif requested_memory is not None:
        num_blocks, origin = requested_memory // block_bytes, f"{_mib(requested_memory)} requested"
    else:
        room = int(memory_limit_bytes * share) - weights_bytes - peak_step_bytes - reserve_bytes
        capped = min(room, max(cap_bytes, min_blocks * block_bytes))
        num_blocks = min(max(capped, 0) // block_bytes, useful_blocks)
        origin = (
            f"{_mib(memory_limit_bytes)} x {share:.2f} - weights {_mib(weights_bytes)} - step "
            f"{_mib(peak_step_bytes)} - reserve {_mib(reserve_bytes)} = {_mib(room)}"
        )
        if num_blocks == useful_blocks:
            origin += f", capped at {useful_blocks} useful blocks"
        elif capped < room:
            origin += f", capped at {_mib(capped)}"
    arithmetic = f"KV pool: {num_blocks} {each} = {_mib(num_blocks * block_bytes)} ({origin})"
    if num_blocks < max(min_blocks, 1):
        raise PoolTooSmall(
            f"{arithmetic}; one request of maximal length needs {max(min_blocks, 1)} blocks, got "
            f"{num_blocks}: raise cache.memory or cache.num_blocks, or lower model.max_model_len"
        )
    return PoolSize(num_blocks=num_blocks, arithmetic=arithmetic)


def device_memory_limit(free: int, total: int, weights_bytes: int, share: float) -> int:
    """What one worker may have of a device's memory: its share, or what is there if that is less.

    Args:
        free: bytes that nobody has, the worker's weights being loaded.
        total: bytes of the device.
        weights_bytes: of the worker, on the device.
        share: part of the device that the worker has, in (0, 1].
    """
    return min(free + weights_bytes, int(total * share))


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may use: its control group's limit or the physical memory.

    The least of the limits of the group and all its parents, control groups version 2 and 1,
    and of the physical memory. A file that is missing or unreadable sets no limit.

    Args:
        root: where ``proc`` and ``sys`` are mounted; another folder in tests.
    """
    limits = [_physical_memory(root), *_cgroup_limits(root)]
    return min(limit for limit in limits if limit is not None)


def _physical_memory(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    raise KVFerryError(f"{root / 'proc/meminfo'} has no MemTotal; set cache.memory by hand")


def _cgroup_limits(root: Path) -> list[int | None]:
    limits: list[int | None] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        folders = [group, *group.parents]
        limits += [_limit(folder / file) for folder in folders if folder.is_relative_to(base)]
    return limits


def _limit(file: Path) -> int | None:
    text = (_read(file) or "").strip()
    return int(text) if text.isdigit() else None  # version 2 writes "max" for no limit


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _mib(num_bytes: int) -> str:
    if abs(num_bytes) < MIB / 100:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / MIB:,.2f} MiB"
