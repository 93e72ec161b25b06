"""What the runner and the staging of blocks ask of a device.

Work is queued on streams and done later. A stream does its work in order; between two streams
there is no order but the one that events make. So an event is the only way to know that something
has been done: whoever reads host memory that is copied to, or writes host memory that is copied
from, waits for the event that was recorded behind the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Event(Protocol):
    """A place in a stream's queue."""

    def query(self) -> bool:
        """Whether all that was queued before it is done. Returns at once."""
        ...

    def synchronize(self) -> None:
        """Return when all that was queued before it is done. Raises what made it fail."""
        ...


class Stream(Protocol):
    """A queue of work."""

    def launch(self, work: Callable[[], object]) -> None:
        """Queue what ``work`` computes. It may be called at once, and then queues its kernels, or
        later, when it is its turn.
        """
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between pinned host memory and the device, in either direction. Both are
        contiguous, of one shape and dtype.
        """
        ...

    def record(self) -> Event:
        """An event behind all that is queued now."""
        ...


class Graph(Protocol):
    """Work that was recorded once, over tensors that stay where they are."""

    def launch(self, stream: Stream) -> None:
        """Queue all of it."""
        ...


class Device(Protocol):
    """One device, of which the process has the use."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def architecture(self) -> str:
        """For reports, for example ``sm_90``."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device: uint8 [num_bytes], zeroed before this returns."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory that can be copied without waiting: uint8 [num_bytes]; it goes with the
        tensor.
        """
        ...

    def pin(self, host: NDArray[np.uint8]) -> torch.Tensor:
        """``host``, C-contiguous, as a tensor that can be copied without waiting; a view of it.
        It keeps its place until ``unpin``.
        """
        ...

    def unpin(self, host: NDArray[np.uint8]) -> None:
        """Let go of host memory; no copy of it is queued any longer."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes that there are."""
        ...

    def capture(self, stream: Stream, work: Callable[[], object]) -> Graph:
        """Record what ``work`` queues. It is run beforehand, too, once or more, and so must leave
        things as they are when run on the inputs that are there now. Waits for ``stream``.
        """
        ...
