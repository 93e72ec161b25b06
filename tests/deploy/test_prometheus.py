"""The alert rules and the scrape example: sound, of exported series only, and each rule fires."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.metrics.test_exposition import full_page
from tests.deploy.promtool import promtool
from tests.deploy.queries import labels_of, metrics_of, problems
from tests.house.source import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_exported_series_and_says_what_it_is(rule: dict[str, Any]) -> None:
    assert metrics_of(rule["expr"]), "it asks for nothing"
    assert problems(rule["expr"]) == []
    assert re.fullmatch(r"KVFerry[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} == rule["annotations"].keys()
    available: set[str] = set()
    for name in metrics_of(rule["expr"]):
        available |= labels_of(name) or set()
    for kept in re.findall(r"by \(([^)]*)\)", rule["expr"]):  # what is added up is gone
        available &= {name.strip() for name in kept.split(",")}
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert shown <= available


def test_what_operators_fear_most_has_an_alert() -> None:
    asked = " ".join(rule["expr"] for rule in ALERTS)
    for series in (
        "kvferry_worker_ready",
        "kvferry_heartbeat_age_seconds",
        "kvferry_kv_cache_usage_perc",
        "kvferry_num_preemptions_total",
        "kvferry_requests_finished_total",
        "kvferry_transfer_failures_total",
        "kvferry_stale_messages_refused_total",
        "kvferry_leases_expired_total",
    ):
        assert series in asked


def test_every_alert_is_played_by_the_rules_tests() -> None:
    played = yaml.safe_load((FOLDER / "rules_test.yaml").read_text(encoding="utf-8"))
    (check,) = played["tests"][1]["promql_expr_test"]
    fired = {re.findall(r'"(\w+)"', sample["labels"])[0] for sample in check["exp_samples"]}
    assert fired == {rule["alert"] for rule in ALERTS}
    for test in played["tests"]:
        for series in test["input_series"]:
            name = series["series"].partition("{")[0]
            assert problems(series["series"]) == []
            labels = set(re.findall(r"(\w+)=", series["series"]))
            assert name == "up" or labels == (labels_of(name) or set()) - {"job", "instance"}


def test_promtool_finds_the_rules_and_the_scrape_sound() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "rules.yaml", cwd=FOLDER)
    promtool("check", "config", "prometheus.yaml", cwd=FOLDER)


def test_promtool_plays_every_alert() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yaml", cwd=FOLDER)


def test_promtool_reads_the_page(tmp_path: Path) -> None:
    """And has nothing against its names, types and texts."""
    assert promtool("check", "metrics", cwd=tmp_path, stdin=full_page()) == ""
