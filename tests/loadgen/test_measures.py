"""Figures are what their definitions say, on requests made by hand."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.loadgen.client_series import MAX_BINS, quantiles, series_json
from kvferry.cluster.loadgen.goodput import COMPLETED, Slo
from kvferry.cluster.loadgen.intervals import interval, intervals_json, t_quantile
from kvferry.cluster.loadgen.measures import (
    BY_USAGE,
    PARTS,
    Pass,
    Receipt,
    Sample,
    ServerFacts,
    parts_json,
    request_row,
    results_json,
)


def sample(
    sent_at: float, times: list[float], *, tokens: int | None = None, intended_at: float = 0.0
) -> Sample:
    receipt = Receipt(
        sent_at=sent_at,
        token_times=times,
        ended_at=times[-1] + 0.01,
        completion_tokens=tokens,
        prompt_tokens=7,
    )
    return Sample(0, 0, None, intended_at, len(times), 7, outcome=COMPLETED, receipt=receipt)


def test_times_of_a_request() -> None:
    one = sample(10.0, [10.5, 10.7, 10.8], intended_at=9.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.ttst_s == pytest.approx(0.7)
    assert one.tpot_s == pytest.approx(0.15)
    assert one.itl_s == pytest.approx([0.2, 0.1])
    assert one.e2e_s == pytest.approx(0.81)
    assert one.lag_s == pytest.approx(0.1)


def test_where_a_chunk_held_several_tokens_the_server_s_count_makes_the_tpot() -> None:
    one = sample(0.0, [1.0, 1.4, 1.8], tokens=9)
    one.receipt.counted_by = BY_USAGE
    assert one.tpot_s == pytest.approx(0.1)
    assert one.num_output_tokens == 9
    assert one.itl_s == pytest.approx([0.4, 0.4])


def test_one_token_has_neither_a_second_nor_a_rate() -> None:
    one = sample(0.0, [1.0])
    assert one.ttst_s is None
    assert one.tpot_s is None
    assert Slo(ttft_s=1.0, tpot_s=0.01).is_kept(one.outcome, one.ttft_s, one.tpot_s)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5), True),
        (Slo(ttft_s=0.49), False),
        (Slo(tpot_s=0.1875), True),
        (Slo(tpot_s=0.18), False),
        (Slo(ttft_s=0.5, tpot_s=0.18), False),
    ],
)
def test_a_good_request_keeps_to_every_bound(slo: Slo, met: bool) -> None:
    one = sample(0.0, [0.5, 0.6875])
    assert slo.is_kept(one.outcome, one.ttft_s, one.tpot_s) is met


def test_parts_add_up_to_what_the_client_saw() -> None:
    one = sample(0.0, [0.5, 0.7])
    parts = {"queue_s": 0.1, "prefill_s": 0.2, "delivery_s": 0.05, "handoff_s": 0.15}
    one.receipt.server = ServerFacts(parts=parts, ttft_s=0.35)
    found = one.parts()
    first = [found[name] for name in ("queue_s", "prefill_s", "delivery_s", "network_s")]
    assert sum(part or 0 for part in first) == pytest.approx(0.5)
    assert found["gap_s"] == pytest.approx(0.2)
    assert found["decode_wait_s"] is None
    assert set(parts_json(Pass([one]))) == set(PARTS)


def test_requests_before_the_counted_ones_go_into_no_figure() -> None:
    early, late = sample(0.0, [5.0, 9.0]), sample(10.0, [10.5, 10.6], intended_at=10.0)
    early.is_counted = False
    results = results_json(Pass([early, late]), Slo(ttft_s=1.0))
    assert results["completed"] == 1
    assert results["not_counted"] == 1
    assert results["duration_s"] == pytest.approx(0.61)
    assert results["ttft_s"]["max"] == pytest.approx(0.5)
    assert results["goodput_per_s"] == pytest.approx(1 / 0.61)


def test_a_row_counts_from_the_start_of_its_repeat() -> None:
    row = request_row(sample(12.0, [12.5], intended_at=11.5), 10.0)
    assert (row["intended_s"], row["sent_s"]) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("freedom", "wanted"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (120, 1.980)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, wanted: float) -> None:
    assert t_quantile(freedom) == pytest.approx(wanted, abs=6e-4)


def test_an_interval_is_that_of_the_textbook() -> None:
    found = interval([10.0, 12.0, 14.0])
    assert found is not None
    assert found["mean"] == 12
    assert found["high"] - 12 == pytest.approx(4.303 * 2 / 3**0.5, abs=1e-3)
    assert 12 - found["low"] == pytest.approx(found["high"] - 12)
    assert interval([1.0]) is None


def test_a_figure_that_a_repeat_lacks_has_no_interval() -> None:
    results = results_json(Pass([sample(0.0, [0.5, 0.6])]), None)
    found = intervals_json([results, results])
    assert found is not None
    assert found["goodput_per_s"] is None
    assert found["ttft_s"]["p99"]["low"] == pytest.approx(0.5)
    assert intervals_json([results]) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_percentiles_rise_from_the_least_to_the_most(values: list[float]) -> None:
    found = quantiles(values)
    assert len(found) == 101
    assert (found[0], found[-1]) == (min(values), max(values))
    assert all(b >= a - 1e-12 for a, b in pairwise(found))


@given(
    st.lists(
        st.tuples(st.floats(0, 500), st.lists(st.floats(0.001, 50), min_size=1, max_size=5)),
        min_size=1,
        max_size=30,
    )
)
def test_nothing_is_lost_between_the_stretches_of_the_series(
    requests: list[tuple[float, list[float]]],
) -> None:
    samples = []
    for sent_at, gaps in requests:
        times, now = [], sent_at
        for gap in gaps:
            now += gap
            times.append(now)
        samples.append(sample(sent_at, times))
    rows = series_json(Pass(samples))
    assert 1 <= len(rows) <= MAX_BINS
    assert sum(row["output_tokens"] for row in rows) == sum(len(gaps) for _, gaps in requests)
    assert sum(row["sent"] for row in rows) == sum(r["completed"] for r in rows) == len(requests)
    gaps_seen = sum(row["itl_s"]["n"] for row in rows if row["itl_s"] is not None)
    assert gaps_seen == sum(len(gaps) - 1 for _, gaps in requests)
    mean = fmean(gap for s in samples for gap in s.itl_s) if gaps_seen else None
    if mean is not None:
        total = sum(r["itl_s"]["n"] * r["itl_s"]["mean"] for r in rows if r["itl_s"] is not None)
        assert total / gaps_seen == pytest.approx(mean)
