"""One-line patches, applied to a copy of the package and run under the cache machine.

The source tree is never written. ``patches.toml`` is the list.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT

MOST_STEPS = 2000  # of the machine, within which a mutant must be caught
SEEDS = (0, 1, 2, 3)
ROOMS = ("engine", "kv_cache", "kv_transfer")
PATCHES = Path(__file__).with_name("patches.toml")


class Rotten(Exception):
    """The line that a mutant changes does not stand in its file, or not once; names the mutant."""


@dataclass(frozen=True)
class Mutant:
    """A patch: in ``file``, ``line`` (once; or the first after the text ``after``) is replaced.

    ``seed`` is the one to try first.
    """

    name: str
    fault: str
    file: str
    line: str
    becomes: str
    after: str = ""
    seed: int = 0

    def apply(self, source: str) -> str:
        """The file's text with the fault in it. Raises Rotten."""
        lines = source.splitlines(keepends=True)
        first = 0
        if self.after:
            marks = [number for number, text in enumerate(lines) if self.after in text]
            if len(marks) != 1:
                raise Rotten(
                    f"{self.name}: {self.after!r} stands {len(marks)} times in {self.file}"
                )
            first = marks[0] + 1
        places = [n for n, text in enumerate(lines) if n >= first and text.strip() == self.line]
        if not places or (len(places) > 1 and not self.after):
            raise Rotten(f"{self.name}: {self.line!r} stands {len(places)} times in {self.file}")
        text = lines[places[0]]
        lines[places[0]] = text.replace(self.line, self.becomes)
        return "".join(lines)


@dataclass(frozen=True)
class Outcome:
    """What the machine made of a copy: its steps, and the one in which it noticed a fault."""

    num_steps: int
    failed_at: int | None
    error: str
    seed: int


def read_mutants() -> list[Mutant]:
    """The list, in the file's order."""
    return [Mutant(**entry) for entry in tomllib.loads(PATCHES.read_text("utf-8"))["mutant"]]


def copy_package(target: Path, mutant: Mutant | None) -> None:
    """The rooms that the machine runs, as ``target/kvferry``, with the fault in them."""
    package = target / "kvferry"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "kvferry" / "__init__.py", package)
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    if mutant is not None:
        file = package / mutant.file
        file.write_text(mutant.apply(file.read_text("utf-8")), "utf-8")


def run_copy(target: Path, most_steps: int, seed: int) -> Outcome:
    """Run the machine over the copy in ``target``, in a process of its own."""
    command = [sys.executable, "-m", "tests.mutants.trial", str(most_steps), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        command,
        cwd=target,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(target), "the copy was not what ran"
    return Outcome(found["num_steps"], found["failed_at"], found["error"], seed)


def try_mutant(folder: Path, mutant: Mutant | None, most_steps: int, seed: int) -> Outcome:
    """Copy, patch, run."""
    copy_package(folder, mutant)
    return run_copy(folder, most_steps, seed)


def try_seeds(folder: Path, mutant: Mutant, most_steps: int = MOST_STEPS) -> Outcome:
    """Copy, patch, and run with one seed after the other until the fault is noticed."""
    copy_package(folder, mutant)
    for seed in (mutant.seed, *(seed for seed in SEEDS if seed != mutant.seed)):
        found = run_copy(folder, most_steps, seed)
        if found.failed_at is not None:
            break
    return found
