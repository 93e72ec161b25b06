"""Where the repository's files lie, for the tests that read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "kernels": 0,
    "kv_cache": 0,
    "protos": 0,
    "engine": 1,
    "kv_transfer": 1,
    "worker": 2,
    "prefill_worker": 3,
    "decode_worker": 3,
    "cluster": 4,
}
ROOMS = tuple(FLOORS)

_NOT_SOURCE = {"build", "dist", "node_modules", "__pycache__"}
_HIDDEN_SOURCE = {".ci", ".github"}


def package_files() -> list[Path]:
    """Every Python file of the package, found through the rooms at the top."""
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def benchmark_files() -> list[Path]:
    """Every Python file of ``benchmarks``, which stands beside the package."""
    return sorted((ROOT / "benchmarks").rglob("*.py"))


def is_generated(path: Path) -> bool:
    """Whether protoc wrote the file."""
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def text_files() -> Iterator[Path]:
    """Every readable file of the repository, without environments, caches and build outputs."""
    for folder, subfolders, names in os.walk(ROOT):  # does not follow links
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _NOT_SOURCE
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in _HIDDEN_SOURCE)
        ]
        for name in names:
            path = Path(folder, name)
            if b"\0" not in path.read_bytes()[:8192]:
                yield path
