"""The parts of a report as HTML: tables and words. All text that comes from outside is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import yaml

from kvferry.cluster.loadgen.experiments.comparing import SWEEP
from kvferry.cluster.loadgen.experiments.figures import BY_NAME, Figure
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from kvferry.cluster.loadgen.report.curves import Case

_SHOWN = (
    *("goodput_per_s", "slo_fraction", "output_tokens_per_s", "ttft_s.p50", "ttft_s.p99"),
    *("tpot_s.p50", "tpot_s.p99", "itl_s.p99", "e2e_s.p50", "cpu_s_per_output_token"),
)
_COUNTED = ("completed", "failed", "cancelled", "unfinished", "skipped", "not_counted")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text, which is escaped; the first of a row is its heading."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="w"><table><tr>{head}</tr>{body}</table></div>'


def paragraph(text: str, name: str = "") -> str:
    """Escaped; ``name`` is a class."""
    return f'<p class="{name}">{escape(text)}</p>' if name else f"<p>{escape(text)}</p>"


def origin(document: Mapping[str, Any]) -> str:
    """Where, when, by which code and which command it was measured."""
    machine = document["machine"] or {}
    memory = machine.get("memory_bytes")
    rows = [
        ("command", document["command"] or ""),
        ("commit", document["commit"] or "unknown"),
        ("version", document["version"] or "unknown"),
        ("written", document["created_at"] or ""),
        ("processor", f"{machine.get('cpu')}, {machine.get('isa')}, {machine.get('cores')} cores"),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
        ("system", f"{machine.get('os')}; Python {machine.get('python')}"),
    ]
    if document["schema"] == SWEEP:
        points = document["points"] or []
        commits = sorted({str(point["commit"]) for point in points})
        kinds = {json.dumps(point["machine"], sort_keys=True) for point in points}
        rows.append(("measured at commit", ", ".join(commits)))
        if len(kinds) > 1:
            rows.append(("machines", f"{len(kinds)} different ones: figures do not go together"))
    else:
        target = document.get("target") or {}
        rows.append(("target", f"{target.get('kind')} at {target.get('endpoint')}"))
        rows.append(("model", str(target.get("model_name"))))
    return table(("", ""), rows)


def question(document: Mapping[str, Any]) -> str:
    """What a recipe asks."""
    name = (document.get("sweep") or {}).get("recipe")
    return paragraph(f"{name}: {RECIPES[name].question}", "q") if name in RECIPES else ""


def verdicts(document: Mapping[str, Any]) -> str:
    """Each in words, and what it rests on."""
    parts = []
    for verdict in document.get("verdicts") or []:
        words = ": ".join(part for part in (verdict["variant"], verdict["words"]) if part)
        parts.append(paragraph(words, "v"))
        rows = [
            (
                f"{row['load']}, {row['alternative']}",
                *(f"{row[key]:.4g}" for key in ("a", "b", "difference", "low", "high")),
                {"a": row["alternative"], "b": verdict["disaggregated"]}.get(row["better"], "-"),
            )
            for row in verdict["rows"]
        ]
        name = verdict["disaggregated"]
        headings = ("good requests/s", "beside", name, "difference", "low", "high", "better")
        if rows:
            parts.append(table(headings, rows))
            parts.append(
                paragraph(f"Intervals hold with {verdict['level']:.2%} each, 95% all together.")
            )
    return "".join(parts)


def contrasts(document: Mapping[str, Any]) -> str:
    """Variants beside each other, in words."""
    parts = []
    for contrast in document.get("contrasts") or []:
        sides = f"A: {contrast['a_variant']}; B: {contrast['b_variant']}"
        parts.append(f"<h3>{escape(contrast['label'])}</h3>{paragraph(sides)}<ul>")
        parts += [
            f"<li>{escape(row['words'])}</li>"
            for row in contrast["figures"]
            if row["figure"] in _SHOWN
        ]
        parts.append("</ul>")
    return "".join(parts)


def figures(document: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """Means with their intervals."""
    shown = [BY_NAME[name] for name in _SHOWN]
    headings = ["", "repeats", *(f"{each.label}, {each.unit}" for each in shown)]
    if document["schema"] == SWEEP:
        rows = [
            (
                row["label"],
                str(row["num_repeats"]),
                *(_mean(row["figures"][each.name], each) for each in shown),
            )
            for row in document["summary"] or []
        ]
        return table(headings, rows)
    rows = []
    for case in cases:
        for number, repeat in enumerate(case.repeats, start=1):
            values = [(each, each.of(repeat)) for each in shown]
            cells = ("-" if v is None else f"{v * each.factor:.4g}" for each, v in values)
            rows.append((f"repeat {number}", "1", *cells))
    return table(headings, rows)


def _mean(figure: Mapping[str, Any] | None, about: Figure) -> str:
    if figure is None:
        return "-"
    mean = f"{figure['mean'] * about.factor:.4g}"
    if figure["low"] is None:
        return mean
    return f"{mean} ± {(figure['high'] - figure['mean']) * about.factor:.2g}"


def ends(cases: Sequence[Case]) -> str:
    """How requests ended, and what failed."""
    rows = []
    for case in cases:
        kinds: dict[str, int] = {}
        for repeat in case.repeats:
            for name, count in repeat["failures"].items():
                kinds[name] = kinds.get(name, 0) + count
        counts = (str(sum(repeat[name] for repeat in case.repeats)) for name in _COUNTED)
        failures = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "-"
        rows.append((_name(case), *counts, failures))
    return table(("", *(name.replace("_", " ") for name in _COUNTED), "failures"), rows)


def failed_points(document: Mapping[str, Any]) -> str:
    """Points at which requests failed."""
    failed = [point for point in document.get("points") or [] if not point["ok"]]
    return "".join(
        paragraph(
            f"Requests failed, so only goodput and the share within the SLO hold it: "
            f"{each['label']}: {each['error']['message']}",
            "f",
        )
        for each in failed
    )


def drains(document: Mapping[str, Any]) -> str:
    """After bursts: blocks free, queue empty."""
    rows = []
    for row in document.get("summary") or []:
        found = row["drains"]
        if found is None:
            continue
        cells = []
        for name in ("reclaim_after_cancel_s", "reclaim_after_answer_s", "queue_recovery_s"):
            each = found[name]
            text = "-"
            if each is not None:
                text = f"p50 {each['p50']:.2f}, max {each['max']:.2f} (n {each['n']})"
            cells.append(text)
        unseen = f"{found['num_not_seen_empty']} of {found['num_bursts']}"
        rows.append((row["label"], *cells, unseen))
    if not rows:
        return ""
    headings = ("s", "blocks free after a cancel", "after an answer", "queue empty", "never empty")
    return table(headings, rows)


def server(cases: Sequence[Case]) -> str:
    """What the clusters counted in their median repeats."""
    rows = []
    for case in cases:
        told = case.median["server"]
        if told is None:
            continue
        totals, looks = told["totals"], told["series"]
        most = max((max(each["kv_usage"].values(), default=0) for each in looks), default=0.0)
        rows.append(
            (
                _name(case),
                f"{most:.0%}",
                str(max((each["num_waiting"] for each in looks), default=0)),
                str(totals["preemptions_recompute"] + totals["preemptions_offload"]),
                str(totals["recomputed_tokens_preemption"] + totals["recomputed_tokens_recovery"]),
                f"{totals['blocks_moved']} ({totals['bytes_moved'] / 1e6:.1f} MB)",
                str(totals["blocks_reused"]),
                "/".join(str(totals[f"hit_tokens_{each}"]) for each in ("local", "moved", "host")),
            )
        )
    headings = (
        *("", "KV use, most", "waiting, most", "preemptions", "recomputed tokens"),
        *("blocks moved", "reused", "hit tokens: local/moved/host"),
    )
    return table(headings, rows) if rows else ""


def parts(cases: Sequence[Case]) -> str:
    """Means of the parts of TTFT and of the gap to token 2, in median repeats."""
    rows = []
    names: list[str] = []
    for case in cases:
        found = case.median["parts"]
        names = list(found)
        means = [found[name] for name in names]
        if any(each is not None for each in means):
            cells = ("-" if each is None else f"{each['mean'] * 1000:.1f}" for each in means)
            rows.append((_name(case), *cells))
    headings = ("ms, mean", *(name.removesuffix("_s") for name in names))
    return table(headings, rows) if rows else ""


def again(document: Mapping[str, Any]) -> str:
    """Settings and configurations: all that a repetition needs."""
    if document["schema"] != SWEEP:
        return _folded("settings", json.dumps(document["config"], indent=1))
    made = [_folded("sweep", json.dumps(document["sweep"], indent=1))]
    seen: dict[str, str] = {}
    for point in document["points"] or []:
        name = ", ".join(part for part in (point["variant"], point["arrangement"]) if part)
        seen.setdefault(name, yaml.safe_dump(point["cluster_config"], sort_keys=True))
    made += [_folded(f"kvferry serve --config: {name}", text) for name, text in seen.items()]
    return "".join(made)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _name(case: Case) -> str:
    load = case.load if case.value is not None or not case.variant else ""
    return ", ".join(part for part in (case.variant, case.series, load) if part)
