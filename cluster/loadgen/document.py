"""The document of ``kvferry loadgen run``: that of ``bench serve``, and what is more here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.cluster.bench_serve import arrangement_json
from kvferry.cluster.loadgen.client_series import quantiles, series_json
from kvferry.cluster.loadgen.goodput import COMPLETED
from kvferry.cluster.loadgen.intervals import intervals_json
from kvferry.cluster.loadgen.measures import parts_json, request_row, results_json
from kvferry.cluster.loadgen.plan import workload_json
from kvferry.cluster.loadgen.run import Repeat, Run
from kvferry.cluster.loadgen.server_series import server_json
from kvferry.cluster.loadgen.targets import About
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import to_json

FIELDS = (
    "target",
    "arrangement",
    "workload",
    "results",
    "intervals",
    "parts",
    "server",
    "repeats",
    "roof",
    "peer",
    "ratio_to_peer",
    "config",
    "generator",
)


def document_fields(run: Run, generator: Mapping[str, Any]) -> Json:
    """Of a run, also one that was interrupted; ``generator`` is what is to be said of this process.

    ``results``, ``parts`` and ``server`` are those of the median repeat, intervals those of the
    complete ones.
    """
    repeats = [repeat_json(repeat, run) for repeat in run.repeats]
    median = run.median
    chosen = repeats[run.repeats.index(median)] if median is not None else None
    is_open = run.settings.is_open
    results = results_json(median.measured, run.slo, is_open) if median is not None else None
    about = run.about
    return {
        "target": target_json(about) if about is not None else None,
        "arrangement": (
            arrangement_json(about.status) if about is not None and about.status else None
        ),
        "workload": workload_json(median.plan, run.settings) if median is not None else None,
        "results": results,
        "intervals": intervals_json([each for each in repeats if each["is_complete"]]),
        "parts": chosen["parts"] if chosen is not None else None,
        "server": chosen["server"] if chosen is not None else None,
        "repeats": repeats,
        "roof": None,
        "peer": None,
        "ratio_to_peer": None,
        "config": run.settings.to_json(),
        "generator": dict(generator),
    }


def target_json(about: About) -> Json:
    """What was measured; ``model`` is null where only its name is known."""
    status = about.status
    has_machine = status is not None and status.HasField("machine")
    return {
        "kind": about.kind,
        "endpoint": about.address,
        "server_version": about.server_version,
        "model_name": about.model,
        "model": to_json(status.model) if status is not None else None,
        "machine": to_json(status.machine) if status is not None and has_machine else None,
    }


def repeat_json(repeat: Repeat, run: Run) -> Json:
    """One repeat: its figures, and what plots are made of."""
    measured = repeat.measured
    done = measured.of(COMPLETED)
    return {
        **results_json(measured, run.slo, run.settings.is_open),
        "is_complete": measured.is_complete,
        "parts": parts_json(measured),
        "server": server_json(repeat.series, measured),
        "fingerprint": repeat.plan.fingerprint,
        "series": series_json(measured),
        "itl_percentiles_s": quantiles([gap for sample in done for gap in sample.itl_s]),
        "requests": [request_row(sample, measured.started_at) for sample in measured.samples],
    }
