"""Medians, spreads and ratios are over the runs that count, and say which is the faster."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers.comparison import Run, cells, compare, run_json, show
from benchmarks.peers.completions_api import PeerAnswer, PeerFailed
from benchmarks.peers.launches import KVFERRY, VLLM, Case
from benchmarks.peers.load import Measured
from benchmarks.peers.machine import MachineSpeed
from benchmarks.peers.processes import Launch
from kvferry.cluster.closed_loop import Repeat

CASE = Case("colocated", "float32")
SPEED = MachineSpeed(1e11, 1e10)
SLOWER = MachineSpeed(1e11, 0.8e10)


def repeat(duration_s: float, ttft_s: float = 0.5, tpot_s: float = 0.05) -> Repeat:
    """One request of 11 tokens and its times."""
    answer = PeerAnswer(tuple(range(11)), ttft_s, (tpot_s,) * 10, duration_s)
    return Repeat([answer], duration_s=duration_s, cpu_s=1.1 * duration_s)


def run(
    system: str, *repeats: Repeat, case: Case = CASE, after: MachineSpeed = SPEED, **more: Any
) -> Run:
    measured = Measured({8: list(repeats)}, more.pop("first_tokens", [1, 2, 3]))
    return Run(system, case, 0, SPEED, after, [], measured, **more)


def test_a_ratio_above_one_says_that_kvferry_is_faster() -> None:
    theirs = run(VLLM, repeat(2.0, ttft_s=1.0, tpot_s=0.1))
    ours = run(KVFERRY, repeat(1.0, ttft_s=0.5, tpot_s=0.025))
    (row,) = compare([theirs, ours])
    assert row["ratio_to_peer"]["output_tokens_per_s"] == pytest.approx(2)
    assert row["ratio_to_peer"]["ttft_s"] == pytest.approx(2)
    assert row["ratio_to_peer"]["tpot_s"] == pytest.approx(4)
    assert row["ratio_to_peer"]["cpu_s_per_output_token"] == pytest.approx(2)
    assert row["concurrency"] == 8


def test_figures_are_medians_over_the_repeats_of_all_runs() -> None:
    theirs = run(VLLM, repeat(1.0))
    ours = [run(KVFERRY, repeat(1.0), repeat(2.0)), run(KVFERRY, repeat(4.0))]
    (row,) = compare([theirs, *ours])
    assert row["kvferry"]["output_tokens_per_s"] == {
        "median": 5.5,
        "min": 2.75,
        "max": 11.0,
        "repeats": 3,
    }


def test_runs_on_a_machine_that_changed_count_only_alone() -> None:
    theirs = run(VLLM, repeat(1.0))
    changed, good = run(KVFERRY, repeat(9.0), after=SLOWER), run(KVFERRY, repeat(1.0))
    (row,) = compare([theirs, changed, good])
    assert row["kvferry"]["output_tokens_per_s"]["repeats"] == 1
    assert row["kvferry"]["output_tokens_per_s"]["median"] == 11.0
    assert not row["machine_changed"]
    (row,) = compare([theirs, changed])
    assert row["machine_changed"]


@pytest.mark.parametrize("other", [(0.86e11, 1e10), (1e11, 1.17e10)])
def test_the_machine_may_differ_by_less_than_15_percent(other: tuple[float, float]) -> None:
    assert not SPEED.differs(MachineSpeed(*other))


@pytest.mark.parametrize("other", [(0.84e11, 1e10), (1e11, 0.84e10), (1.2e11, 1e10)])
def test_the_machine_may_not_differ_by_more_in_either_direction(
    other: tuple[float, float],
) -> None:
    assert SPEED.differs(MachineSpeed(*other))
    assert MachineSpeed(*other).differs(SPEED)


def test_a_run_with_a_failed_request_does_not_count() -> None:
    broken = repeat(1.0)
    broken.failures.append(PeerFailed("cut"))
    runs = [run(VLLM, broken), run(KVFERRY, repeat(1.0))]
    assert compare(runs) == []
    assert run_json(runs[0])["error"]["message"] == "cut"


def test_a_system_that_did_not_start_has_no_figures() -> None:
    failed = Run(VLLM, CASE, 0, SPEED, SPEED, [], None, PeerFailed("ended with 1"))
    assert compare([failed, run(KVFERRY, repeat(1.0))]) == []
    document = run_json(failed)
    assert document["results"] == []
    assert document["error"]["message"] == "ended with 1"


def test_cases_are_not_mixed() -> None:
    other = Case("disaggregated", "int8")
    runs = [run(s, repeat(1.0), case=case) for case in (CASE, other) for s in (VLLM, KVFERRY)]
    rows = compare(runs)
    assert [(row["arrangement"], row["dtype"], row["peer_dtype"]) for row in rows] == [
        ("colocated", "float32", "float32"),
        ("disaggregated", "int8", "bfloat16"),
    ]


@pytest.mark.parametrize(
    ("theirs", "equal"), [([1, 2, 3], 3), ([1, 2, 9], 2), ([9, 2, 3], 0), ([1], 1)]
)
def test_the_first_answers_are_compared_token_by_token(theirs: list[int], equal: int) -> None:
    runs = [run(VLLM, repeat(1.0), first_tokens=theirs), run(KVFERRY, repeat(1.0))]
    assert compare(runs)[0]["equal_first_tokens"] == equal


def test_a_run_says_what_was_started() -> None:
    started = run(VLLM, repeat(1.0))
    launch = Launch("vllm", ["vllm", "serve", "a b"], {"A": "1"}, {"HOME": "h"})
    document = run_json(Run(VLLM, CASE, 0, SPEED, SPEED, [launch], started.measured))
    assert document["started"] == [{"command": "vllm serve 'a b'", "environment": {"A": "1"}}]


def shown(*runs: Run) -> str:
    out = io.StringIO()
    show(compare(runs), Console(file=out, width=200, highlight=False))
    return out.getvalue()


def test_the_table_has_a_line_per_comparison() -> None:
    text = shown(run(VLLM, repeat(2.0)), run(KVFERRY, repeat(1.0), repeat(1.1)))
    assert "10.5 (10.0–11.0)" in text
    assert "5.5 (5.5–5.5)" in text
    assert "500.0 / 500.0" in text
    assert "machine" not in text


def test_the_table_marks_what_was_measured_on_a_changing_machine() -> None:
    text = shown(run(VLLM, repeat(2.0), after=SLOWER), run(KVFERRY, repeat(1.0)))
    assert "2.00*" in text
    assert "more than 15 %" in text


def test_types_that_differ_are_both_named() -> None:
    case = Case("colocated", "int8")
    (row,) = compare([run(VLLM, repeat(1.0), case=case), run(KVFERRY, repeat(1.0), case=case)])
    assert cells(row)[1] == "int8 / bfloat16"
