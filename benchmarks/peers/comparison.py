"""From runs to a comparison: medians, spreads and ratios, and the table of them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.launches import KVFERRY, VLLM, Case
from benchmarks.peers.load import Measured
from benchmarks.peers.machine import MachineSpeed
from benchmarks.peers.processes import Launch
from kvferry.cluster.closed_loop import Repeat, results_json
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import error_json
from kvferry.kv_cache.errors import KVFerryError


@dataclass(frozen=True, slots=True)
class Run:
    """One start of one system and what was measured of it.

    Attributes:
        before, after: the machine's speed with no server running.
        launches: what was started.
        measured: None if the system could not be measured; then ``error`` says why.
    """

    system: str
    case: Case
    round_number: int
    before: MachineSpeed
    after: MachineSpeed
    launches: Sequence[Launch]
    measured: Measured | None
    error: KVFerryError | None = None

    @property
    def machine_changed(self) -> bool:
        """The machine was another before than after: the run counts only if no other does."""
        return self.before.differs(self.after)

    @property
    def failure(self) -> KVFerryError | None:
        """Why the run does not count; None if every request of it was answered."""
        if self.error is not None or self.measured is None:
            return self.error
        repeats = [repeat for each in self.measured.repeats.values() for repeat in each]
        return next((failure for repeat in repeats for failure in repeat.failures), None)


def run_json(run: Run) -> Json:
    """A run with every repeat's figures, those of ``bench serve``."""
    measured = run.measured.repeats if run.measured is not None else {}
    return {
        "system": run.system,
        "arrangement": run.case.arrangement,
        "dtype": run.case.dtype_of(run.system),
        "round": run.round_number,
        "machine_before": _speed_json(run.before),
        "machine_after": _speed_json(run.after),
        "machine_changed": run.machine_changed,
        "error": error_json(run.failure),
        "started": [
            {"command": shlex.join(launch.command), "environment": dict(launch.settings)}
            for launch in run.launches
        ],
        "results": [
            {"concurrency": concurrency, "repeats": [results_json(each) for each in repeats]}
            for concurrency, repeats in measured.items()
        ],
        "first_tokens": run.measured.first_tokens if run.measured is not None else None,
    }


def _speed_json(speed: MachineSpeed) -> Json:
    return {"gemm_flops": speed.gemm_flops, "read_bytes_per_s": speed.read_bytes_per_s}


def compare(runs: Sequence[Run]) -> list[Json]:
    """A row per case and concurrency that both systems were measured at, in order of appearance.

    Figures are medians over the repeats of the runs that count. A ratio is one of speeds: above 1
    KVFerry is faster.
    """
    rows = []
    for case in dict.fromkeys(run.case for run in runs):
        theirs, ours = (_counting(runs, system, case) for system in (VLLM, KVFERRY))
        if not theirs or not ours:
            continue
        for concurrency in _concurrencies(theirs, ours):
            peer = _figures(theirs, concurrency)
            kvferry = _figures(ours, concurrency)
            rows.append(
                {
                    "arrangement": case.arrangement,
                    "dtype": case.dtype,
                    "peer_dtype": case.peer_dtype,
                    "concurrency": concurrency,
                    "kvferry": kvferry,
                    "peer": peer,
                    "ratio_to_peer": {
                        "output_tokens_per_s": _ratio(
                            kvferry["output_tokens_per_s"]["median"],
                            peer["output_tokens_per_s"]["median"],
                        ),
                        **{
                            name: _ratio(peer[name], kvferry[name])
                            for name in ("ttft_s", "tpot_s", "cpu_s_per_output_token")
                        },
                    },
                    "machine_changed": any(run.machine_changed for run in (*theirs, *ours)),
                    "equal_first_tokens": _equal_first_tokens(theirs[0], ours[0]),
                }
            )
    return rows


def _counting(runs: Sequence[Run], system: str, case: Case) -> list[Run]:
    """The good runs of a system; those on a machine that changed only where there are no others."""
    good = [
        run
        for run in runs
        if run.system == system and run.case == case and run.measured and run.failure is None
    ]
    return [run for run in good if not run.machine_changed] or good


def _concurrencies(theirs: Sequence[Run], ours: Sequence[Run]) -> list[int]:
    found = [run.measured.repeats for run in (*theirs, *ours) if run.measured is not None]
    return [each for each in found[0] if all(each in repeats for repeats in found)]


def _figures(runs: Sequence[Run], concurrency: int) -> Json:
    repeats: list[Repeat] = []
    for run in runs:
        if run.measured is not None:
            repeats += run.measured.repeats[concurrency]
    results = [results_json(repeat) for repeat in repeats]
    rates = [result["output_tokens_per_s"] for result in results]
    cpu = [result["cpu_s_per_output_token"] for result in results]
    return {
        "output_tokens_per_s": {
            "median": median(rates),
            "min": min(rates),
            "max": max(rates),
            "repeats": len(rates),
        },
        "ttft_s": _median_p50(results, "ttft_s"),
        "tpot_s": _median_p50(results, "tpot_s"),
        "cpu_s_per_output_token": None if None in cpu else median(cpu),
    }


def _median_p50(results: Sequence[Json], name: str) -> float | None:
    medians = [result[name]["p50"] for result in results if result[name] is not None]
    return median(medians) if medians else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _equal_first_tokens(theirs: Run, ours: Run) -> int | None:
    """How many tokens both gave to the same prompt before the first that differs."""
    if theirs.measured is None or ours.measured is None:
        return None
    pairs = list(zip(theirs.measured.first_tokens, ours.measured.first_tokens, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


def show(rows: Sequence[Json], console: Console) -> None:
    """The comparison as a table; ``*`` marks what was measured while the machine changed."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("arrangement", "weights", "in flight"):
        table.add_column(heading)
    for heading in (
        "KVFerry tok/s",
        "vLLM tok/s",
        "ratio",
        "TTFT ms, ours/theirs",
        "TPOT ms, ours/theirs",
        "CPU ms/tok, ours/theirs",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if any(row["machine_changed"] for row in rows):
        console.print("* the machine's own speed differed by more than 15 % around a run")


def cells(row: Json) -> list[str]:
    """One row of the table."""
    ours, theirs = row["kvferry"], row["peer"]
    weights = row["dtype"]
    if row["peer_dtype"] != row["dtype"]:
        weights += f" / {row['peer_dtype']}"
    mark = "*" if row["machine_changed"] else ""
    return [
        row["arrangement"],
        weights,
        str(row["concurrency"]),
        _rate(ours["output_tokens_per_s"]),
        _rate(theirs["output_tokens_per_s"]),
        _number(row["ratio_to_peer"]["output_tokens_per_s"], 2) + mark,
        *(
            f"{_ms(ours[name])} / {_ms(theirs[name])}"
            for name in ("ttft_s", "tpot_s", "cpu_s_per_output_token")
        ),
    ]


def _rate(figures: dict[str, Any]) -> str:
    return "{median:.1f} ({min:.1f}–{max:.1f})".format(**figures)


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1000, 1)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
