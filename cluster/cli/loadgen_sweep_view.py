"""How ``kvferry loadgen sweep`` shows a document to people."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvferry.cluster.loadgen.experiments.figures import BY_NAME
from kvferry.cluster.reports.common import Json

_SHOWN = (
    *("goodput_per_s", "slo_fraction", "output_tokens_per_s"),
    *("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99"),
)


def show(fields: Json, path: Path, console: Console) -> None:
    """A table of means and intervals, contrasts, verdicts."""
    shown = [BY_NAME[name] for name in _SHOWN]
    headings = ("", "repeats", *(f"{each.label} {each.unit}" for each in shown))
    table = Table(*headings, box=None, pad_edge=False)
    for row in fields["summary"]:
        cells = []
        for figure in shown:
            found = row["figures"][figure.name]
            text = "-" if found is None else f"{found['mean'] * figure.factor:.4g}"
            if found is not None and found["low"] is not None:
                text += f" ±{(found['high'] - found['mean']) * figure.factor:.2g}"
            cells.append(text)
        table.add_row(row["label"], str(row["num_repeats"]), *cells)
    console.print(table)
    for point in fields["points"]:
        if not point["ok"]:
            words = f"{point['label']}, round {point['round'] + 1}: {point['error']['message']}"
            console.print(f"in goodput only, for requests failed: {words}", markup=False)
    for row in fields["summary"]:
        if row["drains"] is not None:
            console.print(_drain(row), markup=False)
    for contrast in fields["contrasts"]:
        console.print(f"{contrast['label']} (A {contrast['a_variant']}, B {contrast['b_variant']})")
        for figure in contrast["figures"]:
            if figure["figure"] in _SHOWN:
                console.print(f"  {figure['words']}", markup=False)
    for verdict in fields["verdicts"]:
        words = ": ".join(part for part in (verdict["variant"], verdict["words"]) if part)
        console.print(words, markup=False)
    console.print(f"{len(fields['points'])} points in {path}", markup=False)


def _drain(row: Json) -> str:
    found, said = row["drains"], []
    for name, text in (
        ("reclaim_after_cancel_s", "blocks free after a cancel"),
        ("reclaim_after_answer_s", "after an answer"),
        ("queue_recovery_s", "queue empty after the last sending"),
    ):
        if found[name] is not None:
            said.append(f"{text}: p50 {found[name]['p50']:.2f} s, max {found[name]['max']:.2f} s")
    return f"{row['label']}: {'; '.join(said)}"
