"""What a PromQL expression asks for: series, the labels that it selects, and those it groups by.

Enough of the language for our own queries; promtool checks their syntax.
"""

from __future__ import annotations

import re

from kvferry.cluster.metrics.catalog import CATALOG, Metric

BY_SERIES = {name: metric for metric in CATALOG for name in metric.series_names}
SCRAPERS_OWN = {"up": {"job", "instance"}}
"""Series and labels that Prometheus makes by itself."""

_SELECTOR = re.compile(r"\b([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_WORDS = {
    *("sum", "count", "max", "min", "avg", "rate", "increase", "histogram_quantile", "scalar"),
    *("absent", "by", "or", "and", "unless", "bool", "topk"),
}


def metrics_of(expression: str) -> dict[str, Metric | None]:
    """The series named in an expression, with our metric; None: Prometheus's own."""
    found: dict[str, Metric | None] = {}
    for name, _ in _selectors(expression):
        found[name] = BY_SERIES.get(name)
    return found


def problems(expression: str) -> list[str]:
    """Series that nobody exports, and labels that they do not have."""
    found = []
    known: set[str] = set()
    for name, matchers in _selectors(expression):
        labels = labels_of(name)
        if labels is None:
            found.append(f"{name} is not exported")
            continue
        known |= labels
        wrong = set(_MATCHER.findall(matchers)) - labels
        found += [f"{name} has no label {label}" for label in sorted(wrong)]
    for names in _GROUPING.findall(expression):
        grouped = {name.strip() for name in names.split(",") if name.strip()}
        found += [f"nothing has the label {label}" for label in sorted(grouped - known)]
    return found


def labels_of(series: str) -> set[str] | None:
    """The labels of a series by name; None if nobody exports it."""
    if series in SCRAPERS_OWN:
        return SCRAPERS_OWN[series]
    metric = BY_SERIES.get(series)
    if metric is None:
        return None
    own = {"le"} if series.endswith("_bucket") else set()
    return {*metric.label_names, *own, "job", "instance"}


def _selectors(expression: str) -> list[tuple[str, str]]:
    bare = _GROUPING.sub(" ", expression)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    return [
        (name, matchers or "") for name, matchers in _SELECTOR.findall(bare) if name not in _WORDS
    ]
