"""The Serve application on a fake cluster: its arguments, its health, its answer, its end.

``tests/system/test_ray_serve.py`` runs it under a real Serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from kvferry.cluster import ray_serve
from kvferry.cluster.config import Config, ConfigError
from kvferry.cluster.errors import NotReady, PortUnavailable
from tests.house.source import ROOT


class FakeCluster:
    grpc, http, metrics = "127.0.0.1:50051", None, "127.0.0.1:9400"
    ray_address, startup_s = "", 0.0

    def __init__(self, config: Config) -> None:
        self.config = config
        self.reasons: list[str] = []
        self.stops: list[float] = []

    def not_ready_reasons(self) -> list[str]:
        return self.reasons

    def stop(self, grace_s: float) -> None:
        self.stops.append(grace_s)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeCluster]]:
    """The clusters that have been started."""
    found: list[FakeCluster] = []

    def start(config: Config, progress: object, anew: bool) -> FakeCluster:
        assert anew  # a successor must not take up what its forerunner is about to end
        if config.server.grpc.endswith(":1"):
            raise PortUnavailable("taken")
        found.append(FakeCluster(config))
        return found[-1]

    monkeypatch.setattr(ray_serve, "start", start)
    yield found


def replica(**overrides: Any) -> ray_serve.KVFerryCluster:
    return ray_serve.KVFerryCluster(None, overrides, 0.0)


def test_it_starts_a_cluster_on_the_ray_that_it_runs_in(started: list[FakeCluster]) -> None:
    replica(**{"prefill.replicas": 2})
    (cluster,) = started
    assert cluster.config.ray.address == "auto"
    assert cluster.config.replicas().prefill == 2


def test_the_file_is_read_and_home_is_the_heads(
    started: list[FakeCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvferry.yaml").write_text("decode: {replicas: 3}")
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_serve.KVFerryCluster("~/kvferry.yaml", {"ray.address": "192.0.2.1:6379"}, 1.0)
    assert started[0].config.replicas().decode == 3
    assert started[0].config.ray.address == "192.0.2.1:6379"


def test_its_health_is_the_routers_readiness(started: list[FakeCluster]) -> None:
    app = replica()
    app.check_health()
    started[0].reasons = ["no decode worker"]
    with pytest.raises(NotReady, match="no decode worker"):
        app.check_health()
    started[0].reasons = []
    app.check_health()


def test_it_says_where_the_doors_are(started: list[FakeCluster]) -> None:
    app = replica()
    answer = app(object())
    assert answer.status_code == 200
    assert json.loads(bytes(answer.body)) == {
        "ready": True,
        "not_ready_reasons": [],
        "grpc": "127.0.0.1:50051",
        "http": None,
        "metrics": "127.0.0.1:9400",
    }
    started[0].reasons = ["no decode worker"]
    answer = app(object())
    assert answer.status_code == 503
    assert json.loads(bytes(answer.body))["not_ready_reasons"] == ["no decode worker"]


def test_its_end_is_the_clusters(started: list[FakeCluster]) -> None:
    app = replica()
    app.__del__()
    assert started[0].stops == [ray_serve.GRACE_S]


def test_a_start_that_fails_says_why_and_leaves_nothing_to_stop(
    started: list[FakeCluster],
) -> None:
    with pytest.raises(PortUnavailable):
        replica(**{"server.grpc": "127.0.0.1:1"})
    assert started == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"confg": "x"}, "args: got confg, wanted only config, overrides, patience"),
        ({"config": 1}, "args.config: got 1"),
        ({"overrides": ["x"]}, "args.overrides: got"),
        ({"patience": "soon"}, "args.patience: got 'soon'"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ray_serve.build(args)


def test_there_is_one_replica_on_the_head_with_time_to_stop() -> None:
    app = ray_serve.build({"config": "/etc/kvferry/kvferry.yaml"})
    deployment: Any = app._bound_deployment
    assert deployment.num_replicas == 1
    assert deployment.ray_actor_options["resources"] == ray_serve.HEAD_ONLY
    assert ray_serve.END_S > ray_serve.GRACE_S + 2 * 2.0
    assert deployment.init_args == ("/etc/kvferry/kvferry.yaml", {}, 60.0)


def serve_configurations() -> dict[str, str]:
    manifest = (ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text(encoding="utf-8")
    (service,) = (each for each in yaml.safe_load_all(manifest) if each["kind"] == "RayService")
    return {
        "serve/kvferry.yaml": (ROOT / "deploy" / "serve" / "kvferry.yaml").read_text("utf-8"),
        "kubernetes/rayservice.yaml": service["spec"]["serveConfigV2"],
    }


@pytest.mark.parametrize("name", sorted(serve_configurations()))
def test_the_configurations_in_deploy_are_serves_and_build(name: str) -> None:
    read = ServeDeploySchema.model_validate(yaml.safe_load(serve_configurations()[name]))
    (application,) = read.applications
    assert application.import_path == f"{ray_serve.__name__}:{ray_serve.build.__name__}"
    ray_serve.build(application.args)
