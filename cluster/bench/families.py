"""The kernel families that can be loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from kvferry.engine.models.llama import Kernels

NAMES = ("reference", "cpu")


class AllKernels(Kernels, Protocol):
    """What a family has beside what the models call: the parts of its fused kernels."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding."""
        ...

    def write_kv(
        self,
        pool: torch.Tensor,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values in the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """One implementation of every kernel; ``isa`` is the instruction set in force, if it has one.

    Attributes:
        name: the folder under ``kernels/``.
        kernels: its functions.
    """

    name: str
    isa: str | None
    kernels: AllKernels


def families(names: tuple[str, ...] = NAMES) -> list[Family]:
    """Those of ``names`` that are there and can be loaded, in this order."""
    found = []
    for name in names:
        try:
            module = import_module(f"kvferry.kernels.{name}")
        except ImportError:  # not built on this machine
            continue
        isa = module.isa() if hasattr(module, "isa") else None
        found.append(Family(name, isa, cast(AllKernels, module)))
    return found
