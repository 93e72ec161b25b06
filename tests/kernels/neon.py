"""``make neon``: the kernels of aarch64, compiled for it on another machine and run under qemu.

With the flags of an installation, so that what runs is what would be shipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernels import drive

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PROCESSOR = "cortex-a57"
"""The first generation of aarch64: an instruction of a later one is refused."""


def missing() -> str | None:
    """What to install, in one line; None where everything is there."""
    lacking = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if not lacking:
        return None
    return (
        f"make neon needs {' and '.join(lacking)}: install the packages g++-aarch64-linux-gnu, "
        "libc6-dev-arm64-cross and qemu-user (their names in Debian and Ubuntu)"
    )


def libraries() -> Path:
    """The folder that is the root of aarch64's shared libraries."""
    command = [COMPILER, "-print-file-name=ld-linux-aarch64.so.1"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return Path(os.path.abspath(found)).parents[1]  # .../lib/ld-linux-aarch64.so.1


def main() -> int:
    """Exit status 0 if every kernel is sound, 2 if a tool is missing."""
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        program = drive.build("neon", "aarch64", Path(folder), compiler=COMPILER)
        return drive.run([EMULATOR, "-cpu", PROCESSOR, "-L", str(libraries()), str(program)])


if __name__ == "__main__":
    sys.exit(main())
