"""``make sanitize``: every kernel, on every instruction set of this machine, under AddressSanitizer
and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path

from kvferry.kernels import cpu
from tests.kernels import drive

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")


def run(isa: str, folder: Path) -> int:
    """Build and run the driver for one instruction set; its exit status."""
    return drive.run([str(drive.build(isa, platform.machine(), folder, extra=SANITIZERS))])


def main() -> int:
    """Exit status 0 if all of them are sound."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = [run(isa, Path(folder)) for isa in cpu.isas()]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
