"""One measured kernel beside its competitors, and its row in the document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from kvferry.cluster.bench.families import Family
from kvferry.cluster.bench.machine import Call, Memory, threads, timed
from kvferry.cluster.reports.common import Json, dist

LEAST_READ = 4 << 20
"""Bytes of a reading of memory: what is shorter says little."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a case; None where a kernel has no such thing. ``batch`` counts sequences."""

    batch: int
    query_len: int = 1
    context: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None

    def as_json(self) -> Json:
        """Under the document's names."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Case:
    """What one kernel is asked to do, and how well it should be done.

    Attributes:
        call: makes the call by a family.
        baselines: the same by plain torch, under the names of the ways.
        error: the largest difference between a family's result and one computed in float64.
        num_bytes: read and written at least.
        flops: multiplications and additions.
    """

    kernel: str
    shape: Shape
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    call: Callable[[Family], Call]
    baselines: Mapping[str, Call]
    error: Callable[[Family], float]
    num_bytes: int
    flops: int


def measure(
    case: Case,
    families: list[Family],
    counts: Iterable[int],
    memory: Memory,
    budget_s: float,
) -> list[Json]:
    """A row per number of threads and family; ``memory`` is read in the same turns."""
    rows = []
    read, read_bytes = memory.reading(max(case.num_bytes, LEAST_READ))
    for count in counts:
        calls = {f"{family.name} kernel": case.call(family) for family in families}
        with threads(count), torch.inference_mode():
            times = timed({**calls, **case.baselines, "memory": read}, budget_s)
            errors = [case.error(family) for family in families]
        baselines = [{"name": name, "time_s": median(times[name])} for name in case.baselines]
        bytes_per_s = read_bytes / median(times["memory"])
        best = min(baselines, key=lambda baseline: float(str(baseline["time_s"])))
        for family, error in zip(families, errors, strict=True):
            own = times[f"{family.name} kernel"]
            took = median(own)
            rows.append(
                {
                    "kernel": case.kernel,
                    "implementation": family.name,
                    "isa": family.isa,
                    "dtype": _name(case.dtype),
                    "kv_dtype": None if case.kv_dtype is None else _name(case.kv_dtype),
                    "threads": count,
                    "shape": case.shape.as_json(),
                    "time_s": dist(own),
                    "bytes": case.num_bytes,
                    "bytes_per_s": case.num_bytes / took,
                    "fraction_of_bandwidth": case.num_bytes / took / bytes_per_s,
                    "flops": case.flops,
                    "baseline": best,
                    "baselines": baselines,
                    "ratio_to_baseline": float(str(best["time_s"])) / took,
                    "max_error_float64": error,
                }
            )
    return rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
