"""Memory for what is read in every step: in huge pages where the system gives them.

A step reads all weights once. In pages of 4 KiB the processor's prefetching stops at every one of
them, and most of their addresses must be looked up again each time. Several tensors share a
stretch, so that those smaller than a huge page have them too. Knows no weights.
"""

from __future__ import annotations

import mmap
import threading

import torch

HUGE_PAGE_BYTES = 2 << 20
STRETCH_BYTES = 32 << 20  # only what is written of it takes memory
ALIGNMENT = 64


class Arena:
    """Hands out zeroed bytes that live as long as anything looks at their stretch."""

    def __init__(self, stretch_bytes: int = STRETCH_BYTES) -> None:
        self._stretch_bytes = stretch_bytes
        self._lock = threading.Lock()
        self._stretch = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """``[size]`` uint8 of zeros, the first on a border of ``ALIGNMENT``. MemoryError."""
        with self._lock:
            if self._used + size > len(self._stretch):
                self._stretch = _stretch(max(size, self._stretch_bytes))
                self._used = 0
            taken = self._stretch[self._used : self._used + size]
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
            return taken


def _stretch(size: int) -> torch.Tensor:
    """Bytes in memory of their own, the first on a border of a huge page."""
    try:
        # Anonymous memory begins at a border of a small page.
        mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot get {size} bytes for weights: {error}") from error
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a system without them: small pages do
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + size]


WEIGHTS = Arena()
"""That of every linear of this process."""
