"""``torch.cuda`` as a ``Device``: nothing but calls, so that what decides is tested elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.device.protocol import Event, Graph, Stream
from kvferry.kv_cache.errors import KVFerryError

WARM_UP_RUNS = 2  # kernels are compiled and libraries set up in the first


class PinningFailed(KVFerryError):
    """Host memory could not be page-locked; names its size and what to change."""

    exit_code = 2


class CudaStream:
    """A stream of the current device."""

    def __init__(self, inner: torch.cuda.Stream) -> None:
        self.inner = inner

    def launch(self, work: Callable[[], object]) -> None:
        """Run ``work`` now; its kernels are queued here."""
        with torch.cuda.stream(self.inner):
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        with torch.cuda.stream(self.inner):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """An event behind all that is queued now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.inner)
        return event


class CudaGraph:
    """A captured graph."""

    def __init__(self, inner: torch.cuda.CUDAGraph) -> None:
        self._inner = inner

    def launch(self, stream: Stream) -> None:
        """Queue all of it."""
        stream.launch(self._inner.replay)


class CudaDevice:
    """The one GPU that this worker is shown (see ``CUDA_VISIBLE_DEVICES``), from construction on
    the current one of the thread that makes it.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    @property
    def architecture(self) -> str:
        """For example ``sm_90`` or ``gfx942``."""
        found = torch.cuda.get_device_properties(self.torch_device)
        if torch.version.hip:
            return str(found.gcnArchName).partition(":")[0]
        return f"sm_{found.major}{found.minor}"

    def stream(self) -> CudaStream:
        """A new stream."""
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, zeroed."""
        made = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.synchronize(self.torch_device)  # other streams do not wait for this one
        return made

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """From torch's own pinned memory, which it takes back when the tensor is gone."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, host: NDArray[np.uint8]) -> torch.Tensor:
        """Page-lock memory that others have allocated. Raises PinningFailed."""
        error = _runtime().cudaHostRegister(host.ctypes.data, host.nbytes, 0)
        if int(error) != 0:
            raise PinningFailed(
                f"cannot page-lock {host.nbytes} bytes of host memory (CUDA error {int(error)}; "
                "712: some of it is locked already): lower transfer.staging_blocks, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        return torch.from_numpy(host)

    def unpin(self, host: NDArray[np.uint8]) -> None:
        """Let go of it."""
        _runtime().cudaHostUnregister(host.ctypes.data)

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, also for torch, which keeps some for later; and bytes in all."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)

    def capture(self, stream: Stream, work: Callable[[], object]) -> Graph:
        """Capture ``work`` into a graph; the graphs of a device share their scratch memory, since
        one runs at a time.
        """
        assert isinstance(stream, CudaStream)
        for _ in range(WARM_UP_RUNS):
            stream.launch(work)
        stream.record().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._graph_memory, stream=stream.inner, capture_error_mode="thread_local"
        ):
            work()
        return CudaGraph(graph)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
