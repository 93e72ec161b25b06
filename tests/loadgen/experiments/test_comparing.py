"""A comparison says what makes it less than one of like with like, and leaves out what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.loadgen.experiments.arrangements import parse_arrangements
from kvferry.cluster.loadgen.experiments.comparing import compare, failed_only_in_b
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis, Sweep
from kvferry.cluster.loadgen.settings import Settings
from tests.cluster import documents
from tests.loadgen.experiments.making import repeat, run_document
from tests.loadgen.experiments.sweeps import FakeClusters, sweep_document

Json = dict[str, Any]
ERROR: Json = {"code": "INTERNAL", "type": "Internal", "message": "2 of 8 requests failed"}


def run_of(*repeats: Json, **other: Any) -> Json:
    return run_document(repeats or [repeat(n) for n in range(3)], **other)


def sweep(failed_label: str | None = None, rounds: int = 2) -> Json:
    document = sweep_document(
        Sweep(
            parse_arrangements("1x2"),
            Settings(repeats=2, num_requests=4, slo_ttft=1.0),
            Axis("rate", (1, 3)),
            rounds=rounds,
        ),
        FakeClusters(),
    )
    for point in document["points"]:
        if point["label"] == failed_label:
            point |= {"ok": False, "error": ERROR}
    return document


def test_a_point_at_which_requests_failed_is_left_out_and_named() -> None:
    found = compare(sweep(), sweep("1x2, rate 3"))
    assert [pair["label"] for pair in found["pairs"]] == ["1x2, rate 1"]
    assert found["only_in_a"] == ["1x2, rate 3"]
    assert found["failed"] == [
        {"side": "b", "label": "1x2, rate 3", "message": "2 of 8 requests failed"}
    ]
    assert "1x2, rate 3 is left out in B: 2 of 8 requests failed." in found["words"]


def test_a_round_that_failed_is_not_compared() -> None:
    document = sweep()
    document["points"][3] |= {"ok": False, "error": ERROR}  # the second round of rate 3
    found = compare(sweep(), document)
    numbers = {pair["label"]: pair["figures"][0]["num_b"] for pair in found["pairs"]}
    assert numbers == {"1x2, rate 1": 4, "1x2, rate 3": 2}


def test_a_run_that_failed_or_was_ended_is_compared_and_that_is_said() -> None:
    lost = [{**repeat(n), "failed": 2, "completed": 2} for n in range(3)]
    found = compare(run_of(), run_of(*lost, ok=False, error=ERROR))
    assert "the run failed or was ended early in B: 2 of 8 requests failed." in found["words"]
    row = next(row for row in found["pairs"][0]["figures"] if row["figure"] == "failed_share")
    assert (row["a"], row["b"], row["better"]) == (0.0, 0.5, "a")


def test_an_interrupted_repeat_is_not_compared() -> None:
    cut = [*(repeat(n) for n in range(2)), {**repeat(2), "is_complete": False}]
    found = compare(run_of(), run_of(*cut))
    assert found["pairs"][0]["figures"][0]["num_b"] == 2


def test_what_fails_more_often_is_worse_beyond_noise() -> None:
    many = [{**repeat(n), "failed": 20 + n % 2, "completed": 20 - n % 2} for n in range(5)]
    found = compare(run_of(*(repeat(n) for n in range(5))), run_of(*many))
    row = next(row for row in found["pairs"][0]["figures"] if row["figure"] == "failed_share")
    assert row["better"] == "a"


def test_goodput_under_different_slos_is_not_compared() -> None:
    stricter = [{**repeat(n), "slo": {"ttft_s": 0.5, "tpot_s": 0.1}} for n in range(3)]
    found = compare(run_of(), run_of(*stricter))
    said = "Not the same SLO: the run: ttft 1 s and ttft 0.5 s with tpot 0.1 s; goodput is not"
    assert any(line.startswith(said) for line in found["words"])
    names = {row["figure"] for row in found["pairs"][0]["figures"]}
    assert not names & {"goodput_per_s", "slo_fraction"}
    assert "ttft_s.p50" in names


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"config": {"concurrency": 8}}, {"config": {"concurrency": 16}}, "concurrency 8 and 16"),
        (
            {"config": {"ignore_eos": True}},
            {"config": {"ignore_eos": False}},
            "ignore_eos True and False",
        ),
        (
            {"target": {"model_name": "a"}},
            {"target": {"model_name": "b"}},
            "model a and b",
        ),
        ({"config": {"temperature": 0.0}}, {"config": {"temperature": 1.0}}, "temperature 0.0"),
    ],
)
def test_settings_that_equal_plans_do_not_show_are_said(a: Json, b: Json, said: str) -> None:
    found = compare(run_of(**a), run_of(**b))
    assert any(f"Not the same settings: the run: {said}" in line for line in found["words"])
    assert compare(run_of(**a), run_of(**a))["words"][0].startswith("the run: ")


def write(path: Path, document: Json) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_fail_if_worse_does_not_pass_over_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "a", sweep()), write(tmp_path / "b", sweep("1x2, rate 3"))
    argv = ["loadgen", "compare", good, bad]
    assert main(argv) == 0
    assert "1x2, rate 3 is left out in B" in capsys.readouterr().out
    assert main([*argv, "--fail-if-worse", "50", "--json"]) == 1
    document = documents.parse(capsys.readouterr().out)
    assert document["error"]["message"] == "1x2, rate 3 failed in B: 2 of 8 requests failed"
    assert main(["loadgen", "compare", bad, bad, "--fail-if-worse", "50"]) == 0
    assert main(["loadgen", "compare", bad, good, "--fail-if-worse", "50"]) == 0
    capsys.readouterr()
    assert failed_only_in_b([]) == []
