"""docs/http.md names every field, route and code that the door knows, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.errors import STATUS
from kvferry.cluster.http_door import bodies
from kvferry.cluster.http_door.failures import BadHttp, failure
from tests.stack import Stack

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
KINDS = (bodies.CompletionBody, bodies.ChatBody, bodies.TokenizeBody, bodies.DetokenizeBody)


def section(title: str) -> str:
    """A section of the page."""
    return re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_every_field_has_its_row() -> None:
    fields = {name for kind in KINDS for name in kind.model_fields}
    assert first_cells(section("Fields")) == fields


@pytest.mark.parametrize("name", sorted(bodies.NEUTRAL))
def test_what_is_taken_in_one_value_only_is_named(name: str) -> None:
    assert f"`{name}`" in section("Fields").split("Some fields")[1]


def test_every_route_is_named(stack: Stack) -> None:
    server: Any = stack.http_server
    routes = {
        f"{method} {route.path.replace('{name:path}', 'NAME')}"
        for route in server._server.config.app.routes
        for method in route.methods
    }
    assert first_cells(section("Routes")) == routes


def test_every_code_is_named_with_its_status() -> None:
    rows = [line.split("|") for line in section("Errors").splitlines() if line.startswith("| ")]
    named = {
        (int(status), code)
        for row in rows
        for status in re.findall(r"\d{3}", row[1])
        for code in re.findall(r"`(\w+)`", row[2])
    }
    # Of a row with several statuses each code has one.
    classes = [cls for cls in STATUS if STATUS[cls].http not in (401, 403, 504)]
    for cls in [*classes, *BadHttp.__subclasses__()]:
        told = failure(cls("x"))
        code = told.body["error"]["code"]
        if cls.__name__ != "UnknownRequest":  # of no route here
            assert (told.status, code) in named, cls
