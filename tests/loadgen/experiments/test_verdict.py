"""Verdicts and comparisons say what the figures say, and no more than noise allows."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.comparing import compare, worse_than
from kvferry.cluster.loadgen.experiments.differences import NONE, PAIRED, WELCH, difference
from kvferry.cluster.loadgen.experiments.figures import BY_NAME, FIGURES, GOODPUT
from kvferry.cluster.loadgen.experiments.verdict import Kind, Verdict, judge
from tests.loadgen.experiments.making import MACHINE, repeat, run_document


def readings(*values: float) -> dict[str, float]:
    return {str(at): value for at, value in enumerate(values)}


LOW = readings(1.0, 1.1, 0.9, 1.05, 0.95)
HIGH = readings(2.05, 2.1, 1.85, 2.05, 1.95)
LOW_AGAIN = readings(1.05, 0.95, 1.0, 0.9, 1.1)


def verdict(mine: dict[str, dict[str, float]], *others: dict[str, dict[str, float]]) -> Verdict:
    return judge("1P+1D", mine, dict(zip(("1x2", "2x1"), others, strict=False)))


def test_more_goodput_than_every_alternative_speaks_for_it() -> None:
    found = verdict({"rate 1": HIGH, "rate 2": LOW}, *[{"rate 1": LOW, "rate 2": LOW_AGAIN}] * 2)
    assert found.kind is Kind.DISAGGREGATE
    assert found.words.startswith("Disaggregate: 1P+1D serves more within the SLO. At rate 1, 2 ")
    assert len(found.rows) == 4
    assert found.level == pytest.approx(1 - 0.05 / 4)


def test_more_than_one_of_two_alternatives_is_not_enough() -> None:
    found = verdict({"rate 1": HIGH}, {"rate 1": LOW}, {"rate 1": HIGH})
    assert found.kind is Kind.NO_DIFFERENCE
    assert "No difference beyond noise" in found.words


def test_less_than_one_alternative_speaks_against_it() -> None:
    found = verdict({"rate 1": LOW, "rate 2": LOW}, {"rate 1": LOW_AGAIN, "rate 2": HIGH})
    assert found.kind is Kind.DO_NOT
    assert found.words.startswith("Do not disaggregate: ")
    assert "At rate 2, 1 good requests/s of 1P+1D against 2 of 1x2" in found.words


def test_it_can_depend_on_the_load() -> None:
    found = verdict({"rate 1": LOW, "rate 2": HIGH}, {"rate 1": HIGH, "rate 2": LOW})
    assert found.kind is Kind.DEPENDS
    assert "serves more within the SLO at rate 2, and less at rate 1" in found.words


def test_noise_is_no_difference() -> None:
    found = verdict({"rate 1": LOW}, {"rate 1": LOW_AGAIN})
    assert found.kind is Kind.NO_DIFFERENCE
    assert found.words.startswith("No difference beyond noise: nothing speaks for 1P+1D")


@pytest.mark.parametrize(
    ("mine", "others", "why"),
    [
        ({"rate 1": HIGH}, [], "nothing colocated was measured"),
        ({"rate 1": HIGH}, [{"rate 2": HIGH}], "missing: 1P+1D at rate 2; 1x2 at rate 1"),
        ({"rate 1": {}}, [{"rate 1": {}}], "no SLO was given"),
        ({"rate 1": readings(1.0)}, [{"rate 1": readings(2.0)}], "a single repeat"),
        ({"rate 1": readings(0.0, 0.0)}, [{"rate 1": readings(0.0, 0.0)}], "a single request"),
    ],
)
def test_without_figures_it_cannot_say(
    mine: dict[str, dict[str, float]], others: list[dict[str, dict[str, float]]], why: str
) -> None:
    found = verdict(mine, *others)
    assert found.kind is Kind.CANNOT_SAY
    assert why in found.words


numbers = st.floats(0.1, 1000, allow_nan=False)
lists = st.lists(numbers, min_size=2, max_size=6)


@given(lists, lists)
def test_a_verdict_turns_around_with_its_sides(a: list[float], b: list[float]) -> None:
    one = verdict({"r": readings(*a)}, {"r": readings(*b)}).kind
    two = verdict({"r": readings(*b)}, {"r": readings(*a)}).kind
    opposite = {Kind.DISAGGREGATE: Kind.DO_NOT, Kind.DO_NOT: Kind.DISAGGREGATE}
    assert two is opposite.get(one, one)


@given(lists, lists, st.booleans())
def test_a_difference_is_that_of_means_inside_its_interval(
    a: list[float], b: list[float], more: bool
) -> None:
    found = difference(readings(*a), {f"b{k}": v for k, v in readings(*b).items()}, more)
    assert found is not None
    assert found.method == WELCH
    if found.is_flat:
        assert len(set(a)) == len(set(b)) == 1
        return
    assert found.low is not None and found.high is not None
    assert found.mean == pytest.approx(fmean(b) - fmean(a))
    assert found.low <= found.mean <= found.high
    back = difference({f"b{k}": v for k, v in readings(*b).items()}, readings(*a), more)
    assert back is not None
    assert back.low == pytest.approx(-found.high)
    assert back.better == {None: None, "a": "b", "b": "a"}[found.better]


@given(lists, st.floats(-50, 50))
def test_what_all_pairs_have_in_common_is_no_noise(a: list[float], shift: float) -> None:
    assume(abs(shift) > 0.01)
    wobble = (value + shift * (1 + 0.001 * (-1) ** at) for at, value in enumerate(a))
    found = difference(readings(*a), readings(*wobble))
    assert found is not None
    assert found.method == PAIRED
    assert found.low == pytest.approx(shift, abs=0.02 * abs(shift))
    assert found.better == ("b" if shift > 0 else "a")


def test_known_intervals() -> None:
    # t of 4 degrees of freedom at 95 % is 2.776445
    gaps = [0.5, 0.7, 0.3, 0.6, 0.4]
    found = difference(LOW, {k: v + g for (k, v), g in zip(LOW.items(), gaps, strict=True)})
    assert found is not None and found.high is not None
    assert found.high - found.mean == pytest.approx(2.776445 * stdev(gaps) / math.sqrt(5), rel=1e-5)
    # Welch, 3 against 2: variances 1 and 0.5, so 0.5833 / (0.0556 + 0.0625) -> freedom 2.88 -> 2
    other = difference(readings(1, 2, 3), {"x": 4.0, "y": 5.0})
    assert other is not None and other.high is not None
    assert other.high - other.mean == pytest.approx(4.302653 * math.sqrt(1 / 3 + 0.25), rel=1e-5)
    assert difference(readings(1.0), readings(2.0)).method == NONE  # type: ignore[union-attr]
    assert difference({}, readings(2.0)) is None


def test_an_interval_holds_as_often_as_it_says() -> None:
    rng = random.Random(1)
    misses = 0
    for _ in range(600):
        a, b = ([rng.gauss(10, 2) for _ in range(4)] for _ in range(2))
        found = difference(readings(*a), readings(*b))
        assert found is not None
        misses += bool(found.is_beyond_noise)
    assert 10 <= misses <= 55  # 5 % of 600 is 30; four deviations either way


def test_two_runs_are_compared_in_words() -> None:
    slow = run_document([repeat(n, goodput=1.0 + n / 100, ttft_s=0.2 + n / 100) for n in range(4)])
    fast = run_document([repeat(n, goodput=2.0 + n / 100, ttft_s=0.1) for n in range(4)])
    found = compare(slow, fast)
    (pair,) = found["pairs"]
    assert pair["same_requests"] is True
    rows = {row["figure"]: row for row in pair["figures"]}
    assert rows.keys() == BY_NAME.keys()
    assert rows["ttft_s.p50"]["better"] == "b"
    assert rows["ttft_s.p50"]["words"].endswith("B is better")
    assert rows["goodput_per_s"]["relative"] == pytest.approx(1 / 1.015, rel=1e-3)
    assert rows["tpot_s.p50"]["words"].endswith("no difference beyond noise")
    (line,) = found["words"]
    assert line.startswith("the run: B is better at good requests, ttft p50")
    assert worse_than(found["pairs"], 5) == []
    back = worse_than(compare(fast, slow)["pairs"], 5)
    assert {"goodput_per_s", "ttft_s.p50"} <= {each.figure for each in back}
    assert worse_than(compare(fast, slow)["pairs"], 1000) == []


def test_what_is_unlike_is_said() -> None:
    a = run_document([repeat(n) for n in range(2)])
    b = run_document([repeat(n + 5) for n in range(3)], machine={**MACHINE, "cores": 64})
    found = compare(a, b)
    assert found["words"][0] == "Not the same machine: cores 2 and 64."
    assert found["words"][1] == "Not the same requests: the run."
    assert {row["method"] for row in found["pairs"][0]["figures"]} == {WELCH}


def test_one_repeat_says_nothing_of_noise() -> None:
    single = run_document([repeat(1)])
    found = compare(single, single)
    assert "noise of" in found["words"][0]
    assert all(row["words"].endswith("noise is unknown") for row in found["pairs"][0]["figures"])
    with pytest.raises(BadLoad, match="wanted two of each"):
        worse_than(found["pairs"], 5)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(BadLoad, match="schema: got 'x'"):
        compare({"schema": "x"}, {"schema": "x"})
    with pytest.raises(BadLoad, match="two of one kind"):
        compare(run_document([]), {"schema": "kvferry.loadgen_sweep/1"})


def test_figures_are_read_by_their_names() -> None:
    one = repeat("a", goodput=None)
    assert GOODPUT.readings([one]) == {}
    assert {figure.name for figure in FIGURES if figure.of(repeat("a")) is None} == set()
    twice = GOODPUT.readings([repeat("a", 1.0), repeat("a", 2.0)])
    assert sorted(twice.values()) == [1.0, 2.0]
