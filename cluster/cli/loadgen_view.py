"""How ``kvferry loadgen run`` shows a document to people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvferry.cluster.reports.common import Json

LAG_S = 0.005
"""A generator that is later than this (99th percentile) does not send the load that it reports."""

_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def show(fields: Json, console: Console) -> None:
    """What was sent, what came of it, times, and what the server said."""
    results, workload = fields["results"], fields["workload"]
    if results is None:
        console.print("nothing was measured")
        return
    console.print(_sent(workload))
    console.print(_came(results))
    if results["failures"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in results["failures"].items())
        console.print(f"failed: {kinds}; the first: {results['first_error']['message']}")
    if results["goodput_per_s"] is not None:
        console.print(
            f"{results['goodput_per_s']:.2f} good requests/s "
            f"({results['slo_fraction'] or 0:.0%} within {_slo(results['slo'])})"
        )
    console.print(_times(fields))
    lag = results["schedule_lag_s"]
    if lag is not None and lag["p99"] > LAG_S:
        console.print(
            f"late: 1 % of requests were sent {lag['p99'] * 1000:.0f} ms or more after their time"
        )
    for line in (*_intervals(fields["intervals"]), *_server(fields["server"])):
        console.print(line)
    counted = results["tokens_counted_by"]
    if set(counted) - {"ids"}:
        how = ", ".join(f"{count} by {name}" for name, count in counted.items())
        console.print(
            f"tokens counted: {how}; where a chunk holds several tokens, itl is that of chunks"
        )


def _sent(workload: Json) -> str:
    loop = (
        f"concurrency {workload['concurrency']}"
        if workload["concurrency"] is not None
        else f"{workload['rate']:g} sessions/s"
        if workload["rate"] is not None
        else "at the trace's times"
    )
    words = [f"{workload['kind']}: {workload['num_requests']} requests", loop]
    if workload["num_sessions"] != workload["num_requests"]:
        words.append(f"{workload['num_sessions']} sessions")
    for name, text in (("new_tokens", "new in"), ("wanted_tokens", "out")):
        if workload[name] is not None:
            words.append(f"{workload[name]['mean']:.0f} {text}")
    if workload["reused_fraction"]:
        words.append(f"{workload['reused_fraction']:.0%} of first prompts seen before")
    return ", ".join(words)


def _came(results: Json) -> str:
    said = (
        f"{results['output_tokens_per_s']:.1f} output tokens/s, "
        f"{results['requests_per_s'] or 0:.2f} requests/s over {results['duration_s']:.1f} s; "
        f"{results['completed']} completed, {results['failed']} failed"
    )
    for name in ("cancelled", "unfinished", "skipped", "not_counted"):
        if results[name]:
            said += f", {results[name]} {name.replace('_', ' ')}"
    for name, who in (
        ("cpu_s_per_output_token", "server"),
        ("generator_cpu_s_per_output_token", "generator"),
    ):
        if results[name] is not None:
            said += f"; {results[name] * 1000:.2f} CPU ms per token ({who})"
    return said


def _slo(slo: Json) -> str:
    names = ("ttft_s", "tpot_s")
    kept = [f"{n.removesuffix('_s')} {slo[n]:g} s" for n in names if slo[n] is not None]
    return ", ".join(kept)


def _times(fields: Json) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("ms")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    results, parts = fields["results"], fields["parts"]
    rows = [(n, results[n]) for n in ("ttft_s", "ttst_s", "tpot_s", "itl_s", "e2e_s")]
    rows += [(f"  {name}", parts[name]) for name in parts]
    rows.append(("schedule lag", results["schedule_lag_s"]))
    for name, dist in rows:
        if dist is not None:
            cells = (f"{dist[key] * 1000:.1f}" for key in _COLUMNS)
            table.add_row(name.removesuffix("_s"), *cells)
    return table


def _intervals(intervals: Json | None) -> list[str]:
    if intervals is None:
        return []
    lines = []
    for name, unit, factor in (
        ("output_tokens_per_s", "output tokens/s", 1),
        ("goodput_per_s", "good requests/s", 1),
    ):
        if intervals[name] is not None:
            lines.append(f"{_between(intervals[name], factor)} {unit}")
    for name in ("ttft_s", "tpot_s"):
        for key in ("p50", "p99"):
            if intervals[name][key] is not None:
                label = name.removesuffix("_s")
                lines.append(f"{_between(intervals[name][key], 1000)} ms {label} {key}")
    return [f"{intervals['level']:.0%} intervals ({intervals['method']}): {'; '.join(lines)}"]


def _between(interval: Json, factor: float) -> str:
    mean, low, high = (interval[key] * factor for key in ("mean", "low", "high"))
    return f"{mean:.4g} ({low:.4g} to {high:.4g})"


def _server(server: Json | None) -> list[str]:
    if server is None:
        return []
    totals, series = server["totals"], server["series"]
    most = max((max(row["kv_usage"].values(), default=0.0) for row in series), default=0.0)
    return [
        f"server: KV use up to {most:.0%}, running up to "
        f"{max((row['num_running'] for row in series), default=0)}, waiting up to "
        f"{max((row['num_waiting'] for row in series), default=0)}; "
        f"{totals['blocks_moved']} blocks ({totals['bytes_moved'] / 1e6:.1f} MB) moved, "
        f"{totals['blocks_reused']} reused; hits {totals['hit_tokens_local']} local, "
        f"{totals['hit_tokens_moved']} moved, {totals['hit_tokens_host']} host tokens; "
        f"{totals['preemptions_recompute'] + totals['preemptions_offload']} preemptions, "
        f"{totals['recomputed_tokens_preemption'] + totals['recomputed_tokens_recovery']} "
        "tokens recomputed"
    ]
