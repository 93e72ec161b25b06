"""The manifests: KubeRay's fields, Kubernetes' schemas, and that the parts fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvferry.cluster.config import load_config
from tests.deploy.kuberay import SCHEMAS
from tests.deploy.pins import pinned
from tests.house.source import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
KUBERNETES = "1.33"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))

Manifest = dict[str, Any]


def manifests(name: str) -> dict[str, Manifest]:
    """The documents of a file, by kind."""
    documents = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def cluster_spec(name: str) -> Manifest:
    found = manifests(name)
    if name == "rayservice.yaml":
        spec: Manifest = found["RayService"]["spec"]["rayClusterConfig"]
        return spec
    spec = found["RayCluster"]["spec"]
    return spec


def groups(name: str) -> dict[str, Manifest]:
    """The head's group and those of the workers, by name."""
    spec = cluster_spec(name)
    return {"head": spec["headGroupSpec"]} | {
        group["groupName"]: group for group in spec["workerGroupSpecs"]
    }


def pods(name: str) -> list[Manifest]:
    return [group["template"] for group in groups(name).values()]


def our_config(name: str, tmp_path: Path) -> Path:
    path = tmp_path / "kvferry.yaml"
    path.write_text(manifests(name)["ConfigMap"]["data"]["kvferry.yaml"], encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_document_keeps_to_its_schema(name: str) -> None:
    found = manifests(name)
    assert found
    for kind, document in found.items():
        if kind in SCHEMAS:
            jsonschema.validate(document, SCHEMAS[kind])
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


CLUSTERS = ["raycluster.yaml", "rayservice.yaml"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_pod_keeps_to_the_schema_of_pods(name: str) -> None:
    for template in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
        pod["metadata"] = {"name": "x", **template["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("headGroupSpec", "template", "spec", "containers", 0, "portz"), []),
        (("workerGroupSpecs", 0, "maxReplica"), 4),
        (("workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 4),
        (("authOptions", "mode"), "none"),
    ],
)
def test_a_planted_mistake_is_found(where: tuple[str | int, ...], value: object) -> None:
    spec = cluster_spec("raycluster.yaml")
    at: Any = spec
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    pod["spec"] = spec["headGroupSpec"]["template"]["spec"]
    document = {**manifests("raycluster.yaml")["RayCluster"], "spec": spec}
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        jsonschema.validate(document, SCHEMAS["RayCluster"])
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", CLUSTERS)
def test_pods_mount_what_they_have_and_may_nothing(name: str) -> None:
    for template in pods(name):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec["initContainers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_is_the_pinned_one_and_asks_for_a_token(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["rayVersion"] == pinned("ray")
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_workers_take_what_their_group_has(name: str, tmp_path: Path) -> None:
    config = load_config(our_config(name, tmp_path))
    for role in ("prefill", "decode"):
        section = getattr(config, role)
        group = groups(name)[role]
        there = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert section.resources.items() <= there.items()
        assert section.replicas <= group["minReplicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_pod_fetches_the_model_that_is_served(name: str, tmp_path: Path) -> None:
    model = load_config(our_config(name, tmp_path)).model.name
    for template in pods(name):
        (fetching,) = template["spec"]["initContainers"]
        assert fetching["command"] == ["kvferry", "models", "pull", model]


def test_the_service_leads_to_the_doors_of_the_head(tmp_path: Path) -> None:
    server = load_config(our_config("rayservice.yaml", tmp_path)).server
    doors = {"grpc": server.grpc, "http": server.http, "metrics": server.metrics}
    ports = {name: int(str(door).rpartition(":")[2]) for name, door in doors.items()}
    service = manifests("rayservice.yaml")["Service"]["spec"]
    (head,) = groups("rayservice.yaml")["head"]["template"]["spec"]["containers"]
    opened = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    assert {port["name"]: opened[port["targetPort"]] for port in service["ports"]} == ports
    labels = groups("rayservice.yaml")["head"]["template"]["metadata"]["labels"]
    wanted = dict(service["selector"])
    assert wanted.pop("ray.io/node-type") == "head"  # KubeRay's own label
    assert wanted.items() <= labels.items()


def test_the_network_policy_is_about_these_pods_and_their_doors(tmp_path: Path) -> None:
    server = load_config(our_config("rayservice.yaml", tmp_path)).server
    (policy,) = manifests("network-policy.yaml").values()
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for name in CLUSTERS:
        for template in pods(name):
            assert selected.items() <= template["metadata"]["labels"].items()
    among, clients, scrapers = policy["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": selected}} in among["from"]
    doors = {int(str(door).rpartition(":")[2]) for door in (server.grpc, server.http)}
    assert {port["port"] for port in clients["ports"]} == doors
    assert [port["port"] for port in scrapers["ports"]] == [
        int(str(server.metrics).rpartition(":")[2])
    ]
