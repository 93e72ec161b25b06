"""The compiled kernels for tests, one instruction set at a time.

``KVFERRY_REQUIRE_EXT=1`` makes a missing extension a failure, not a skip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest


def compiled() -> Any:
    """``kvferry.kernels.cpu``; skips or fails without its extension."""
    try:
        return import_module("kvferry.kernels.cpu")
    except ImportError as error:
        if os.environ.get("KVFERRY_REQUIRE_EXT") == "1":
            pytest.fail(f"the compiled kernels are required: {error}")
        pytest.skip(str(error))


def _isas_here() -> tuple[str, ...]:
    try:
        return tuple(import_module("kvferry.kernels.cpu").isas())
    except ImportError:
        return ("no extension",)


LINEAR_ISAS = _isas_here()
"""Every instruction set of this machine."""

_OWN_LINEARS_ONLY = {"avx512_bf16", "avx2_vnni"}
ISAS = tuple(isa for isa in LINEAR_ISAS if isa not in _OWN_LINEARS_ONLY)
"""Those with builds of all kernels, not only of the linears."""


@contextmanager
def isa_in_force(isa: str) -> Iterator[Any]:
    """The compiled kernels on one instruction set."""
    cpu = compiled()
    before = cpu.isa()
    cpu.select_isa(isa)
    yield cpu
    cpu.select_isa(before)
