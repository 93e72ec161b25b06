"""Which family of kernels computes, and on which instruction set.

Knows the families by name; does not know what asked for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from kvferry.engine.models.llama import Kernels
from kvferry.kernels import reference
from kvferry.kv_cache.errors import KVFerryError

AUTO = "auto"
REFERENCE, CPU, TRITON = "reference", "cpu", "triton"
TRITON_FAMILY = "kvferry.kernels.triton"


class KernelsUnavailable(KVFerryError):
    """The kernels or the instruction set that were asked for cannot be had; says why."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ChosenKernels:
    """A family, the names it is reported under, and what start-up should say, if anything."""

    kernels: Kernels
    implementation: str
    isa: str | None = None
    warning: str | None = None


def check_pool_dtype(chosen: ChosenKernels, kv_dtype: str) -> None:
    """That a family takes pools of this element type. Raises KernelsUnavailable."""
    if chosen.implementation == CPU and kv_dtype == "float8_e4m3fn":
        raise KernelsUnavailable(
            "cache.kv_dtype is float8_e4m3fn, which the compiled kernels for CPUs do not read: "
            "choose int8, as small, or debug.kernels reference"
        )


def choose_kernels(wanted: str = AUTO, isa: str = AUTO) -> ChosenKernels:
    """The family of kernels for this process, computing on the CPU, its instruction set in force.

    Args:
        wanted: ``reference``, ``cpu``, or ``auto``: the compiled ones where they can be loaded.
        isa: an instruction set of the compiled ones, or ``auto``: the widest.

    Raises KernelsUnavailable.
    """
    if wanted == REFERENCE:
        return ChosenKernels(reference, REFERENCE)
    if wanted == TRITON:
        raise KernelsUnavailable(
            "kernels triton compute on a GPU, and this worker computes on the CPU: set its device "
            "to cuda, or debug.kernels to auto"
        )
    try:
        cpu = import_module("kvferry.kernels.cpu")
    except ImportError as error:
        if wanted == CPU or isa != AUTO:
            raise KernelsUnavailable(f"kernels {wanted}, instruction set {isa}: {error}") from error
        warning = f"{error}. Until then the reference kernels compute, which are slower"
        return ChosenKernels(reference, REFERENCE, warning=warning)
    try:
        active = cpu.select_isa(None if isa == AUTO else isa)
    except ValueError as error:
        raise KernelsUnavailable(f"kernels {wanted}: {error}") from error
    return ChosenKernels(cast(Kernels, cpu), CPU, active)


def choose_gpu_kernels(wanted: str, architecture: str) -> ChosenKernels:
    """The family of kernels for a worker that computes on a GPU.

    Args:
        wanted: ``reference``, ``triton``, or ``auto``, which is triton.
        architecture: the GPU's, for reports.

    Raises KernelsUnavailable.
    """
    if wanted == REFERENCE:
        return ChosenKernels(reference, REFERENCE, architecture)
    if wanted == CPU:
        raise KernelsUnavailable(
            "kernels cpu compute on the CPU, and this worker computes on a GPU: set debug.kernels "
            "to auto, or its device to cpu"
        )
    try:
        triton = import_module(TRITON_FAMILY)
    except ImportError as error:
        raise KernelsUnavailable(
            f"kernels {wanted} on a GPU: {error}. Install triton (it comes with torch for CUDA), "
            "or set debug.kernels to reference, which is far slower"
        ) from error
    return ChosenKernels(cast(Kernels, triton), TRITON, architecture)
