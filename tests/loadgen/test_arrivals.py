"""Arrivals have the rate, the burstiness and the profile that were asked for."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.loadgen.arrivals import (
    ARRIVALS,
    CONSTANT,
    GAMMA,
    POISSON,
    OpenLoop,
    TraceTimes,
    closed_starts,
)
from kvferry.cluster.loadgen.errors import BadLoad

RATES = st.floats(0.01, 1000)


def gaps(loop: OpenLoop, count: int = 4000, seed: int = 1) -> list[float]:
    offsets = loop.offsets(count, random.Random(seed))
    return [later - earlier for earlier, later in pairwise(offsets)]


@given(
    st.builds(
        OpenLoop,
        rate=RATES,
        kind=st.sampled_from(ARRIVALS),
        burstiness=st.floats(0.1, 10),
        ramp_s=st.floats(0, 60),
        on_s=st.floats(0.1, 10),
        off_s=st.floats(0, 10),
    ),
    st.integers(1, 60),
    st.integers(0, 99),
)
def test_offsets_begin_at_zero_and_rise(loop: OpenLoop, count: int, seed: int) -> None:
    offsets = loop.offsets(count, random.Random(seed))
    assert len(offsets) == count
    assert offsets[0] == 0
    assert sorted(offsets) == offsets
    assert loop.offsets(count, random.Random(seed)) == offsets
    assert loop.offsets(count + 3, random.Random(seed))[:count] == offsets


@given(RATES)
def test_a_constant_rate_has_equal_gaps(rate: float) -> None:
    assert all(gap == pytest.approx(1 / rate) for gap in gaps(OpenLoop(rate, CONSTANT), 20))


@pytest.mark.parametrize(
    ("kind", "burstiness"), [(POISSON, 1.0), (GAMMA, 1.0), (GAMMA, 0.25), (GAMMA, 4.0)]
)
def test_random_gaps_have_the_mean_and_the_variation_of_their_kind(
    kind: str, burstiness: float
) -> None:
    found = gaps(OpenLoop(20.0, kind, burstiness), count=40_000)
    assert fmean(found) == pytest.approx(1 / 20, rel=0.05)
    assert stdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_ramp_lets_half_of_its_full_rate_through() -> None:
    offsets = OpenLoop(10.0, CONSTANT, ramp_s=20.0).offsets(301, random.Random(0))
    assert sum(offset < 10 for offset in offsets) == 25  # 10/s * 10 s / 4
    assert sum(offset < 20 for offset in offsets) == 100
    assert offsets[-1] - offsets[-2] == pytest.approx(0.1)


@given(st.floats(0.5, 5), st.floats(0.5, 5), st.sampled_from(ARRIVALS))
def test_nothing_begins_while_it_is_off(on_s: float, off_s: float, kind: str) -> None:
    loop = OpenLoop(8.0, kind, on_s=on_s, off_s=off_s)
    for offset in loop.offsets(100, random.Random(3)):
        assert offset % (on_s + off_s) <= on_s + 1e-9 or (on_s + off_s) - offset % (
            on_s + off_s
        ) == pytest.approx(0, abs=1e-6)


def test_while_it_is_on_the_rate_holds() -> None:
    offsets = OpenLoop(10.0, CONSTANT, on_s=2.0, off_s=3.0).offsets(100, random.Random(0))
    assert [sum(5 * n <= o < 5 * n + 2 for o in offsets) for n in range(4)] == [20] * 4


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60),
    st.floats(0.1, 10),
    st.integers(0, 99),
)
def test_trace_times_are_stretched_and_stay_in_their_stretch_of_the_grid(
    steps: list[int], stretch: float, seed: int
) -> None:
    times = [3.0 * step for step in sorted(steps)]
    exact = TraceTimes(stretch).offsets(times, random.Random(seed))
    assert exact == pytest.approx([stretch * time for time in times])
    spread = TraceTimes(stretch, grid_s=3.0).offsets(times, random.Random(seed))
    assert sorted(spread) == spread
    for time, offset in zip(times, spread, strict=True):
        assert time <= offset / stretch + 1e-9 < time + 3.0 + 2e-9


def test_equal_times_of_a_coarse_grid_do_not_come_all_at_once() -> None:
    offsets = TraceTimes(grid_s=3.0).offsets([0.0] * 50, random.Random(5))
    assert len(set(offsets)) == 50
    assert min(offsets) < 0.5
    assert max(offsets) > 2.5


def test_a_trace_that_runs_backwards_is_refused() -> None:
    with pytest.raises(BadLoad, match="order of arrival"):
        TraceTimes().offsets([1.0, 0.5], random.Random(0))


def test_clients_of_a_closed_loop_begin_evenly_over_the_ramp() -> None:
    assert closed_starts(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert closed_starts(3, 0.0) == [0.0] * 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.0, "burstiness": 0.0}, "burstiness"),
        ({"rate": 1.0, "kind": "weekly"}, "arrival"),
        ({"rate": 1.0, "ramp_s": -1.0}, "ramp_s"),
        ({"rate": 1.0, "off_s": 1.0}, "on_off"),
    ],
)
def test_settings_that_make_no_arrivals_are_named(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(BadLoad, match=named):
        OpenLoop(**wrong)  # type: ignore[arg-type]
