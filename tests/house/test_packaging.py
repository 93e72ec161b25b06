"""A built wheel holds the rooms under kvferry/ and imports without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.source import ROOMS, ROOT, package_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that the build leaves nothing behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("kvferry", *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(built), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return next(built.glob("kvferry-*.whl"))


def test_wheel_holds_every_file_of_the_package_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"kvferry/{path.relative_to(ROOT)}" for path in package_files()}
    python = {name for name in names if name.endswith(".py")}
    assert python == expected | {"kvferry/__init__.py"}
    data = {
        f"kvferry/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".cpp", ".h", ".json", ".proto", ".pyi", ".yaml"}
    }
    assert data | {"kvferry/py.typed"} <= set(names)
    assert any(name.startswith("kvferry/kernels/reference/") for name in names)
    assert len(names) == len(set(names))


def test_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import kvferry.kernels.reference, kvferry.protos, kvferry.engine.request\n"
        "print(kvferry.__file__, kvferry.engine.request.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert all(path.startswith(str(tmp_path)) for path in result.stdout.split())
