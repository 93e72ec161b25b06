"""Which cores of its host a worker keeps to. Workers of one host get disjoint ones.

A core is claimed by binding an abstract Unix socket of its number: the kernel lets one process have
it, and takes it back when that process ends, however it does. So nobody keeps a list, workers of
different clusters get different cores too, and there is nothing to clean up. Ranges are taken in
NUMA order and aligned to their size, so that none lies across two memory nodes if it need not.

The reach is that of abstract sockets, the network namespace. In a container with a network of its
own the claims of others cannot be seen, though the cores are everybody's: there nothing is pinned,
nor where a quota limits processor time and not cores. Claims keep friends apart; they are no
protection against foes, and a worker that gets no range runs unpinned, as without this module.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORKS = Path("/sys/class/net")
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
NUMA_FOLDER = Path("/sys/devices/system/node")
TRIES = 3  # two that try overlapping ranges at once may both give way


@dataclass(frozen=True, slots=True)
class CoreClaim:
    """The cores that a worker has; none: it is not pinned, and ``why`` says the reason."""

    cores: tuple[int, ...]
    why: str
    sockets: tuple[socket.socket, ...] = ()

    def release(self) -> None:
        """Let others have them; idempotent."""
        for held in self.sockets:
            held.close()


def parse_cores(text: str) -> list[int]:
    """``0-3,8`` as Linux writes lists of cores."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def numa_order(usable: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The usable cores by memory node, in order; those of no known node last, together."""
    allowed = set(usable)
    groups = [[core for core in node if core in allowed] for node in nodes]
    known = {core for group in groups for core in group}
    groups.append([core for core in sorted(allowed) if core not in known])
    return [group for group in groups if group]


def candidate_ranges(number: int, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Ranges of ``number`` cores, disjoint from one another, the preferred ones first.

    Aligned ones inside a memory node; then, of what those leave over, ranges across nodes.
    """
    inside: list[tuple[int, ...]] = []
    rest: list[int] = []
    for group in groups:
        whole = len(group) - len(group) % number
        inside.extend(tuple(group[at : at + number]) for at in range(0, whole, number))
        rest.extend(group[whole:])
    usable = len(rest) - len(rest) % number
    across = [tuple(rest[at : at + number]) for at in range(0, usable, number)]
    return inside + across


def own_cores(number: int) -> CoreClaim:
    """Claim ``number`` cores of this host, where claims keep its workers apart."""
    reason = obstacle([name for _, name in socket.if_nameindex()])
    return claim_cores(number) if reason is None else CoreClaim((), f"not pinned: {reason}")


def obstacle(
    interfaces: Sequence[str], networks: Path = NETWORKS, quotas: Sequence[Path] = QUOTAS
) -> str | None:
    """Why claims would not keep the workers of this machine apart; None: they do.

    Of the network ``interfaces`` seen from here those of hardware have a ``device`` in a folder of
    ``networks``; ``quotas`` are the files, of either version of control groups, that limit a
    container.
    """
    for file in quotas:
        try:
            quota = file.read_text(encoding="ascii").split()[:1]
        except OSError:  # the other version, or none
            continue
        if quota not in ([], ["max"], ["-1"]):
            return "this container has a limit of processor time, not cores of its own"
    if not any((networks / name / "device").exists() for name in interfaces):
        return "this container has a network of its own: whose cores are whose cannot be seen here"
    return None


def claim_cores(number: int, prefix: str = "kvferry-core") -> CoreClaim:
    """Claim ``number`` cores that no other worker of this host has."""
    usable = sorted(os.sched_getaffinity(0))
    groups = numa_order(usable, _numa_nodes())
    ranges = candidate_ranges(number, groups)
    # A range of another size overlaps these differently; a second pass looks at every offset.
    flat = [core for group in groups for core in group]
    ranges += [tuple(flat[at : at + number]) for at in range(len(flat) - number + 1)]
    for _ in range(TRIES):
        for cores in ranges:
            held = _claim(cores, prefix)
            if held is not None:
                listed = ", ".join(str(core) for core in cores)
                word = "core" if number == 1 else "cores"
                return CoreClaim(cores, f"it keeps to {word} {listed} of its host", held)
    return CoreClaim(
        (), f"not pinned: {number} of this host's {len(usable)} cores are not free together"
    )


def pin(cores: Sequence[int]) -> None:
    """Keep the calling thread, and those that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)


def _claim(cores: Sequence[int], prefix: str) -> tuple[socket.socket, ...] | None:
    held: list[socket.socket] = []
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0{prefix}-{core}")
        except OSError:
            claim.close()
            for other in held:
                other.close()
            return None
        held.append(claim)
    return tuple(held)


def _numa_nodes() -> list[list[int]]:
    """Cores of each memory node; none where the kernel does not say."""
    files = sorted(NUMA_FOLDER.glob("node[0-9]*/cpulist"), key=lambda f: int(f.parent.name[4:]))
    nodes = []
    for file in files:
        try:
            nodes.append(parse_cores(file.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return nodes
