"""docs/metrics.md says of every metric what the catalogue says, and of nothing else."""

from __future__ import annotations

import re

from kvferry.cluster.metrics.catalog import CATALOG
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_table_has_every_metric_with_its_type_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(kvferry_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.+?) \|$", PAGE, re.M)
    told = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text, _ in rows
    ]
    assert told == [(m.name, m.kind.value, m.labels, m.help) for m in CATALOG]


def test_names_elsewhere_on_the_page_are_of_the_table_or_said_to_be_reserved() -> None:
    exported = {metric.name for metric in CATALOG}
    named = set(re.findall(r"`(kvferry_\w+)`", PAGE))
    assert named - exported == {"kvferry_predicted_ttft_error_seconds"}
