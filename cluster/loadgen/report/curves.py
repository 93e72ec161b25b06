"""Charts out of documents of ``loadgen run`` and ``loadgen sweep``. Pure.

A document becomes *cases*: one for each variant, arrangement and load, with the repeats of all its
rounds. What is drawn over time is that of a case's median repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cluster.loadgen.client_series import quantiles
from kvferry.cluster.loadgen.experiments.comparing import SWEEP
from kvferry.cluster.loadgen.experiments.renewing import median_repeat
from kvferry.cluster.loadgen.experiments.summary import grouped, repeats_of, without_failures
from kvferry.cluster.loadgen.goodput import COMPLETED
from kvferry.cluster.loadgen.report.chart import Chart, Line
from kvferry.cluster.reports.common import Json

Place = tuple[str, str]  # variant and load


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that was measured. ``series`` is its arrangement, or what else has a colour."""

    variant: str
    series: str
    load: str
    value: float | None
    repeats: tuple[Json, ...]

    @property
    def median(self) -> Json:
        """The repeat of median throughput."""
        complete = [repeat for repeat in self.repeats if repeat["is_complete"]]
        return median_repeat(complete or self.repeats)


def cases_of(document: Mapping[str, Any]) -> list[Case]:
    """Those that count: of a sweep, points at which no request failed."""
    if document["schema"] != SWEEP:
        repeats = tuple(document["repeats"] or ())
        return [Case("", "the run", "as set", None, repeats)] if repeats else []
    return [
        Case(
            group[0]["variant"],
            group[0]["arrangement"],
            group[0]["load"],
            group[0]["value"],
            tuple(repeats_of(group)),
        )
        for group in grouped(without_failures(document["points"] or []))
    ]


def over_loads(document: Mapping[str, Any]) -> list[Chart]:
    """Goodput, and throughput, against the load, a line for each variant and arrangement."""
    rows = document.get("summary") or []
    axis = (document.get("sweep") or {}).get("axis") or {}
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        return []
    label = {
        "rate": "sessions that begin per second",
        "concurrency": "sessions in flight",
        "stretch": "the trace's times are multiplied by",
    }[axis["name"]]
    charts = [
        ("goodput", "Goodput against load", "good requests/s", "goodput_per_s"),
        ("throughput", "Throughput against load", "output tokens/s", "output_tokens_per_s"),
    ]
    made = []
    for name, title, y_label, figure in charts:
        lines = []
        for number, (key, group) in enumerate(_by_line(rows)):
            known = [row for row in group if row["figures"][figure] is not None]
            known.sort(key=lambda row: float(row["value"]))
            figures = [row["figures"][figure] for row in known]
            lines.append(
                Line(
                    key,
                    tuple(
                        (float(row["value"]), float(each["mean"]))
                        for row, each in zip(known, figures, strict=True)
                    ),
                    colour=number,
                    intervals=tuple(
                        None if each["low"] is None else (each["low"], each["high"])
                        for each in figures
                    ),
                    has_marks=True,
                )
            )
        chart = Chart(name, title, label, y_label, tuple(lines))
        if not chart.is_empty:
            made.append(chart)
    return made


def _by_line(rows: Sequence[Json]) -> list[tuple[str, list[Json]]]:
    found: dict[str, list[Json]] = {}
    for row in rows:
        key = ", ".join(part for part in (row["variant"], row["arrangement"]) if part)
        found.setdefault(key, []).append(row)
    return list(found.items())


def by_place(cases: Iterable[Case]) -> dict[Place, list[Case]]:
    """Cases whose curves stand in one plot: those of one variant and load."""
    found: dict[Place, list[Case]] = {}
    for case in cases:
        found.setdefault((case.variant, case.load), []).append(case)
    return found


def distributions(place: Place, cases: Sequence[Case]) -> list[Chart]:
    """CDFs of TTFT, ITL and e2e."""
    kinds: tuple[tuple[str, str, Callable[[Case], list[float]]], ...] = (
        ("ttft", "Time to first token", lambda case: _of_requests(case, "ttft_s")),
        ("itl", "Inter-token latency", lambda case: list(case.median["itl_percentiles_s"])),
        ("e2e", "End to end", lambda case: _of_requests(case, "e2e_s")),
    )
    made = []
    for name, title, values in kinds:
        lines = tuple(
            Line(case.series, tuple((each * 1000, at / 100) for at, each in enumerate(found)), n)
            for n, case in enumerate(cases)
            if (found := values(case))
        )
        chart = Chart(
            _file_name(name, *place), _title(title, place), "ms", "share of all", lines, y_max=1.0
        )
        if not chart.is_empty:
            made.append(chart)
    return made


def _of_requests(case: Case, name: str) -> list[float]:
    """Percentiles over the requests of all repeats."""
    return quantiles(
        [
            row[name]
            for repeat in case.repeats
            for row in repeat["requests"]
            if row["is_counted"] and row["outcome"] == COMPLETED and row[name] is not None
        ]
    )


def over_time(place: Place, cases: Sequence[Case]) -> list[Chart]:
    """Inter-token latency and KV use in the seconds of each case's median repeat."""
    itl, usage, load = [], [], []
    for number, case in enumerate(cases):
        seconds = [row for row in case.median["series"] if row["itl_s"] is not None]
        for key, is_dashed in (("p50", False), ("p99", True)):
            points = tuple((row["t_s"], row["itl_s"][key] * 1000) for row in seconds)
            itl.append(Line(f"{case.series} {key}", points, number, is_dashed=is_dashed))
        server = case.median["server"]
        looks = server["series"] if server is not None else []
        workers = sorted({worker for look in looks for worker in look["kv_usage"]})
        for at, worker in enumerate(workers):
            points = tuple(
                (look["t_s"], look["kv_usage"][worker] * 100)
                for look in looks
                if worker in look["kv_usage"]
            )
            name = f"{case.series}: {worker}"
            usage.append(Line(name, points, number, is_dashed=at % 2 == 1))
        for key, is_dashed in (("num_running", False), ("num_waiting", True)):
            points = tuple((look["t_s"], float(look[key])) for look in looks)
            load.append(
                Line(f"{case.series} {key.removeprefix('num_')}", points, number, (), is_dashed)
            )
    made = (
        ("itl-over-time", "Inter-token latency over time", "ms", itl, None),
        ("kv-over-time", "KV use over time", "% of blocks", usage, 100.0),
        ("requests-over-time", "Requests at workers over time", "requests", load, None),
    )
    charts = [
        Chart(_file_name(name, *place), _title(title, place), "s", unit, tuple(lines), top)
        for name, title, unit, lines, top in made
    ]
    return [chart for chart in charts if not chart.is_empty]


def _title(title: str, place: Place) -> str:
    return ": ".join((title, ", ".join(part for part in place if part)))


def _file_name(*parts: str) -> str:
    words = (re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts)
    return "-".join(word for word in words if word)


def all_charts(document: Mapping[str, Any]) -> list[Chart]:
    """Every plot of a report."""
    made = over_loads(document)
    for place, cases in by_place(cases_of(document)).items():
        made += [*distributions(place, cases), *over_time(place, cases)]
    return made
