"""``make sanitize``: every kernel, on every instruction set of this machine, under AddressSanitizer
and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry.kernels import cpu
from kvferry.kernels.cpu.sources import (
    COMMON_FLAGS,
    KERNEL_SOURCE,
    LINEAR_SOURCE,
    isa_flags,
    linear_isa_flags,
)
from tests.house.source import ROOT

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")


def run(isa: str, kernels: str, driver: str, folder: Path) -> int:
    """Build and run a driver for one instruction set; its exit status."""
    source = ROOT / "kernels" / "cpu" / "src"
    program = folder / f"{isa}-{driver}"
    flags = [*COMMON_FLAGS, *linear_isa_flags(platform.machine())[isa], *SANITIZERS]
    files = [str(source / kernels), str(Path(__file__).with_name(driver))]
    compiler = ["c++", *flags, f"-I{source}", f"-DKVFERRY_ISA={isa}", *files, "-o", str(program)]
    subprocess.run(compiler, check=True)
    return subprocess.run([str(program)], check=False).returncode


def main() -> int:
    """Exit status 0 if all of them are sound."""
    machine = platform.machine()
    jobs = [(isa, KERNEL_SOURCE, "sanitize.cpp") for isa in cpu.isas() if isa in isa_flags(machine)]
    jobs += [(isa, LINEAR_SOURCE, "sanitize_linear.cpp") for isa in cpu.isas()]
    with tempfile.TemporaryDirectory() as folder:
        return max(run(*job, Path(folder)) for job in jobs)


if __name__ == "__main__":
    sys.exit(main())
