"""A device whose work is done only when it is let, and which sees how its memory is misused.

Tensors are the CPU's. What is queued on a stream runs, in the stream's order, when a test says so,
when somebody waits for an event, or, with ``seed``, by chance whenever an event is looked at; so
streams overtake each other as they please. Until a copy runs its target holds poison: who reads it
too early reads rubbish.

Noticed at once: a copy whose host source was overwritten while it was queued; one whose host target
was written to by somebody else; two copies that write the same memory in no order, or of which one
writes what the other is to read; a copy of memory that is neither pinned nor the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.device.protocol import Event, Graph, Stream

POISON = 0xDB


class Misuse(AssertionError):
    """Memory was touched in a way that a real device would punish now and then."""


class Extent(NamedTuple):
    """Addresses of a contiguous piece of memory."""

    first: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        assert tensor.is_contiguous()
        return cls(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def overlaps(self, other: Extent) -> bool:
        return self.first < other.end and other.first < self.end

    def within(self, other: Extent) -> bool:
        return other.first <= self.first and self.end <= other.end


@dataclass
class Copy:
    """A queued copy."""

    target: torch.Tensor
    source: torch.Tensor
    from_host: bool
    at_queueing: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.at_queueing = self.source.clone()
        self.target.view(torch.uint8).fill_(POISON)

    def __call__(self) -> None:
        if self.from_host and not torch.equal(self.source, self.at_queueing):
            raise Misuse("a host buffer was overwritten while a copy out of it was queued")
        if not self.from_host and not (self.target.view(torch.uint8) == POISON).all():
            raise Misuse("a host buffer was written to while a copy into it was queued")
        self.target.copy_(self.source)


class FakeEvent:
    """Done when so much of its stream's work is."""

    def __init__(self, stream: FakeStream, place: int) -> None:
        self._stream = stream
        self._place = place

    def query(self) -> bool:
        self._stream.device.drift()
        return self._stream.num_done >= self._place

    def synchronize(self) -> None:
        while self._stream.num_done < self._place:
            self._stream.step()


class FakeStream:
    """Work that waits."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], object]] = deque()
        self.num_done = 0

    def launch(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue.append(self.device.check(self, target, source))

    def record(self) -> Event:
        return FakeEvent(self, self.num_done + len(self.queue))

    def step(self) -> None:
        """Do the next piece of work."""
        work = self.queue.popleft()
        self.num_done += 1
        work()

    @property
    def copies(self) -> Iterator[Copy]:
        """Those that wait."""
        return (work for work in self.queue if isinstance(work, Copy))


@dataclass
class FakeGraph:
    """Work to be queued again."""

    work: Callable[[], object]
    num_launches: int = 0

    def launch(self, stream: Stream) -> None:
        self.num_launches += 1
        stream.launch(self.work)


class FakeDevice:
    """See the module. ``on_copy`` hears of every copy (target, source) when it is queued."""

    architecture = "fake"

    def __init__(self, seed: int | None = None, free: int = 4 << 30, total: int = 4 << 30) -> None:
        self.torch_device = torch.device("cpu")
        self.streams: list[FakeStream] = []
        self.graphs: list[FakeGraph] = []
        self.on_copy: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.num_copies = 0
        self._rng = None if seed is None else Random(seed)
        self._memory = (free, total)
        self._own: list[torch.Tensor] = []
        self._pinned: dict[int, torch.Tensor] = {}

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def zeros(self, num_bytes: int) -> torch.Tensor:
        self._own.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self._own[-1]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def pin(self, host: NDArray[np.uint8]) -> torch.Tensor:
        tensor = torch.from_numpy(host)
        if any(Extent.of(tensor).overlaps(Extent.of(held)) for held in self._pinned.values()):
            raise Misuse("host memory is pinned that is pinned already")
        self._pinned[host.ctypes.data] = tensor
        return tensor

    def unpin(self, host: NDArray[np.uint8]) -> None:
        if self.is_pending(host):
            raise Misuse("host memory is let go of while a copy is queued")
        del self._pinned[host.ctypes.data]

    def memory(self) -> tuple[int, int]:
        return self._memory

    def capture(self, stream: Stream, work: Callable[[], object]) -> Graph:
        stream.record().synchronize()
        work()
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]

    # --- what tests do ------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Pieces of work that have not been done."""
        return sum(len(stream.queue) for stream in self.streams)

    def run_all(self) -> None:
        """Do everything."""
        for stream in self.streams:
            while stream.queue:
                stream.step()

    def drift(self) -> None:
        """Time passes: by chance some work is done."""
        if self._rng is None:
            return
        for _ in range(self._rng.choice((0, 0, 1, 2, 4))):
            busy = [stream for stream in self.streams if stream.queue]
            if busy:
                self._rng.choice(busy).step()

    def is_pending(self, array: NDArray[np.uint8]) -> bool:
        """Whether any copy that waits touches this memory."""
        extent = Extent.of(torch.from_numpy(array))
        return any(
            extent.overlaps(Extent.of(tensor))
            for stream in self.streams
            for copy in stream.copies
            for tensor in (copy.target, copy.source)
        )

    def check(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """A copy to be queued. Raises Misuse."""
        if target.shape != source.shape or target.dtype != source.dtype:
            raise Misuse(f"a copy of {source.shape} to {target.shape}")
        new_target, new_source = Extent.of(target), Extent.of(source)
        from_host = self._is_in(new_source, self._pinned.values())
        host, own = (new_source, new_target) if from_host else (new_target, new_source)
        if not self._is_in(host, self._pinned.values()) or not self._is_in(own, self._own):
            raise Misuse("a copy that is not between pinned host memory and the device")
        for other in self.streams:
            for pending in other.copies if other is not stream else ():
                old_target, old_source = Extent.of(pending.target), Extent.of(pending.source)
                if old_target.overlaps(new_target) or old_target.overlaps(new_source):
                    raise Misuse("memory that a queued copy of another stream writes is used")
                if pending.from_host and old_source.overlaps(new_target):
                    raise Misuse("memory that a queued copy of another stream reads is written")
        if self.on_copy is not None:
            self.on_copy(target, source)
        self.num_copies += 1
        return Copy(target, source, from_host)

    @staticmethod
    def _is_in(extent: Extent, tensors: Iterable[torch.Tensor]) -> bool:
        return any(extent.within(Extent.of(tensor)) for tensor in tensors)
