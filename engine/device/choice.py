"""Which device a worker computes on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.kv_cache.errors import KVFerryError

AUTO, CPU, CUDA = "auto", "cpu", "cuda"


class DeviceUnavailable(KVFerryError):
    """The device that was asked for is not there; says what to change."""

    exit_code = 2


def choose_device(wanted: str, role: str, has_cuda: Callable[[], bool] | None = None) -> str:
    """``cpu`` or ``cuda``: what is asked for, or for ``auto`` a GPU where there is one.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.
        role: whose section of the configuration the error names.
        has_cuda: whether torch can use a GPU here; None asks it.

    Raises DeviceUnavailable.
    """
    if wanted == CPU:
        return CPU
    if (torch.cuda.is_available if has_cuda is None else has_cuda)():
        return CUDA
    if wanted == AUTO:
        return CPU
    build = torch.version.cuda
    why = "is built without CUDA" if build is None else f"(for CUDA {build}) finds no GPU"
    raise DeviceUnavailable(
        f"{role}.device is cuda, or auto where Ray has a GPU, but torch {torch.__version__} {why} "
        f"here: set {role}.device to cpu, or install a torch for CUDA on a host with a GPU"
    )
