"""Documents of an earlier version are judged anew, from the requests that they keep."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.loadgen.experiments.arrangements import parse_arrangements
from kvferry.cluster.loadgen.experiments.renewing import renewed
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis, Sweep
from kvferry.cluster.loadgen.experiments.sweeping import take_up
from kvferry.cluster.loadgen.goodput import Slo, goodput_json
from kvferry.cluster.loadgen.settings import Settings
from tests.cluster import documents
from tests.loadgen.experiments.making import repeat, request, run_document
from tests.loadgen.experiments.sweeps import FakeClusters, sweep_document, sweeping

Json = dict[str, Any]
OPEN: Json = {"workload": "random", "rate": 1.0}


def requests(last_s: float) -> list[Json]:
    """Four, a second apart, all good; the last one's answer takes so long."""
    return [request(n, 0.1, last_s if n == 3 else 0.5, intended_s=float(n)) for n in range(4)]


def test_goodput_of_an_open_loop_does_not_depend_on_the_last_answer() -> None:
    slo = Slo(ttft_s=1.0)
    quick, slow = (goodput_json(requests(s), slo, True, 3 + s) for s in (0.5, 5.0))
    assert quick == slow == {"goodput_per_s": 1.0, "goodput_span_s": 4.0, "slo_fraction": 1.0}
    closed = goodput_json(requests(5.0), slo, False, 8.0)
    assert closed["goodput_per_s"] == 0.5


def test_goodput_is_over_begins_of_sessions_that_count() -> None:
    rows = requests(0.5)
    later = request(3, 0.1, 0.5, turn=1, intended_s=50.0)
    early = request(9, 0.1, 0.5, intended_s=-20.0, is_counted=False)
    failed = request(3, 0.1, 0.5, intended_s=3.0, turn=2, outcome="failed")
    found = goodput_json([early, *rows, later, failed], Slo(ttft_s=1.0), True, 60.0)
    assert found == {"goodput_per_s": 5 / 4, "goodput_span_s": 4.0, "slo_fraction": 5 / 6}
    one = goodput_json(rows[:1], Slo(ttft_s=1.0), True, 2.0)
    assert one["goodput_per_s"] == 0.5  # a single begin spans no time
    assert goodput_json(rows, None, True, 2.0)["goodput_per_s"] is None


def old(document: Json) -> Json:
    """As an earlier version wrote it: without what it did not know, goodput over the duration."""
    made = copy.deepcopy(document)
    runs = [made] if "points" not in made else [point["run"] for point in made["points"]]
    for run in runs:
        for each in [*run["repeats"], *([run["results"]] if run["results"] else [])]:
            for name in ("goodput_span_s", "received_tokens", "is_complete"):
                each.pop(name, None)
            if each["goodput_per_s"] is not None:
                each["goodput_per_s"] = each["completed"] / each["duration_s"]
    return made


def test_figures_of_a_run_are_made_again() -> None:
    repeats = [repeat(n) | {"requests": requests(n + 1.0), "duration_s": n + 4.0} for n in (0, 1)]
    cut = {"outcome": "cancelled", "output_tokens": 16}
    repeats[1]["requests"] = [*repeats[1]["requests"], request(4, 0.1, 0.2, turn=1, **cut)]
    document = old(run_document(repeats, config=OPEN))
    assert document["repeats"][1]["goodput_per_s"] == 0.8
    found = renewed(document)
    assert [each["goodput_per_s"] for each in found["repeats"]] == [1.0, 1.0]
    assert found["results"]["goodput_per_s"] == 1.0
    assert "requests" in found["results"]  # the fixture's results are a whole repeat
    assert found["intervals"]["goodput_per_s"]["mean"] == 1.0
    # 16 of 32 tokens were counted ones, and the same time goes to all of them now
    assert [each["received_tokens"] for each in found["repeats"]] == [16, 32]
    assert found["repeats"][0]["cpu_s_per_output_token"] == pytest.approx(0.01)
    assert found["repeats"][1]["cpu_s_per_output_token"] == pytest.approx(0.005)
    assert renewed(found) == found
    assert renewed({"schema": "kvferry.demo/1"}) == {"schema": "kvferry.demo/1"}


def test_an_interrupted_run_s_last_repeat_is_not_complete() -> None:
    error = {"code": "CANCELLED", "type": "Cancelled", "message": "interrupted"}
    document = old(run_document([repeat(n) for n in range(3)], ok=False, error=error))
    found = renewed(document)
    assert [each["is_complete"] for each in found["repeats"]] == [True, True, False]
    assert found["intervals"]["goodput_per_s"]["n"] == 2


def sweep() -> Sweep:
    settings = Settings(repeats=3, num_requests=4, slo_ttft=1.0)
    return Sweep(parse_arrangements("1x2,1P+1D"), settings, Axis("rate", (1,)), rounds=2)


def kept() -> Json:
    """All requests good on both sides, and longer last answers on one: once 'do not'."""
    document = sweep_document(sweep(), FakeClusters(goodput=lambda name, number: 1 + number / 50))
    for point in document["points"]:
        for number, each in enumerate(point["run"]["repeats"]):
            tail = 1.0 if point["arrangement"] == "1P+1D" else 0.5
            each["duration_s"] += tail + number / 1000
    return old(document)


def test_a_kept_sweep_is_judged_anew_and_not_measured_again(tmp_path: Path) -> None:
    document = kept()
    known = take_up(document, sweep(), "kept.json")
    clusters = FakeClusters()
    again = sweeping(sweep(), clusters, known)
    again.run()
    assert clusters.events == []
    found = renewed(document)
    assert found["points"] == again.points
    documents.check(found)
    (verdict,) = found["verdicts"]
    assert verdict["kind"] == "no_difference"
    assert verdict["words"].startswith("No difference")
    assert [row["a"] for row in verdict["rows"]] == [row["b"] for row in verdict["rows"]]
    assert renewed(found) == found


def test_report_says_the_verdict_of_a_kept_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    document = kept()
    document["verdicts"][0]["words"] = "Do not disaggregate"
    path.write_text(json.dumps(document))
    page = tmp_path / "page.html"
    assert main(["loadgen", "report", str(path), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No difference")
    assert "Do not disaggregate" not in page.read_text()
    assert printed.split(".")[0] in page.read_text()
    path.write_text(json.dumps({**document, "points": [{}]}))
    assert main(["loadgen", "report", str(path), "--html", str(page)]) == 2
    assert "is no whole document of loadgen run or loadgen sweep" in capsys.readouterr().err
