"""The kernel families that can be loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from kvferry.engine.models.llama import Kernels

NAMES = ("reference", "cpu")


@dataclass(frozen=True, slots=True)
class Family:
    """One implementation of every kernel; ``isa`` is the instruction set in force, if it has one.

    Attributes:
        name: the folder under ``kernels/``.
        kernels: its functions.
    """

    name: str
    isa: str | None
    kernels: Kernels


def families(names: tuple[str, ...] = NAMES) -> list[Family]:
    """Those of ``names`` that are there and can be loaded, in this order."""
    found = []
    for name in names:
        try:
            module = import_module(f"kvferry.kernels.{name}")
        except ImportError:  # not built on this machine
            continue
        isa = module.isa() if hasattr(module, "isa") else None
        found.append(Family(name, isa, cast(Kernels, module)))
    return found
