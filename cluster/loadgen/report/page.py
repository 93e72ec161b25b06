"""The report: one HTML page that asks nobody for anything. Pure.

Pictures are SVG elements, there is no script, and a policy in its head forbids every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.comparing import RUN, SWEEP
from kvferry.cluster.loadgen.report import sections
from kvferry.cluster.loadgen.report.curves import (
    by_place,
    cases_of,
    distributions,
    over_loads,
    over_time,
)
from kvferry.cluster.loadgen.report.svg import draw

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:1.5em auto;padding:0 1em;
color:#1b1b1b;background:#fff}
h1{font-size:1.5em}h2{font-size:1.2em;border-bottom:1px solid #ccc;margin-top:1.8em}
h3{font-size:1em;margin-bottom:.2em}
table{border-collapse:collapse;font-size:13px}.w{overflow-x:auto}
th,td{padding:.15em .6em;text-align:right;border-bottom:1px solid #e4e4e4}
th:first-child{text-align:left;font-weight:600}td:nth-child(2):last-child{text-align:left}
.c{display:grid;grid-template-columns:repeat(auto-fit,minmax(360px,1fr));gap:.6em}
.q{font-style:italic}.v{background:#eef5fb;border-left:4px solid #0072B2;padding:.6em 1em}
.f{background:#fdf0e6;border-left:4px solid #D55E00;padding:.4em 1em}
svg{width:100%;height:auto;font:12px sans-serif}svg .t{font-size:13px;font-weight:600}
svg .e{text-anchor:end}svg .m{text-anchor:middle}svg .g{stroke:#e4e4e4;fill:none}
svg .a{stroke:#555;fill:none}svg .l{fill:none;stroke-width:1.8}
pre{background:#f6f6f6;padding:.6em;overflow-x:auto;font-size:12px}
summary{cursor:pointer;font-weight:600;margin:.4em 0}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report(document: Mapping[str, Any]) -> str:
    """The page of a document of ``loadgen run`` or ``loadgen sweep``. Raises BadLoad."""
    if document.get("schema") not in (RUN, SWEEP):
        raise BadLoad(f"schema: got {document.get('schema')!r}, wanted {RUN} or {SWEEP}")
    cases = cases_of(document)
    title = _title(document)
    body = [f"<h1>{escape(title)}</h1>", sections.question(document)]
    body.append(sections.failed_points(document))
    has_figures = bool(cases or document.get("summary"))
    if not has_figures:
        body.append(sections.paragraph("Nothing was measured.", "f"))
    for name, heading, content in (
        ("verdict", "Verdict", sections.verdicts(document)),
        ("goodput", "Against load", _charts([draw(each) for each in over_loads(document)])),
        ("contrasts", "What the variants differ in", sections.contrasts(document)),
        ("figures", "Figures", sections.figures(document, cases) if has_figures else ""),
        ("drains", "After bursts", sections.drains(document)),
        ("latency", "Latencies and time", _places(document)),
        ("parts", "Parts of the first token and of the gap after it", sections.parts(cases)),
        ("server", "What the clusters counted", sections.server(cases)),
        ("ends", "How requests ended", sections.ends(cases) if cases else ""),
        ("origin", "Machine, commit, command", sections.origin(document)),
        ("again", "To repeat it", sections.again(document)),
    ):
        if content:
            body.append(f'<section id="{name}"><h2>{heading}</h2>{content}</section>')
    body.append(
        sections.paragraph(
            "Times are the client's. ± and bars: 95% confidence intervals, Student's t over "
            "repeats. Curves over time are of the repeat of median throughput."
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<link rel="icon" href="data:,"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _title(document: Mapping[str, Any]) -> str:
    if document["schema"] == RUN:
        workload = document.get("workload") or {}
        return f"KVFerry load: {workload.get('kind', 'nothing measured')}"
    sweep = document["sweep"] or {}
    name = sweep.get("recipe") or sweep.get("settings", {}).get("workload")
    return f"KVFerry sweep: {name}, {', '.join(sweep.get('arrangements', ()))}"


def _charts(drawn: list[str]) -> str:
    return f'<div class="c">{"".join(drawn)}</div>' if drawn else ""


def _places(document: Mapping[str, Any]) -> str:
    """Plots of each variant and load, folded but for the last of each variant."""
    places = by_place(cases_of(document))
    last = dict(places.keys())  # load by variant
    parts = []
    for place, cases in places.items():
        charts = [*distributions(place, cases), *over_time(place, cases)]
        is_open = ' open="open"' if last[place[0]] == place[1] else ""
        name = ", ".join(part for part in place if part)
        drawn = _charts([draw(each) for each in charts])
        parts.append(f"<details{is_open}><summary>{escape(name)}</summary>{drawn}</details>")
    return "".join(parts)
