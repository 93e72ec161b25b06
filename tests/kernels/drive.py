"""Builds the driver of the kernels, the C++ in ``driver/``, for one instruction set.

It runs every kernel that the instruction set has over random shapes, in memory of exactly the size
that is needed, and compares what comes out with double precision. ``make sanitize`` and
``make neon`` build and run it.
"""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.house.source import ROOT

SOURCES = ROOT / "kernels" / "cpu" / "src"
BUILDS = runpy.run_path(str(ROOT / "kernels" / "cpu" / "sources.py"))
"""Read as ``setup.py`` reads it: importing it would want the extension."""

DRIVER = Path(__file__).with_name("driver")
SETTINGS = {"OMP_WAIT_POLICY": "passive"}
"""Of the environment it runs in: threads that spin for their share keep each other waiting."""


def build(
    isa: str, machine: str, folder: Path, *, compiler: str = "c++", extra: Sequence[str] = ()
) -> Path:
    """The program for one instruction set of a machine, made in ``folder``.

    Args:
        isa: the instruction set; its builds and flags are those of ``sources.py``.
        machine: as ``platform.machine()`` names it.
        folder: where objects and the program go.
        compiler: the C++ compiler.
        extra: flags behind those of the build.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    files = [DRIVER / "main.cpp", DRIVER / "linear.cpp", SOURCES / BUILDS["LINEAR_SOURCE"]]
    if isa in BUILDS["isa_flags"](machine):
        files += [DRIVER / "layers.cpp", DRIVER / "attention.cpp"]
        files.append(SOURCES / BUILDS["KERNEL_SOURCE"])
    flags = [*BUILDS["COMMON_FLAGS"], *BUILDS["linear_isa_flags"](machine)[isa], *extra]
    flags += [f"-I{SOURCES}", f"-DKVFERRY_ISA={isa}"]

    def compile_one(file: Path) -> str:
        target = str(folder / f"{isa}-{file.parent.name}-{file.stem}.o")
        subprocess.run([compiler, *flags, "-c", str(file), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, files))
    program = folder / isa
    subprocess.run([compiler, *flags, *objects, "-o", str(program)], check=True)
    return program


def run(command: Sequence[str]) -> int:
    """The exit status of a program, which is 0 if every kernel is sound."""
    return subprocess.run(command, env=os.environ | SETTINGS, check=False).returncode
