"""A verdict rests on everything that was asked for, and on differences that matter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.errors import Internal
from kvferry.cluster.loadgen.experiments.arrangements import parse_arrangements
from kvferry.cluster.loadgen.experiments.comparing import compare, worse_than
from kvferry.cluster.loadgen.experiments.differences import difference
from kvferry.cluster.loadgen.experiments.summary import sweep_fields
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis, Sweep
from kvferry.cluster.loadgen.experiments.verdict import Kind, judge
from kvferry.cluster.loadgen.settings import Settings
from tests.cluster import documents
from tests.loadgen.experiments.making import repeat, run_document
from tests.loadgen.experiments.sweeps import FakeClusters, sweep_document, sweeping

Json = dict[str, Any]


def readings(*values: float) -> dict[str, float]:
    return {str(at): value for at, value in enumerate(values)}


def sweep(**other: Any) -> Sweep:
    fields: Json = {
        "arrangements": parse_arrangements("1x2,1P+1D"),
        "settings": Settings(repeats=3, num_requests=4, slo_ttft=1.0),
        "axis": Axis("rate", (1, 3)),
        "rounds": 2,
    }
    return Sweep(**(fields | other))


def clusters(split: float, colocated: float) -> FakeClusters:
    figures = {"1P+1D": split, "1x2": colocated}
    return FakeClusters(goodput=lambda name, number: figures[name] * (1 + number / 100))


def verdict_of(document: Json) -> Json:
    (verdict,) = document["verdicts"]
    return dict(verdict)


def test_a_difference_beyond_noise_but_below_two_percent_does_not_matter() -> None:
    low = readings(1.0, 1.001, 0.999, 1.0)
    high = readings(1.015, 1.0165, 1.0135, 1.0151)
    for mine, other in ((low, high), (high, low)):
        found = judge("1P+1D", {"rate 1": mine}, {"1x2": {"rate 1": other}})
        assert found.rows[0].goodput.is_beyond_noise
        assert found.kind is Kind.NO_DIFFERENCE
        assert found.words.startswith("No difference that matters: ")
        assert found.to_json()["rows"][0]["better"] is None
    larger = {name: value + 0.02 for name, value in high.items()}
    found = judge("1P+1D", {"rate 1": larger}, {"1x2": {"rate 1": low}})
    assert found.kind is Kind.DISAGGREGATE


def test_equal_goodput_for_sure_is_told_apart_from_noise() -> None:
    values = readings(1.0, 1.1, 0.9, 1.0)
    same = judge("1P+1D", {"r": values}, {"1x2": {"r": values}}, steps={"r": 0.001})
    assert same.words.startswith("No difference that matters: 1P+1D and the others serve the same")
    noisy = judge("1P+1D", {"r": values}, {"1x2": {"r": readings(1.1, 0.9, 1.0, 1.0)}})
    assert noisy.words.startswith("No difference beyond noise: ")


def test_a_load_that_one_side_lacks_is_named_and_nothing_is_judged() -> None:
    high, low = readings(2.0, 2.1, 1.95), readings(1.0, 1.1, 0.9)
    found = judge("1P+1D", {"rate 1": high}, {"1x2": {"rate 1": low, "rate 3": high}})
    assert found.kind is Kind.CANNOT_SAY
    assert found.words.endswith("missing: 1P+1D at rate 3.")


def test_points_that_are_not_there_are_named() -> None:
    document = sweep_document(sweep(), clusters(2.0, 1.0))
    assert verdict_of(document)["kind"] == "disaggregate"
    fewer = [
        point
        for point in document["points"]
        if (point["arrangement"], point["load"], point["round"]) != ("1P+1D", "rate 3", 1)
    ]
    found = sweep_fields(document["sweep"], fewer)["verdicts"][0]
    assert found["kind"] == "cannot_say"
    assert found["words"].endswith("missing: 1P+1D at rate 3 in round 2.")
    colocated = [point for point in document["points"] if point["arrangement"] == "1x2"]
    found = sweep_fields(document["sweep"], colocated)["verdicts"][0]
    assert found["disaggregated"] == "1P+1D"
    assert found["kind"] == "cannot_say"
    assert "missing: 1P+1D at rate 1, rate 3 in round 1; " in found["words"]


def failed(point: Json, good: int) -> Json:
    """The point, with all but so many requests of every repeat failed."""
    repeats = []
    for each in point["run"]["repeats"]:
        share = good / 4
        figures = {"completed": good, "failed": 4 - good, "slo_fraction": share}
        repeats.append({**each, **figures, "goodput_per_s": each["goodput_per_s"] * share})
    error = {"code": "INTERNAL", "type": "Internal", "message": "requests failed"}
    run = {**point["run"], "repeats": repeats}
    return {**point, "ok": False, "error": error, "run": run}


@pytest.mark.parametrize("good", [0, 1])
def test_requests_that_failed_count_as_not_good_and_are_told(good: int) -> None:
    document = sweep_document(sweep(), clusters(2.0, 1.0))
    points = [
        failed(point, good)
        if point["arrangement"] == "1P+1D" and (point["load"] == "rate 3" or not good)
        else point
        for point in document["points"]
    ]
    fields = sweep_fields(document["sweep"], points)
    documents.check({**document, **fields})
    found = fields["verdicts"][0]
    assert found["kind"] == ("depends_on_load" if good else "do_not_disaggregate")
    assert f"count as not good: {'' if good else '24 of 24 of 1P+1D at rate 1; '}" in found["words"]
    assert f"{18 if good else 24} of 24 of 1P+1D at rate 3." in found["words"]
    row = next(row for row in fields["summary"] if row["label"] == "1P+1D, rate 3")
    assert (row["num_repeats"], row["num_with_failures"]) == (6, 6)
    assert row["figures"]["goodput_per_s"]["mean"] == pytest.approx(2.02 * good / 4)
    assert row["figures"]["ttft_s.p50"] is None


def test_an_arrangement_that_failed_everywhere_has_a_verdict() -> None:
    failing = sweeping(sweep(), clusters(0.0, 1.0))
    failing.run()
    points = [
        {**p, "ok": False, "error": {"message": "x"}} if p["arrangement"] == "1P+1D" else p
        for p in failing.points
    ]
    found = sweep_fields(failing.sweep.to_json(), points)["verdicts"][0]
    assert found["kind"] == "do_not_disaggregate"
    nothing = sweeping(sweep(), clusters(1.0, 1.0))
    nothing.sweep = sweep(settings=Settings(repeats=3, num_requests=4))
    assert sweep_fields(nothing.sweep.to_json(), [])["verdicts"] == []


def test_a_failed_sweep_is_judged_with_what_failed() -> None:
    doing = sweeping(sweep(), FakeClusters(error=Internal("1 of 4 requests failed")))
    doing.run()
    fields = sweep_fields(doing.sweep.to_json(), doing.points)
    assert len(fields["verdicts"][0]["rows"]) == 2


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=5), st.floats(0.001, 50))
def test_repeats_without_any_spread_are_no_certainty(values: list[float], shift: float) -> None:
    for other in (
        {str(at): value + shift for at, value in enumerate(values)},  # paired
        {f"b{at}": values[0] + shift for at in range(3)},  # not
    ):
        mine = readings(*(values if "0" in other else [values[0]] * 3))
        found = difference(mine, other)
        assert found is not None
        assert found.is_flat
        assert found.better is None
        assert found.is_beyond_noise is None
    same = difference(readings(*values), readings(*values))
    assert same is not None
    assert (same.low, same.high, same.is_flat) == (0, 0, False)


def test_a_step_of_one_request_is_no_certainty_either() -> None:
    a, b = readings(1.0, 1.02), readings(0.975, 0.9945)  # 39 of 40 each, at a little other rates
    certain = difference(a, b)
    assert certain is not None and certain.better == "a"
    stepped = difference(a, b, step=1 / 40)
    assert stepped is not None and stepped.better is None
    many = difference(
        readings(*(1 + n / 1000 for n in range(8))),
        readings(*(0.95 + n / 999 for n in range(8))),
        step=1 / 40,
    )
    assert many is not None and many.better == "a"
    apart = difference(
        {f"a{n}": 1.0 for n in range(2)}, {f"b{n}": 0.975 for n in range(2)}, step=1 / 40
    )
    assert apart is not None and apart.better is None
    assert apart.low is not None and not apart.is_flat


def within(*shares: float) -> Json:
    repeats = [{**repeat(n), "slo_fraction": share} for n, share in enumerate(shares)]
    return run_document([{**each, "completed": 40, "requests": []} for each in repeats])


def test_a_share_that_is_always_one_request_lower_is_not_worse() -> None:
    found = compare(within(1.0, 1.0), within(0.975, 0.975))
    row = next(row for row in found["pairs"][0]["figures"] if row["figure"] == "slo_fraction")
    assert row["better"] is None
    assert row["words"].endswith("no difference beyond noise")
    assert worse_than(found["pairs"], 0) == []


def test_equal_gaps_of_a_figure_without_steps_are_said_to_be_no_proof() -> None:
    slower = [repeat(n, ttft_s=0.2) for n in range(3)]
    found = compare(run_document([repeat(n) for n in range(3)]), run_document(slower))
    row = next(row for row in found["pairs"][0]["figures"] if row["figure"] == "ttft_s.p50")
    assert (row["low"], row["high"], row["better"]) == (None, None, None)
    assert row["words"].endswith("the repeats do not differ, so noise is unknown")
    assert "noise of ttft p50, ttft p90" in found["words"][-1]
    assert worse_than(found["pairs"], 0) == []
