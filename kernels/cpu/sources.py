"""What the compiled extension is made of: its sources, their digest, and the flags of each build.

Read by ``setup.py`` before anything is installed, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

EXTENSION = "kvferry.kernels.cpu._kernels"
MODULE_SOURCES = ("module.cpp", "isa.cpp")
"""Compiled once, with a macro for each instruction set that is built."""
KERNEL_SOURCE = "kernels.cpp"
"""Compiled once per instruction set."""
LINEAR_SOURCE = "linear.cpp"
"""Compiled once per instruction set, and once for each that only linears have use for."""

COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors wider than the baseline's registers are never passed between builds
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    *_AVX2,
    "-mprefer-vector-width=512",
)
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")

ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": _AVX512, "avx2": _AVX2, "baseline": ()},
    "aarch64": {"neon": ()},
}
"""Machine, then instruction set, widest first; the C++ says what a processor must have for each."""

LINEAR_ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        "avx512_bf16": _AVX512_BF16,
        "avx2_vnni": (*_AVX2, "-mavxvnni"),
    },
}
"""Those that only linears have use for: dot products of bfloat16 and int8."""

_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}


def isa_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """The builds for a machine as ``platform.machine()`` names it; {} where there are none."""
    return ISA_FLAGS.get(_ALIASES.get(machine, machine), {})


def linear_isa_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """The builds of the linears for a machine: those of ``isa_flags`` and more."""
    return LINEAR_ISA_FLAGS.get(_ALIASES.get(machine, machine), {}) | isa_flags(machine)


def source_files(folder: Path) -> list[Path]:
    """The C++ files in ``folder``, the directory of this package."""
    return sorted(path for path in (folder / "src").glob("*") if path.suffix in {".cpp", ".h"})


def sources_digest(folder: Path) -> str | None:
    """A digest of the C++ files and of this one; None where the sources are not there."""
    files = source_files(folder)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in [*files, folder / "sources.py"]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
