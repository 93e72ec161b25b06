"""Imports go down only, siblings do not import each other, and each name is loaded once."""

from __future__ import annotations

import pytest

from tests.house.imports import violations
from tests.house.source import ROOT, is_generated, package_files


def test_imports_go_down_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in package_files()
        if not is_generated(path)
        for violation in violations(
            path.read_text(encoding="utf-8"),
            ".".join(["kvferry", *path.relative_to(ROOT).parent.parts]),
        )
    ]
    assert not found, "\n".join(["imports that break the floors:", *found])


@pytest.mark.parametrize(
    ("package", "source", "reason"),
    [
        ("kvferry.engine", "import kvferry.worker", "floor 2 from engine on floor 1"),
        ("kvferry.engine", "from kvferry.cluster.policy import Policy", "on floor 4"),
        ("kvferry.engine.models", "from kvferry import kv_transfer", "a sibling on floor 1"),
        ("kvferry.engine.models", "from ...cluster import router", "on floor 4"),
        ("kvferry.prefill_worker", "from kvferry.decode_worker import role", "a sibling"),
        ("kvferry.kv_cache", "import kvferry.kernels.reference", "a sibling on floor 0"),
        ("kvferry.kv_cache", "def f():\n    import torch.nn", "2: imports torch, which belongs"),
        ("kvferry.engine", "if TYPE_CHECKING:\n    import ray", "2: imports ray"),
        ("kvferry.worker", "from kvferry.protos import kvferry_pb2", "protobuf stays in cluster"),
        ("kvferry.worker", "import grpc.aio", "imports grpc"),
        ("kvferry.worker", "import pickle", "belongs to: no room"),
        ("kvferry.cluster", "from benchmarks.peers import load", "belongs to: no room"),
        ("kvferry.cluster", "import tests.stack", "belongs to: no room"),
        ("kvferry.engine", "import kernels", "the name is kvferry.kernels"),
        ("kvferry.cluster", "from engine.request import RequestSpec", "the name is kvferry.engine"),
        ("kvferry.cluster", "import os, worker", "the name is kvferry.worker"),
        ("kvferry.engine", "importlib.import_module('kvferry.cluster.cli')", "on floor 4"),
    ],
)
def test_planted_violation_is_named(package: str, source: str, reason: str) -> None:
    assert any(reason in violation for violation in violations(source, package))


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("kvferry.cluster", "from kvferry.decode_worker.actor import DecodeActor\nimport ray"),
        ("kvferry.engine.models", "from . import config\nfrom ..request import RequestSpec"),
        ("kvferry.engine", "from kvferry.kernels.reference import attention\nimport torch"),
        ("kvferry.worker", "import kvferry\nimport zmq\nfrom kvferry.engine import request"),
        ("kvferry.engine", "cluster = 1\nfrom dataclasses import dataclass"),
    ],
)
def test_import_that_goes_down_is_allowed(package: str, source: str) -> None:
    assert list(violations(source, package)) == []
