"""sdist and wheel: all of the package, under kvferry/, its licence, and nothing else.

Built without a compiler here; ``tests/system/test_installed.py`` compiles, installs and runs.
"""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.house.distributions import NO_COMPILER, Installed, build_sdist, build_wheel, run
from tests.house.source import ROOMS, ROOT, package_files
from tests.house.test_structure import PYPROJECT

DATA = {".cpp", ".h", ".jinja", ".json", ".proto", ".pyi", ".yaml"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that it holds what a wheel needs."""
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"), NO_COMPILER)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_every_file_of_the_package_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"kvferry/{path.relative_to(ROOT)}" for path in package_files()}
    python = {name for name in names if name.endswith(".py")}
    assert python == expected | {"kvferry/__init__.py"}
    data = {
        f"kvferry/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in DATA
    }
    assert data | {"kvferry/py.typed"} <= set(names)
    assert any(name.startswith("kvferry/kernels/reference/") for name in names)
    assert len(names) == len(set(names))


def test_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"kvferry-{PYPROJECT['project']['version']}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"kvferry/", info}
    assert [name for name in names if "tests" in name.split("/")] == []


def test_wheel_says_what_it_is(wheel: Path) -> None:
    project = PYPROJECT["project"]
    said = metadata(wheel)
    assert wheel.name.startswith(f"kvferry-{project['version']}-cp")
    assert (said["Name"], said["Version"]) == ("kvferry", project["version"])
    assert said["Summary"] == project["description"]
    assert said["Requires-Python"] == project["requires-python"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert set(said.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (entry,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "kvferry = kvferry.cluster.cli:main" in archive.read(entry).decode()


def test_neither_names_a_path_of_the_machine_it_was_built_on(wheel: Path, sdist: Path) -> None:
    there = [str(path).encode() for path in (ROOT, Path.home(), sdist.parent.parent)]
    there = [path for path in there if len(path) > 1]
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as source:
        for member in source.getmembers():
            file = source.extractfile(member) if member.isfile() else None
            if file is not None:
                contents[member.name] = file.read()
    found = [name for name, text in contents.items() for path in there if path in text]
    assert found == []


def test_sdist_holds_licence_and_sources_and_no_test(sdist: Path) -> None:
    with tarfile.open(sdist) as source:
        names = [name.partition("/")[2] for name in source.getnames()]
        links = [member.name for member in source.getmembers() if member.issym()]
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "PKG-INFO"} <= set(names)
    assert re.fullmatch(
        rf"kvferry-{re.escape(PYPROJECT['project']['version'])}\.tar\.gz", sdist.name
    )
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels/cpu/src").iterdir()}
    assert kernels <= set(names)
    assert [name for name in names if name.split("/")[0] in ("tests", "docs", "build")] == []
    assert links == []  # the links of the import root are folders here


def test_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path / "venv")
    installed.install(wheel)
    code = (
        "import kvferry.kernels.reference, kvferry.protos, kvferry.engine.request\n"
        "print(kvferry.__file__, kvferry.engine.request.__file__)"
    )
    said = run(installed.command("python"), "-c", code, cwd=tmp_path).stdout
    assert all(path.startswith(str(installed.site)) for path in said.split())
    version = run(installed.command("kvferry"), "--version", cwd=tmp_path).stdout.strip()
    assert version == f"kvferry {PYPROJECT['project']['version']}"
