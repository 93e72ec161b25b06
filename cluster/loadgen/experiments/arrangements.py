"""How the workers of a cluster stand, in a short notation, and as a configuration. Pure.

1x2         one colocated worker with two threads
2x1         two colocated workers with one thread each
1P+1D       one prefill and one decode worker, one thread each
1Px2+3D     one prefill worker with two threads, three decode workers with one each
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad

_COLOCATED = re.compile(r"([0-9]+)x([0-9]+)")
_SPLIT = re.compile(r"([0-9]+)P(?:x([0-9]+))?\+([0-9]+)D(?:x([0-9]+))?")
WANTED = "wanted NxTHREADS (colocated) or NP[xTHREADS]+MD[xTHREADS], such as 1x2, 2x1, 1P+1D"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Workers of each role, and threads of each of them."""

    name: str
    colocated: int = 0
    prefill: int = 0
    decode: int = 0
    colocated_threads: int = 1
    prefill_threads: int = 1
    decode_threads: int = 1

    @property
    def is_colocated(self) -> bool:
        """Whether every worker does both."""
        return self.colocated > 0

    @property
    def threads(self) -> int:
        """Of all workers together."""
        return (
            self.colocated * self.colocated_threads
            + self.prefill * self.prefill_threads
            + self.decode * self.decode_threads
        )

    def config(self) -> dict[str, dict[str, int]]:
        """Sections of the configuration; every count is said, so that no file's stands."""
        found: dict[str, dict[str, int]] = {}
        for role in ("prefill", "decode", "colocated"):
            count = getattr(self, role)
            found[role] = {"replicas": count}
            if count:
                found[role]["threads"] = getattr(self, f"{role}_threads")
        return found


def parse_arrangement(text: str) -> Arrangement:
    """One arrangement. Raises BadLoad."""
    found = _COLOCATED.fullmatch(text)
    if found is not None:
        count, threads = int(found[1]), int(found[2])
        made = Arrangement(text, colocated=count, colocated_threads=threads)
        counts: tuple[int, ...] = (count, threads)
    elif (found := _SPLIT.fullmatch(text)) is not None:
        prefill, decode = int(found[1]), int(found[3])
        prefill_threads, decode_threads = int(found[2] or 1), int(found[4] or 1)
        made = Arrangement(
            text,
            prefill=prefill,
            decode=decode,
            prefill_threads=prefill_threads,
            decode_threads=decode_threads,
        )
        counts = (prefill, decode, prefill_threads, decode_threads)
    else:
        raise BadLoad(f"arrangement: got {text!r}, {WANTED}")
    if min(counts) < 1:
        raise BadLoad(f"arrangement: got {text!r}, wanted at least 1 of each number")
    return made


def parse_arrangements(text: str) -> tuple[Arrangement, ...]:
    """Several, with commas between them. Raises BadLoad."""
    found = tuple(parse_arrangement(each.strip()) for each in text.split(","))
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadLoad(f"arrangements: {twice} stands twice in {text!r}")
    return found


def merged(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings into one; what a later one says stands before the earlier ones."""
    whole: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            below = whole.get(key)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                whole[key] = merged(below, value)
            else:
                whole[key] = merged(value) if isinstance(value, Mapping) else value
    return whole
