"""The files of ``ray up``: Ray's own validator, offline, and that the parts fit together."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from kvferry.cluster.config import load_config
from tests.house.source import ROOT

FOLDER = ROOT / "deploy" / "ray"
CLOUDS = ["aws.yaml", "gcp.yaml"]
FILES = ["local.yaml", *CLOUDS]

# What `ray up` copies and the repository does not have: what is built, and the token.
MADE_BY_COMMANDS = {"dist": "make wheel", "~/.ray/auth_token": "ray get-auth-token --generate"}

Cluster = dict[str, Any]


ROLES = ("prefill", "decode")


def wanted_by(role: str) -> dict[str, float]:
    """What a worker reserves."""
    found: dict[str, float] = getattr(load_config(FOLDER / "kvferry.yaml"), role).resources
    return found


def cluster(name: str) -> Cluster:
    read: Cluster = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", FILES)
def test_rays_own_validator_finds_nothing(name: str) -> None:
    prepared = prepare_config(cluster(name))
    validate_config(prepared)
    assert prepared["max_workers"] >= 2


def test_rays_own_validator_finds_a_planted_mistake() -> None:
    wrong = cluster("aws.yaml")
    wrong["available_node_types"]["prefill"]["min_worker"] = 1
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", CLOUDS)
def test_workers_take_what_their_node_type_has(name: str) -> None:
    config = load_config(FOLDER / "kvferry.yaml")
    types = cluster(name)["available_node_types"]
    assert wanted_by("prefill").keys().isdisjoint(wanted_by("decode"))
    for role in ROLES:
        assert wanted_by(role).items() <= types[role]["resources"].items()
        assert (
            getattr(config, role).replicas
            <= types[role]["min_workers"]
            <= types[role]["max_workers"]
        )


def test_a_host_of_ones_own_has_what_a_worker_of_either_role_takes() -> None:
    (start,) = (
        line for line in cluster("local.yaml")["worker_start_ray_commands"] if "--resources" in line
    )
    (there,) = re.findall(r"echo '(\{.*\})'", start)
    for role in ROLES:
        assert wanted_by(role).items() <= yaml.safe_load(there).items()


def test_prefill_is_spot_and_decode_on_demand() -> None:
    aws = cluster("aws.yaml")["available_node_types"]
    spot = {name: node["node_config"].get("InstanceMarketOptions") for name, node in aws.items()}
    assert spot == {"head": None, "prefill": {"MarketType": "spot"}, "decode": None}
    gcp = cluster("gcp.yaml")["available_node_types"]
    preemptible = {
        name: any(entry.get("preemptible") for entry in node["node_config"].get("scheduling", []))
        for name, node in gcp.items()
    }
    assert preemptible == {"head": False, "prefill": True, "decode": False}


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there_or_made_by_a_command_of_the_page(name: str) -> None:
    page = (ROOT / "docs" / "deploy" / name.replace(".yaml", ".md")).read_text(encoding="utf-8")
    for source in cluster(name)["file_mounts"].values():
        command = MADE_BY_COMMANDS.get(source)
        assert (ROOT / source).is_file() if command is None else command in page, source


@pytest.mark.parametrize("name", FILES)
def test_every_node_fetches_the_model_that_is_served(name: str) -> None:
    model = load_config(FOLDER / "kvferry.yaml").model.name
    commands = cluster(name)["setup_commands"]
    assert any(line.endswith(f"kvferry models pull {model}") for line in commands)


@pytest.mark.parametrize("name", FILES)
def test_ray_asks_for_its_token_and_shows_no_dashboard_to_others(name: str) -> None:
    read = cluster(name)
    assert "~/.ray/auth_token" in read["file_mounts"]
    for commands in (read["head_start_ray_commands"], read["worker_start_ray_commands"]):
        (start,) = (line for line in commands if "ray start" in line)
        assert "RAY_AUTH_MODE=token" in start
    (head,) = (line for line in read["head_start_ray_commands"] if "ray start" in line)
    assert "--dashboard-host=127.0.0.1" in head


@pytest.mark.parametrize("name", CLOUDS)
def test_what_costs_money_says_so(name: str) -> None:
    head = (FOLDER / name).read_text(encoding="utf-8").splitlines()[:3]
    assert "COSTS MONEY" in head[1]
    assert "Not yet run on" in head[2]
    page = (ROOT / "docs" / "deploy" / name.replace(".yaml", ".md")).read_text(encoding="utf-8")
    assert "**This costs money**" in page
    assert "**Not yet run on" in page


@pytest.mark.parametrize("page", ["README.md", "docs/deploy/local.md", "deploy/ray/local.yaml"])
def test_provider_local_is_brought_up_with_the_autoscaler_that_starts_every_worker(
    page: str,
) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    ups = [line for line in lines if re.search(r"\bray up\b.*deploy/ray/local\.yaml", line)]
    assert ups, "or the page says no longer how"
    assert [line for line in ups if "RAY_UP_enable_autoscaler_v2=0 ray up" not in line] == []
