"""The parts of a request's time: they add up exactly, and each means what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.timing import request_timing
from kvferry.engine.request import Attempt
from kvferry.worker import messages as m
from tests.fakes import RecordingListener, stub_spec

PREFILL = m.PrefillStats(0.25, 1.0, 2)


def request(
    received: float = 10.0,
    dispatched: float | None = 10.5,
    times: tuple[float, ...] = (12.0, 13.0, 13.5, 14.5),
    prefill: m.PrefillStats | None = PREFILL,
    wait: float | None = 0.25,
    first_step: float | None = 0.125,
) -> RoutedRequest:
    decode = m.DecodeStats(wait, first_step, 0, 0, None)
    made = RoutedRequest(
        stub_spec("r", [1], 9),
        RecordingListener(),
        received,
        1,
        Attempt(1, 1),
        received,
        dispatched_at=dispatched,
        prefill_stats=prefill,
        decode_stats=decode,
        gap_stats=decode,
    )
    made.branches[0].delivered = [0] * len(times)
    made.branches[0].token_times = list(times)
    return made


def test_each_part_is_what_its_name_says() -> None:
    timing = request_timing(request(), 15.0)
    assert timing.ttft_s == 2.0
    assert timing.queue_s == 0.5 + 0.25  # at the router, then at the prefill worker
    assert timing.prefill_s == 1.0
    assert timing.delivery_s == 2.0 - 0.75 - 1.0
    assert timing.ttst_s == 3.0
    assert timing.handoff_s == 1.0 - 0.25 - 0.125
    assert (timing.decode_wait_s, timing.first_step_s) == (0.25, 0.125)
    assert timing.tpot_s == pytest.approx(2.5 / 3)
    assert timing.itl_s == (1.0, 0.5, 1.0)
    assert timing.e2e_s == 5.0


seconds = st.floats(0, 1e6)


@given(
    received=seconds,
    to_dispatch=seconds,
    queue=seconds,
    prefill=seconds,
    gaps=st.lists(seconds, min_size=1, max_size=8),
)
def test_queue_prefill_and_delivery_add_up_to_the_time_to_first_token(
    received: float, to_dispatch: float, queue: float, prefill: float, gaps: list[float]
) -> None:
    times = [received + sum(gaps[: place + 1]) for place in range(len(gaps))]
    made = request(
        received, received + to_dispatch, tuple(times), m.PrefillStats(queue, prefill, 1)
    )
    timing = request_timing(made, times[-1])
    assert timing.queue_s is not None and timing.prefill_s is not None
    assert timing.delivery_s is not None and timing.ttft_s is not None
    parts = math.fsum((timing.queue_s, timing.prefill_s, timing.delivery_s))
    scale = max(abs(x) for x in (timing.queue_s, timing.prefill_s, timing.delivery_s, 1.0))
    assert parts == pytest.approx(timing.ttft_s, abs=4 * scale * 2.0**-52, rel=0)
    assert math.fsum(timing.itl_s) == pytest.approx(times[-1] - times[0])


@given(seconds, seconds, seconds)
def test_the_hand_off_is_the_gap_to_token_two_less_wait_and_first_step(
    gap: float, wait: float, first_step: float
) -> None:
    timing = request_timing(
        request(times=(12.0, 12.0 + gap), wait=wait, first_step=first_step), 99.0
    )
    assert timing.handoff_s is not None
    assert timing.handoff_s == max(0.0, (12.0 + gap) - 12.0 - wait - first_step)


def test_moments_that_never_came_are_unknown_and_not_zero() -> None:
    none = request_timing(request(times=()), 15.0)
    assert (none.ttft_s, none.queue_s, none.prefill_s, none.delivery_s) == (None,) * 4
    assert (none.ttst_s, none.handoff_s, none.tpot_s, none.itl_s) == (None, None, None, ())
    assert none.e2e_s == 5.0
    one = request_timing(request(times=(12.0,)), 15.0)
    assert one.ttft_s == 2.0 and one.delivery_s == 0.25
    assert (one.ttst_s, one.handoff_s, one.tpot_s, one.itl_s) == (None, None, None, ())


@pytest.mark.parametrize("lacking", ["prefill_stats", "dispatched_at"])
def test_without_the_worker_s_own_figures_the_parts_are_unknown_and_the_whole_is_not(
    lacking: str,
) -> None:
    made = request()
    setattr(made, lacking, None)
    timing = request_timing(made, 15.0)
    assert timing.ttft_s == 2.0
    assert (timing.queue_s, timing.prefill_s, timing.delivery_s) == (None, None, None)


@pytest.mark.parametrize("lacking", ["wait", "first_step", "all"])
def test_without_decode_s_figures_the_hand_off_is_unknown(lacking: str) -> None:
    made = request(
        wait=None if lacking == "wait" else 0.1, first_step=None if lacking == "first_step" else 0.1
    )
    if lacking == "all":
        made = replace(made, gap_stats=None)
    timing = request_timing(made, 15.0)
    assert timing.handoff_s is None
    assert timing.ttst_s == 3.0
