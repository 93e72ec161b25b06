"""The rules of who may import whom, applied to one file's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from tests.house.source import FLOORS, ROOMS

# Other people's packages that belong to some rooms only. Ray and sockets stay in the shells,
# protobuf stays at the gRPC door, and what decides about blocks never touches their bytes.
ONLY_IN = {
    "ray": {"prefill_worker", "decode_worker", "cluster"},
    "grpc": {"cluster", "protos"},
    "grpc_health": {"cluster", "protos"},
    "google": {"cluster", "protos"},
    "aiohttp": {"cluster"},
    "zmq": {"worker", "prefill_worker", "decode_worker", "cluster"},
    "pydantic": {"cluster"},
    "fastapi": {"cluster"},
    "uvicorn": {"cluster"},
    "torch": set(ROOMS) - {"kv_cache", "protos"},
    "transformers": set(),
    "pickle": set(),
    # of the repository, but not of the package
    "benchmarks": set(),
    "tests": set(),
}


class Import(NamedTuple):
    """One module named by an import statement, as an absolute dotted name."""

    line: int
    module: str


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a file of ``package``, at any depth, relative ones resolved.

    ``importlib.import_module("...")`` with a literal counts too.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")[: len(package.split(".")) - (level - 1)] if level else []
                base = ".".join([*parts, *([module] if module else [])])
                # `from kvferry import engine` names kvferry.engine
                yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module" | "__import__")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(node.lineno, module)


def violations(source: str, package: str) -> Iterator[str]:
    """``LINE: reason`` for each import in a file of ``package`` (``kvferry.ROOM...``)."""
    room = package.split(".")[1]
    for line, module in imports_of(source, package):
        top, _, below = module.partition(".")
        target = below.partition(".")[0]
        if top in ROOMS:
            yield f"{line}: imports {module}; the name is kvferry.{module}"
        elif room not in ONLY_IN.get(top, {room}):
            rooms = ", ".join(sorted(ONLY_IN[top])) or "no room"
            yield f"{line}: imports {top}, which belongs to: {rooms}"
        elif top == "kvferry" and target in FLOORS and target != room:
            if target == "protos" and room != "cluster":
                yield f"{line}: imports {module}; protobuf stays in cluster"
            elif FLOORS[target] == FLOORS[room]:
                yield f"{line}: imports {module}, a sibling on floor {FLOORS[room]}"
            elif FLOORS[target] > FLOORS[room]:
                yield (
                    f"{line}: imports {module} on floor {FLOORS[target]} "
                    f"from {room} on floor {FLOORS[room]}"
                )
