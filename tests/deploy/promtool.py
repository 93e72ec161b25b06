"""Prometheus's promtool, where it is installed; under KVFERRY_REQUIRE_PROMTOOL=1 it must be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REQUIRED = "KVFERRY_REQUIRE_PROMTOOL"


def promtool(*arguments: str, cwd: Path, stdin: bytes | None = None) -> str:
    """What promtool says; fails where it finds fault, skips where there is none."""
    command = shutil.which("promtool")
    if command is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but promtool is not installed: .ci/get-promtool FOLDER")
        pytest.skip("promtool is not installed")
    ran = subprocess.run(
        [command, *arguments], cwd=cwd, input=stdin, capture_output=True, check=False, timeout=120
    )
    said = (ran.stdout + ran.stderr).decode()
    assert ran.returncode == 0, said
    return said
