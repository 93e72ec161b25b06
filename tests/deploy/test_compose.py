"""The Compose file: its shape, that what it mounts exists, that its services find each other."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvferry.cluster.config import load_config
from tests.deploy.compose import SCHEMA
from tests.deploy.promtool import promtool
from tests.house.source import ROOT

FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def mounts(service: str) -> dict[str, Path | str]:
    """What lies where in a container: a file of ours, or a volume's name."""
    found: dict[str, Path | str] = {}
    for volume in SERVICES[service]["volumes"]:
        source, target = volume.split(":")[:2]
        found[target] = (FOLDER / source).resolve() if source.startswith(".") else source
    return found


def published(service: str) -> dict[int, int]:
    """Host's port by container's."""
    ports = [each.split(":") for each in SERVICES[service]["ports"]]
    return {int(inner): int(outer) for _, outer, inner in ports}


def test_the_file_has_its_shape() -> None:
    jsonschema.validate(COMPOSE, SCHEMA)


def test_a_planted_mistake_is_found() -> None:
    wrong = {**COMPOSE, "services": {"x": {**SERVICES["kvferry"], "port": ["80:80"]}}}
    with pytest.raises(jsonschema.ValidationError, match="port"):
        jsonschema.validate(wrong, SCHEMA)


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_is_there(service: str) -> None:
    for source in mounts(service).values():
        assert source in COMPOSE["volumes"] if isinstance(source, str) else source.is_file()


def test_the_image_is_built_from_this_repository() -> None:
    build = SERVICES["kvferry"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text(encoding="utf-8")
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_the_doors_are_those_that_are_published_and_asked() -> None:
    *_, flag, inside = SERVICES["kvferry"]["command"]
    assert flag == "--config"
    path = mounts("kvferry")[inside]
    assert isinstance(path, Path)
    server = load_config(path).server
    ports = {door: int(str(door).rpartition(":")[2]) for door in (server.grpc, server.http)}
    assert published("kvferry") == {port: port for port in ports.values()}
    # not on the loopback, or Compose could not publish them
    assert all(str(door).startswith("0.0.0.0:") for door in (*ports, server.metrics))
    code = SERVICES["kvferry"]["healthcheck"]["test"][-1]
    ast.parse(code)
    assert f"http://127.0.0.1:{ports[server.http]}/ready" in code
    (job,) = read("prometheus.yaml")["scrape_configs"]
    (scrape,) = job["static_configs"]
    assert scrape["targets"] == [f"kvferry:{str(server.metrics).rpartition(':')[2]}"]
    assert job["job_name"] == "kvferry"  # the alerts ask for it


def test_a_stop_leaves_the_time_that_serve_takes() -> None:
    assert SERVICES["kvferry"]["stop_grace_period"] == "20s"  # over within 10, the README says


def test_prometheus_reads_what_is_mounted(tmp_path: Path) -> None:
    (flag,) = (each for each in SERVICES["prometheus"]["command"] if "config.file" in each)
    inside = flag.partition("=")[2]
    for target, source in mounts("prometheus").items():
        if isinstance(source, Path):
            shutil.copy(source, tmp_path / Path(target).name)
    said = promtool("check", "config", Path(inside).name, cwd=tmp_path)
    assert "1 rule files" in said


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read("grafana/datasources.yaml")["datasources"]
    name, _, port = source["url"].removeprefix("http://").partition(":")
    assert int(port) in published(name)
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    here = mounts("grafana")
    dashboard = ROOT / "deploy" / "grafana" / "kvferry.json"
    (inside,) = (target for target, file in here.items() if file == dashboard)
    assert str(Path(inside).parent) == provider["options"]["path"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == inside
    folders = {str(Path(target).parent) for target in here}
    assert {
        "/etc/grafana/provisioning/datasources",
        "/etc/grafana/provisioning/dashboards",
    } <= folders
