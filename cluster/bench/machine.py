"""Timing, and what this machine's memory and arithmetic allow.

Competitors are timed in turns, so that a slow moment of the machine meets all of them. Does not
know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
import torch.nn.functional as F

from kvferry.cluster.bench.served_roof import Arrangement, Reading

GEMM_ROWS = 512
GEMM_SIZE = 2048
WORKING_SET_BYTES = 512 << 20

Call = Callable[[int], object]
"""What is timed; its argument counts the calls, so that each may touch memory of its own."""


def timed(
    calls: Mapping[str, Call], budget_s: float, at_least: int = 5, at_most: int = 200
) -> dict[str, list[float]]:
    """Seconds of each call, made in turns until the time is up; one turn before is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(at_most + 1):
        for name, call in calls.items():
            before = time.perf_counter()
            call(turn)
            took = time.perf_counter() - before
            if turn:
                times[name].append(took)
        if turn >= at_least and time.perf_counter() - began > budget_s:
            break
    return times


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_bandwidth(working_set_bytes: int, budget_s: float) -> float:
    """Bytes per second of reading so much memory once: the faster of a dot product and a sum."""
    numbers = torch.ones(working_set_bytes // 4)
    found = timed(
        {"dot": lambda _: torch.dot(numbers, numbers), "sum": lambda _: numbers.sum()}, budget_s
    )
    return numbers.nbytes / min(median(times) for times in found.values())


class Memory:
    """Memory larger than any cache, read in pieces one after the other, for calls in turns."""

    def __init__(self, working_set_bytes: int) -> None:
        self._numbers = torch.ones(working_set_bytes // 4)

    def reading(self, num_bytes: int) -> tuple[Call, int]:
        """A call that reads some ``num_bytes``, each time the next piece; and how many it reads."""
        length = max(1, min(num_bytes // 4, len(self._numbers)))
        pieces = self._numbers[: len(self._numbers) // length * length].view(-1, length)

        def read(turn: int) -> object:
            piece = pieces[turn % len(pieces)]
            return torch.dot(piece, piece)

        return read, 4 * length


def gemm_rate(size: int, budget_s: float) -> float:
    """FLOP per second of a float32 product ``[512, size] x [size, size]``."""
    x, weight = torch.ones(GEMM_ROWS, size), torch.ones(size, size)
    (times,) = timed({"gemm": lambda _: F.linear(x, weight)}, budget_s).values()
    return 2 * GEMM_ROWS * size * size / median(times)


def read_for(arrangement: Arrangement, budget_s: float = 0.5) -> Reading:
    """What this machine does at the moment, with the threads of each side of ``arrangement``."""
    with threads(arrangement.gemm_threads):
        gemm_flops = gemm_rate(GEMM_SIZE, budget_s)
    with threads(arrangement.read_threads):
        return Reading(gemm_flops, read_bandwidth(WORKING_SET_BYTES, budget_s))
