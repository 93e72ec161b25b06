"""Runs what needs a process of its own: the interpreter's tests, and compiling ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.kernels.triton.resources import SHARED_LIMIT

HERE = Path(__file__).parent
INTERPRETED = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
TARGETS = tuple(SHARED_LIMIT)

_NAMES = """
from kvferry.kernels.triton.variants import few
print(*(variant.name for variant in few(None)), sep="\\n")
"""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, from the repository's root."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parent.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    path = str(HERE / "interpreted" / name)
    done = run("-m", "pytest", "-q", "-x", "-n0", path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_the_page_has_a_row_for_every_variant_that_is_compiled_here() -> None:
    names = run("-c", _NAMES, TRITON_INTERPRET="0").stdout.splitlines()
    page = (HERE.parents[1] / "docs" / "triton.md").read_text(encoding="utf-8")
    assert len(names) >= 10
    assert [name for name in names if f"\n| {name} | " not in page] == []


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_ahead_of_time_without_spills(target: str, tmp_path: Path) -> None:
    command = ("-m", "kvferry.kernels.triton.ahead", "--target", target, "--json")
    done = run(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-6000:]
    rows = json.loads(done.stdout)
    assert 10 <= len(rows) <= 12
    for row in rows:
        assert row["registers"] > 0 and row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= SHARED_LIMIT[target], row
        if "attend" in row["kernel"] or "blocks" in row["kernel"]:  # bound by what they load
            assert row["load_bits"] == 128, row
        assert row["load_bits"] >= 16, row
