"""Times calls on a GPU with its own events, its caches cold.

A call is captured in a graph and replayed, so that what is timed is the device's work, as in a
decode step, and not Python's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.work import Roofs, middle

_COPY_BYTES = 1 << 30
_MATRIX_SIZE = 8192
_CACHE_BYTES = 256 << 20  # more than any L2


class Timer:
    """Medians of repeated calls. The caches are emptied before each."""

    def __init__(self, repeats: int = 20) -> None:
        self._repeats = repeats
        self._flush = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        work = _captured(call)
        begun = [self._event() for _ in range(self._repeats)]
        ended = [self._event() for _ in range(self._repeats)]
        for before, after in zip(begun, ended, strict=True):
            self._flush.zero_()
            before.record()
            work()
            after.record()
        torch.cuda.synchronize()
        pairs = zip(begun, ended, strict=True)
        return middle([before.elapsed_time(after) / 1000 for before, after in pairs])

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a graph, after it was run as it is, which compiles it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def roofs(timer: Timer) -> Roofs:
    """Measured now."""
    copy_s = _copy_s(timer)
    size = _MATRIX_SIZE
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product_s = timer(lambda: left @ right)
    return Roofs(2 * _COPY_BYTES / copy_s, 2 * size**3 / product_s)


def _copy_s(timer: Timer) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))
