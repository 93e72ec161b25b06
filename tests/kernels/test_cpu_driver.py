"""The driver of ``make sanitize`` and ``make neon`` compiles, and finds the kernels sound here."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.kernels import drive

ISAS = tuple(drive.BUILDS["isa_flags"](platform.machine()))


@pytest.mark.skipif(not (ISAS and shutil.which("c++")), reason="nothing can be compiled here")
def test_the_kernels_are_sound_beside_double_precision(tmp_path: Path) -> None:
    isa = ISAS[-1]  # every processor has it, and it compiles fastest
    program = drive.build(isa, platform.machine(), tmp_path, extra=["-O0"])
    assert drive.run([str(program), "7"]) == 0
