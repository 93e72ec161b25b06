"""The import root, the names and the standing files are as the rest of the project expects."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.house.source import (
    ROOMS,
    ROOT,
    benchmark_files,
    is_generated,
    package_files,
    text_files,
)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("room", ROOMS)
def test_import_root_holds_a_relative_link_to_each_room(room: str) -> None:
    link = ROOT / "kvferry" / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{room}"
    assert link.resolve() == (ROOT / room).resolve()
    assert (ROOT / room).is_dir()


def test_import_root_holds_nothing_else() -> None:
    names = {path.name for path in (ROOT / "kvferry").iterdir()} - {"__pycache__"}
    assert names == {*ROOMS, "__init__.py", "py.typed"}


def test_import_root_holds_no_code() -> None:
    source = (ROOT / "kvferry" / "__init__.py").read_text(encoding="utf-8")
    assert re.fullmatch(r'""".*?"""\s*', source, re.DOTALL)


def test_kernels_is_a_namespace_and_every_other_room_a_package() -> None:
    without = [room for room in ROOMS if not (ROOT / room / "__init__.py").exists()]
    assert without == ["kernels"]


def test_transformers_imports_from_the_repository_root() -> None:
    """It imports a package named ``kernels`` where there is one; ours must not be taken for it."""
    code = (
        "import importlib.util, transformers\n"
        "from transformers import AutoConfig\n"
        "import kvferry.kernels as ours\n"
        "print(ours.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "None"


def test_linter_bans_the_bare_name_of_every_room() -> None:
    banned = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(ROOMS)


@pytest.mark.parametrize("statement", ["import kernels", "from cluster import cli"])
def test_linter_finds_a_planted_bare_import(statement: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename=engine/x.py", "-"],
        cwd=ROOT,
        input=statement + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "TID251" in result.stdout


def test_version_stands_in_pyproject_only() -> None:
    version = PYPROJECT["project"]["version"]
    repeated = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if re.search(rf"""["']{re.escape(version)}["']""", path.read_text(encoding="utf-8"))
    ]
    assert repeated == []


def test_every_direct_dependency_is_pinned() -> None:
    def name(requirement: str) -> str:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None
        return match[0].lower()

    project = PYPROJECT["project"]
    wanted = {name(line) for line in project["dependencies"]}
    for extra in project["optional-dependencies"].values():
        wanted |= {name(line) for line in extra}
    wanted |= {name(line) for line in PYPROJECT["build-system"]["requires"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name(line) for line in lines if "==" in line}
    assert wanted - {"kvferry"} == pinned


def test_changelog_has_an_unreleased_section() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changelog, re.MULTILINE)


def test_readme_begins_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:8]
    assert [line.split()[:2] for line in head if line.startswith("make ")] == [
        ["make", "demo"],
        ["make", "test"],
    ]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs"]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    pages = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    broken = [
        f"{source.relative_to(ROOT)}: {target}"
        for source in pages
        for target in re.findall(r"\]\(([^)#\s]+)", source.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target) and not (source.parent / target).exists()
    ]
    assert broken == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    # in parts, so that this file does not find itself
    folders = "|".join(("home/[a-z]", "root/", "Users/", "work/"))
    pattern = re.compile(rf"(?<![\w./{{}}$-])/(?:{folders})")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_files_of_the_package_fit_in_the_head() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in (*package_files(), *benchmark_files())
        if not is_generated(path)
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert too_long == {}, "look for the second idea in these files"
