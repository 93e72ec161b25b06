"""When the compiled kernels are used, and what is said when they are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.kernel_choice import KernelsUnavailable, choose_kernels
from kvferry.kernels import reference
from tests.house.source import ROOT
from tests.kernels.families import compiled


@pytest.fixture
def cpu() -> Any:
    return compiled()


def test_auto_takes_the_compiled_kernels_on_the_widest_instruction_set(cpu: Any) -> None:
    chosen = choose_kernels()
    assert chosen.kernels == cpu
    assert (chosen.implementation, chosen.isa) == ("cpu", cpu.isas()[0])
    assert chosen.warning is None


def test_an_instruction_set_can_be_forced(cpu: Any) -> None:
    for isa in cpu.isas():
        assert choose_kernels("cpu", isa).isa == isa == cpu.isa()
    assert choose_kernels("cpu").isa == cpu.isas()[0]
    with pytest.raises(KernelsUnavailable, match="'mmx', wanted one of"):
        choose_kernels("auto", "mmx")


def test_the_reference_needs_no_extension() -> None:
    chosen = choose_kernels("reference")
    assert (chosen.kernels, chosen.implementation, chosen.isa) == (reference, "reference", None)


WITHOUT = """
import sys
sys.modules["kvferry.kernels.cpu._kernels"] = None  # as where it was not built
from kvferry.engine.kernel_choice import KernelsUnavailable, choose_kernels
chosen = choose_kernels()
print(chosen.implementation, chosen.isa)
print(chosen.warning)
for arguments in (("cpu",), ("auto", "avx2")):
    try:
        choose_kernels(*arguments)
    except KernelsUnavailable as error:
        print("refused:", error)
"""


def test_without_the_extension_the_reference_serves_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, warning, *refusals = done.stdout.splitlines()
    assert first == "reference None"
    assert "cannot be loaded" in warning and "make ext" in warning and "reference" in warning
    assert len(refusals) == 2 and all("make ext" in line for line in refusals)


def test_an_extension_older_than_its_sources_is_refused(cpu: Any, tmp_path: Path) -> None:
    package = ROOT / "kernels" / "cpu"
    copy = tmp_path / "cpu"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    load = cpu.extension.load_extension
    assert load(package) is load(copy)
    with (copy / "src" / "decode.h").open("a") as file:
        file.write("\n")
    with pytest.raises(cpu.ExtensionStale, match="make ext"):
        load(copy)
    shutil.rmtree(copy / "src")  # a wheel may come without them
    assert load(copy) is load(package)


def test_an_installation_without_a_compiler_goes_on(tmp_path: Path) -> None:
    """And with one warning, not a failure."""
    done = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "build_ext",
            f"--build-lib={tmp_path / 'lib'}",
            f"--build-temp={tmp_path / 'temp'}",
        ],
        cwd=ROOT,
        env={"PATH": "/nowhere", "CC": "no-compiler", "CXX": "no-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "building extension" in done.stderr and "failed" in done.stderr
    assert not list(tmp_path.rglob("*.so"))
