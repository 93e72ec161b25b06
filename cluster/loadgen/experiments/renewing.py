"""Documents of an earlier version, judged by the definitions of this one. Pure.

What a document keeps of every request is enough to make its figures again, so that a measurement
need not be repeated when the definition of a figure changes: goodput of an open loop was once
counted over the time until the last answer's end, and CPU time shared among the tokens of counted
requests alone. Whatever follows from figures (intervals, summaries, contrasts, verdicts) is made
again, too. A document of this version comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cluster.loadgen.experiments.comparing import RUN, SWEEP
from kvferry.cluster.loadgen.experiments.summary import sweep_fields
from kvferry.cluster.loadgen.goodput import Slo, goodput_json
from kvferry.cluster.loadgen.intervals import intervals_json
from kvferry.cluster.loadgen.settings import is_open_loop
from kvferry.cluster.reports.common import Json

_CPU = ("cpu_s_per_output_token", "generator_cpu_s_per_output_token")
_NEW = ("goodput_span_s", "received_tokens")


def renewed(document: Mapping[str, Any]) -> Json:
    """A document of ``loadgen run`` or ``loadgen sweep`` with its figures made again.

    Any other is left as it is. Raises KeyError or TypeError for one that holds not what it should.
    """
    schema = document.get("schema")
    if schema == RUN and document["repeats"]:
        was_ended = (document["error"] or {}).get("code") == "CANCELLED"
        return {**document, **_run(document, was_ended)}
    if schema == SWEEP and document["sweep"]:
        points = [renewed_point(point) for point in document["points"] or []]
        return {**document, **sweep_fields(document["sweep"], points)}
    return dict(document)


def renewed_point(point: Mapping[str, Any]) -> Json:
    """Likewise, one point of a sweep."""
    return {**point, "run": {**point["run"], **_run(point["run"], False)}}


def _run(run: Mapping[str, Any], was_ended: bool) -> Json:
    """``repeats``, ``results`` and ``intervals``; ``was_ended``: in the midst of the last one."""
    is_open = is_open_loop(run["config"] or {})
    last = len(run["repeats"]) - 1
    repeats = [
        _repeat(repeat, is_open, not (was_ended and number == last))
        for number, repeat in enumerate(run["repeats"])
    ]
    complete = [repeat for repeat in repeats if repeat["is_complete"]]
    found: Json = {"repeats": repeats, "intervals": intervals_json(complete)}
    if run["results"] is not None:
        median = median_repeat(complete or repeats)
        names = dict.fromkeys((*run["results"], *_NEW))
        found["results"] = {name: median[name] for name in names}
    return found


def median_repeat(repeats: Sequence[Json]) -> Json:
    """The one of median throughput (of an even number, the slower of the middle two)."""
    ordered = sorted(repeats, key=lambda repeat: float(repeat["output_tokens_per_s"]))
    return ordered[(len(ordered) - 1) // 2]


def _repeat(repeat: Mapping[str, Any], is_open: bool, is_complete: bool) -> Json:
    rows = repeat["requests"]
    slo = Slo(**repeat["slo"]) if repeat["slo"] is not None else None
    found = {
        "is_complete": is_complete,
        **repeat,
        **goodput_json(rows, slo, is_open, repeat["duration_s"]),
    }
    if "received_tokens" not in repeat:
        found["received_tokens"] = received = sum(row["output_tokens"] for row in rows)
        share = repeat["output_tokens"] / received if received else 0.0
        found |= {name: repeat[name] * share for name in _CPU if repeat[name] is not None}
    return found
