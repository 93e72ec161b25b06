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
from kvferry.kernels.cpu.sources import COMMON_FLAGS, KERNEL_SOURCE, isa_flags
from tests.house.source import ROOT

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")


def run(isa: str, folder: Path) -> int:
    """Build and run the driver for one instruction set; its exit status."""
    source = ROOT / "kernels" / "cpu" / "src"
    program = folder / isa
    flags = [*COMMON_FLAGS, *isa_flags(platform.machine())[isa], *SANITIZERS]
    files = [str(source / KERNEL_SOURCE), str(Path(__file__).with_suffix(".cpp"))]
    compiler = ["c++", *flags, f"-I{source}", f"-DKVFERRY_ISA={isa}", *files, "-o", str(program)]
    subprocess.run(compiler, check=True)
    return subprocess.run([str(program)], check=False).returncode


def main() -> int:
    """Exit status 0 if all of them are sound."""
    with tempfile.TemporaryDirectory() as folder:
        return max(run(isa, Path(folder)) for isa in cpu.isas())


if __name__ == "__main__":
    sys.exit(main())
