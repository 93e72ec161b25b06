"""What a sweep's points add up to: figures over all rounds, contrasts, drains, verdicts. Pure.

A point at which requests failed is in no figure of those that were answered, for they are the
easier ones; goodput and the share within the SLO hold it, where a failed request is one that was
not good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvferry.cluster.loadgen.experiments.arrangements import Arrangement, parse_arrangement
from kvferry.cluster.loadgen.experiments.comparing import pair_json
from kvferry.cluster.loadgen.experiments.drains import drains_json
from kvferry.cluster.loadgen.experiments.figures import FIGURES, GOODPUT
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis
from kvferry.cluster.loadgen.experiments.verdict import Verdict, judge
from kvferry.cluster.loadgen.intervals import interval
from kvferry.cluster.reports.common import Json

FIELDS = ("sweep", "points", "summary", "contrasts", "verdicts")


def sweep_fields(sweep: Mapping[str, Any], points: Sequence[Json]) -> Json:
    """The fields of a ``loadgen sweep`` document; ``sweep`` is what was asked for."""
    return {
        "sweep": dict(sweep),
        "points": list(points),
        "summary": [_row(group) for group in grouped(points)],
        "contrasts": contrasts(sweep, without_failures(points)),
        "verdicts": [
            {"variant": variant, **verdict.to_json()}
            for variant, verdict in verdicts(sweep, points)
        ],
    }


def without_failures(points: Sequence[Json]) -> list[Json]:
    """Those at which no request failed."""
    return [point for point in points if point["ok"]]


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
    first, every = points[0], repeats_of(points)
    answered = repeats_of(without_failures(points))
    return {
        **{name: first[name] for name in ("label", "variant", "arrangement", "load", "value")},
        "num_repeats": len(every),
        "num_with_failures": len(every) - len(answered),
        "figures": {
            figure.name: _figure(figure.readings(every if figure.counts_failures else answered))
            for figure in FIGURES
        },
        "drains": drains_json(answered) if first["run"]["config"]["cancel_share"] else None,
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


def verdicts(sweep: Mapping[str, Any], points: Sequence[Json]) -> list[tuple[str, Verdict]]:
    """One for each variant and each arrangement of prefill and decode workers beside others.

    What was asked for and is not there is named. Only arrangements of as many threads are held
    against each other.
    """
    arrangements = [parse_arrangement(name) for name in sweep["arrangements"]]
    found = []
    for variant in [each["name"] for each in sweep["variants"]]:
        mine = [point for point in points if point["variant"] == variant]
        for judged in arrangements:
            others = [
                other
                for other in arrangements
                if other.is_colocated and other.threads == judged.threads
            ]
            if mine and others and not judged.is_colocated:
                found.append((variant, _verdict(sweep, mine, judged, others)))
    return found


def _verdict(
    sweep: Mapping[str, Any],
    points: Sequence[Json],
    judged: Arrangement,
    others: Sequence[Arrangement],
) -> Verdict:
    names = [judged.name, *(other.name for other in others)]
    points = [point for point in points if point["arrangement"] in names]
    goodput = {name: _goodput(points, name) for name in names}
    verdict = judge(
        judged.name,
        goodput[judged.name],
        {other.name: goodput[other.name] for other in others},
        steps={
            load: GOODPUT.largest_step(repeats_of([p for p in points if p["load"] == load]))
            for load in dict.fromkeys(point["load"] for point in points)
        },
        missing=list(_missing(sweep, points, names)),
    )
    return verdict.with_words(list(_failures(points)))


def _goodput(points: Sequence[Json], arrangement: str) -> dict[str, dict[str, float]]:
    """Readings by load."""
    return {
        group[0]["load"]: GOODPUT.readings(repeats_of(group))
        for group in grouped([p for p in points if p["arrangement"] == arrangement])
    }


def _missing(
    sweep: Mapping[str, Any], points: Sequence[Json], names: Sequence[str]
) -> Iterator[str]:
    """Loads of a round that were asked for, of which there is no point."""
    axis = Axis(sweep["axis"]["name"], tuple(sweep["axis"]["values"]))
    known = {(point["arrangement"], point["load"], point["round"]) for point in points}
    for name in names:
        for number in range(sweep["rounds"]):
            loads = [load for load, _ in axis.loads() if (name, load, number) not in known]
            if loads:
                yield f"{name} at {', '.join(loads)} in round {number + 1}"


def _failures(points: Sequence[Json]) -> Iterator[str]:
    """A sentence on what failed, if anything did."""
    said = []
    for group in grouped(points):
        repeats = repeats_of(group)
        failed = sum(repeat["failed"] for repeat in repeats)
        tried = failed + sum(repeat["completed"] for repeat in repeats)
        if failed:
            first = group[0]
            said.append(f"{failed} of {tried} of {first['arrangement']} at {first['load']}")
    if said:
        yield f"Requests that failed count as not good: {'; '.join(said)}."
