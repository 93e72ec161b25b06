"""Checks a document against the packaged schemas."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
from referencing import Registry, Resource

_SCHEMAS = {
    file.name: json.loads(file.read_text(encoding="utf-8"))
    for file in resources.files("kvferry.cluster").joinpath("schemas").iterdir()
    if file.name.endswith(".json")
}
_REGISTRY: Any = Registry().with_resources(
    [(name, Resource.from_contents(schema)) for name, schema in _SCHEMAS.items()]
)


def names() -> list[str]:
    return sorted(name.removesuffix(".json") for name in _SCHEMAS)


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = _SCHEMAS[f"{name}.json"]
    return loaded


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError unless the document keeps the schema that it names."""
    name = document["schema"].removeprefix("kvferry.").removesuffix("/1")
    validator = jsonschema.Draft202012Validator(schema(name), registry=_REGISTRY)
    validator.validate(document)


def parse(printed: str) -> dict[str, Any]:
    """The one document on a command's standard output, checked."""
    lines = printed.splitlines()
    assert len(lines) == 1, printed
    document: dict[str, Any] = json.loads(lines[0])
    check(document)
    return document
