"""The dashboard asks for what is exported, by labels that it has; and shows all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.cluster.metrics.catalog import CATALOG
from tests.deploy.promtool import promtool
from tests.deploy.queries import BY_SERIES, labels_of, metrics_of, problems
from tests.house.source import ROOT

TEXT = (ROOT / "deploy" / "grafana" / "kvferry.json").read_text(encoding="utf-8")
BOARD: dict[str, Any] = json.loads(TEXT)
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation


def queries() -> list[tuple[str, str]]:
    """(panel, expression), Grafana's variables replaced as it does."""
    found = []
    for title, target in targets():
        expression = target["expr"].replace("$__rate_interval", "1m")
        found.append((title, re.sub(r"\$\w+", ".*", expression)))
    return found


@pytest.mark.parametrize(("title", "expression"), queries())
def test_a_query_asks_for_exported_series_by_labels_that_they_have(
    title: str, expression: str
) -> None:
    assert metrics_of(expression), f"{title} asks for nothing"
    assert problems(expression) == []


def test_a_legend_shows_labels_that_the_query_leaves() -> None:
    for title, target in targets():
        shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
        if grouped is not None:
            left = {name.strip() for name in grouped[1].split(",")}
        else:
            left = set().union(*(labels_of(name) or set() for name in metrics_of(target["expr"])))
            left = set() if target["expr"].startswith("sum(") else left
        assert shown <= left, (title, target["expr"])


def test_every_exported_metric_is_shown() -> None:
    asked = {name for _, expression in queries() for name in metrics_of(expression)}
    shown = {BY_SERIES[name].name for name in asked}
    assert {metric.name for metric in CATALOG} - shown == set()


def test_its_variables_are_labels_that_exist() -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", TEXT)) - {"__rate_interval", "__all"}
    assert used == set(variables)
    for each in variables.values():
        if each["type"] == "query":
            series, label = re.findall(r"label_values\((\w+), (\w+)\)", each["definition"])[0]
            assert label in (labels_of(series) or set())


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_promtool_finds_every_query_sound(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": expression}
        for number, (_, expression) in enumerate(queries())
    ]
    page = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(page), encoding="utf-8")
    said = promtool("check", "rules", "rules.yaml", cwd=tmp_path)
    assert f"{len(rules)} rules found" in said
