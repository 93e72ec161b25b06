"""Building and installing KVFerry's sdist and wheel, away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from tests.house.source import ROOMS, ROOT

NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}

# The repository itself must not be what is found.
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME")


def run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that must succeed, and what it has said."""
    ours = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**ours, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def build_sdist(folder: Path) -> Path:
    """The sdist, from a copy of the tree, so that the build leaves nothing behind."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("kvferry", *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    built = folder / "sdist"
    command = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", built, tree)
    run(*command, cwd=folder)
    shutil.rmtree(tree)
    (sdist,) = built.iterdir()
    return sdist


def build_wheel(sdist: Path, folder: Path, environment: Mapping[str, str] | None = None) -> Path:
    """A wheel, from the sdist."""
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*command, "--wheel-dir", folder, sdist, cwd=folder, environment=environment)
    (wheel,) = folder.glob("kvferry-*.whl")
    return wheel


class Installed:
    """A virtual environment of its own that sees the packages of ours, but not our KVFerry.

    What a ``.pth`` file adds to the path is searched for packages; ``.pth`` files in there, such as
    that of an editable installation, are not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        (self.site,) = folder.glob("lib/python3.*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (self.site / "ours.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")

    def command(self, name: str) -> Path:
        """A command of the environment."""
        return self.folder / "bin" / name

    def install(self, distribution: Path, environment: Mapping[str, str] | None = None) -> None:
        """Install a wheel or an sdist, without dependencies."""
        pip = (sys.executable, "-m", "pip", "--python", self.command("python"), "install")
        flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        run(*pip, *flags, distribution, cwd=self.folder, environment=environment)
