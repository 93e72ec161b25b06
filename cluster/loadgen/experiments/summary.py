"""What a sweep's points add up to: figures over all rounds, contrasts, drains, verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvferry.cluster.loadgen.experiments.arrangements import parse_arrangement
from kvferry.cluster.loadgen.experiments.comparing import pair_json
from kvferry.cluster.loadgen.experiments.drains import drains_json
from kvferry.cluster.loadgen.experiments.figures import FIGURES, GOODPUT
from kvferry.cluster.loadgen.experiments.verdict import Verdict, judge
from kvferry.cluster.loadgen.intervals import interval
from kvferry.cluster.reports.common import Json

FIELDS = ("sweep", "points", "summary", "contrasts", "verdicts")


def sweep_fields(sweep: Mapping[str, Any], points: Sequence[Json]) -> Json:
    """The fields of a ``loadgen sweep`` document; points that failed are in no figure."""
    good = [point for point in points if point["ok"]]
    return {
        "sweep": dict(sweep),
        "points": list(points),
        "summary": [_row(group) for group in grouped(good)],
        "contrasts": contrasts(sweep, good),
        "verdicts": [
            {"variant": variant, **verdict.to_json()} for variant, verdict in verdicts(good)
        ],
    }


def grouped(points: Sequence[Json]) -> list[list[Json]]:
    """Points by label: the rounds of one thing together, in order of their first."""
    found: dict[str, list[Json]] = {}
    for point in points:
        found.setdefault(point["label"], []).append(point)
    return list(found.values())


def repeats_of(points: Sequence[Json]) -> list[Json]:
    """Repeats of all rounds."""
    return [repeat for point in points for repeat in point["run"]["repeats"]]


def _row(points: Sequence[Json]) -> Json:
    first, repeats = points[0], repeats_of(points)
    return {
        **{name: first[name] for name in ("label", "variant", "arrangement", "load", "value")},
        "num_repeats": len(repeats),
        "figures": {figure.name: _figure(figure.readings(repeats)) for figure in FIGURES},
        "drains": drains_json(repeats) if first["run"]["config"]["cancel_share"] else None,
    }


def _figure(readings: Mapping[str, float]) -> Json | None:
    """Mean and interval over repeats; of a single one without an interval, of none None."""
    values = list(readings.values())
    if not values:
        return None
    return interval(values) or {"n": 1, "mean": fmean(values), "low": None, "high": None}


def contrasts(sweep: Mapping[str, Any], points: Sequence[Json]) -> list[Json]:
    """The variants that the sweep sets against each other, by arrangement and load."""
    groups = {
        (group[0]["variant"], group[0]["arrangement"], group[0]["load"]): repeats_of(group)
        for group in grouped(points)
    }
    found = []
    for contrast in sweep["contrasts"]:
        for (variant, arrangement, load), mine in groups.items():
            other = groups.get((contrast["b"], arrangement, load))
            if variant == contrast["a"] and other is not None:
                label = f"{contrast['label']}: {arrangement}, {load}"
                sides = {"a_variant": contrast["a"], "b_variant": contrast["b"]}
                found.append({**pair_json(label, mine, other), **sides})
    return found


def verdicts(points: Sequence[Json]) -> list[tuple[str, Verdict]]:
    """One for each variant and each arrangement of prefill and decode workers beside others.

    Only arrangements of as many threads are held against each other.
    """
    found = []
    for variant in dict.fromkeys(point["variant"] for point in points):
        mine = [point for point in points if point["variant"] == variant]
        names = list(dict.fromkeys(point["arrangement"] for point in mine))
        arrangements = {name: parse_arrangement(name) for name in names}
        goodput = {name: _goodput(mine, name) for name in names}
        for name, arrangement in arrangements.items():
            others = {
                other: goodput[other]
                for other, it in arrangements.items()
                if it.is_colocated and it.threads == arrangement.threads
            }
            if not arrangement.is_colocated and others:
                found.append((variant, judge(name, goodput[name], others)))
    return found


def _goodput(points: Sequence[Json], arrangement: str) -> dict[str, dict[str, float]]:
    """Readings by load."""
    return {
        group[0]["load"]: GOODPUT.readings(repeats_of(group))
        for group in grouped([p for p in points if p["arrangement"] == arrangement])
    }
