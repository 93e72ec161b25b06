"""The list of traps, ``tests/traps.toml``, and whether the tests it names exist."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_BUILT = "not built yet"


def read_traps(root: Path) -> list[dict[str, Any]]:
    """The entries of the list, in the file's order."""
    entries = tomllib.loads((root / "tests" / "traps.toml").read_text(encoding="utf-8"))["trap"]
    assert isinstance(entries, list)
    return entries


@functools.cache
def tests_of(path: Path) -> frozenset[str]:
    """Names under which pytest knows the tests of a file: ``test_x``, ``TestX``, ``TestX::test_y``.

    ``TestX = Machine.TestCase``, as hypothesis' state machines are collected, counts too.
    """
    return frozenset(_collected(ast.parse(path.read_text(encoding="utf-8"))))


def _collected(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name, body=body):
                yield name
                for item in body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield f"{name}::{item.name}"
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                yield name


def problems(entry: dict[str, Any], root: Path) -> Iterator[str]:
    """What is wrong with one entry, each as a sentence that begins with its number."""
    number = entry.get("number")
    known = {"number", "property", "tests", "later", "status"}
    for key in sorted(set(entry) - known):
        yield f"{number}: unknown key {key}"
    if not str(entry.get("property", "")).strip():
        yield f"{number}: has no property"
    tests = entry.get("tests", [])
    if bool(tests) == (entry.get("status") == NOT_BUILT):
        yield f'{number}: wanted either tests or status = "{NOT_BUILT}"'
    for test in tests:
        file, _, name = test.partition("::")
        name = name.partition("[")[0]
        last = name.rpartition("::")[2]
        if not (root / file).is_file():
            yield f"{number}: {test}: there is no such file"
        elif not last.startswith(("test_", "Test")) or name not in tests_of(root / file):
            yield f"{number}: {test}: the file has no such test"
