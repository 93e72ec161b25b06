"""The compiled extension: loaded if it fits its sources, and the instruction set in force.

Knows no tensors. One instruction set is in force per process.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.kernels.cpu.errors import ExtensionMissing, ExtensionStale, UnknownIsa
from kvferry.kernels.cpu.sources import EXTENSION, sources_digest

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["isa", "isas", "load_extension", "native", "select_isa"]

REBUILD = "build it with `make ext` (it needs a C++ compiler), or install KVFerry again"


def load_extension(folder: Path) -> ModuleType:
    """The extension of the package in ``folder``.

    Raises ExtensionMissing, or ExtensionStale if the sources lie there and are others than those it
    was built from.
    """
    try:
        extension = import_module(EXTENSION)
    except ImportError as error:
        raise ExtensionMissing(
            f"the compiled kernels cannot be loaded: {error}; {REBUILD}"
        ) from error
    wanted = sources_digest(folder)
    if wanted not in (None, extension.SOURCES):
        raise ExtensionStale(
            f"the compiled kernels were built from sources {extension.SOURCES}, but those in "
            f"{folder} are {wanted}; {REBUILD}"
        )
    return extension


if TYPE_CHECKING:
    from kvferry.kernels.cpu import _kernels as native
else:
    native = load_extension(Path(__file__).parent)


def isas() -> tuple[str, ...]:
    """The instruction sets that were built and that this processor has, widest first."""
    return tuple(native.isas())


def isa() -> str:
    """The one in force: at first the widest."""
    return native.isa()


def select_isa(name: str | None) -> str:
    """Put an instruction set in force, None the widest; its name. Raises UnknownIsa.

    Not while a kernel runs.
    """
    wanted = isas()[0] if name is None else name
    if not native.select_isa(wanted):
        raise UnknownIsa(f"instruction set {wanted!r}, wanted one of {', '.join(isas())}")
    return wanted
