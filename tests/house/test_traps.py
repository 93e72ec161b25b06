"""Every known trap has an entry, and every entry names tests that exist, or says it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT
from tests.house.traps import NOT_BUILT, problems, read_traps

NUM_TRAPS = 46


def test_every_trap_is_listed_once_and_in_order() -> None:
    assert [entry["number"] for entry in read_traps(ROOT)] == list(range(1, NUM_TRAPS + 1))


def test_every_entry_names_tests_that_exist_or_says_it_has_none() -> None:
    found = [problem for entry in read_traps(ROOT) for problem in problems(entry, ROOT)]
    assert found == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one test file."""
    (tmp_path / "tests").mkdir()
    source = (
        "def test_a(): pass\n"
        "def helper(): pass\n"
        "class TestB:\n    def test_c(self): pass\n"
        "TestD = Machine.TestCase\n"
        "# def test_e(): pass\n"
    )
    (tmp_path / "tests" / "test_x.py").write_text(source)
    return tmp_path


@pytest.mark.parametrize("name", ["test_a", "test_a[1-x]", "TestB", "TestB::test_c", "TestD"])
def test_existing_test_is_accepted(tree: Path, name: str) -> None:
    entry = {"number": 1, "property": "p", "tests": [f"tests/test_x.py::{name}"]}
    assert list(problems(entry, tree)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tests": ["tests/test_x.py::test_e"]}, "no such test"),
        ({"tests": ["tests/test_x.py::helper"]}, "no such test"),
        ({"tests": ["tests/test_x.py"]}, "no such test"),
        ({"tests": ["tests/test_y.py::test_a"]}, "no such file"),
        ({"tests": []}, "wanted either"),
        ({"status": NOT_BUILT}, "wanted either"),
        ({"tests": [], "status": "soon"}, "wanted either"),
        ({"property": " "}, "has no property"),
        ({"note": "x"}, "unknown key note"),
    ],
)
def test_faulty_entry_is_named(tree: Path, change: dict[str, Any], problem: str) -> None:
    entry = {"number": 1, "property": "p", "tests": ["tests/test_x.py::test_a"], **change}
    assert any(problem in found for found in problems(entry, tree))
