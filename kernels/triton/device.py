"""What the kernels need to know of the device that a tensor is on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_NO_DEVICE_PROCESSORS = 4  # so that the interpreter's tests see splits


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Attributes:
    architecture: ``sm_90``, ``gfx942``, …; None on a CPU, where only the interpreter computes.
    num_processors: its multiprocessors.
    """

    architecture: str | None
    num_processors: int


def device_facts(device: torch.device) -> DeviceFacts:
    """Those of the device of a tensor, which has an index."""
    if device.type != "cuda":
        return DeviceFacts(None, _NO_DEVICE_PROCESSORS)
    return _of_gpu(device.index)


@cache
def _of_gpu(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    if not architecture.startswith("gfx"):  # NVIDIA's
        architecture = f"sm_{properties.major}{properties.minor}"
    return DeviceFacts(architecture, properties.multi_processor_count)
