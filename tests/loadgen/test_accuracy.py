"""The accuracy check compares what it says, and the generator hears every token after it was sent.

How exact it is depends on the machine, and is measured by ``make loadgen-accuracy``.
"""

from __future__ import annotations

import asyncio

import pytest

from kvferry.cluster.loadgen.goodput import COMPLETED
from kvferry.cluster.loadgen.grpc_target import GrpcTarget
from kvferry.cluster.loadgen.http_target import HttpTarget
from kvferry.cluster.loadgen.measures import Pass, Receipt, Sample
from kvferry.cluster.loadgen.run import Run, run_load
from kvferry.cluster.loadgen.settings import Settings
from tests.loadgen.accuracy import Comparison, compare, delays, lateness, stub

SETTINGS = Settings(
    input_tokens="3",
    output_tokens="5",
    num_requests=4,
    concurrency=1,
    vocab_size=100,
    warm_up=1,
    poll=0.0,
).resolved()


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_no_token_is_heard_before_it_was_sent(door: str) -> None:
    with stub(interval_s=0.001, ttft_s=0.002) as server:
        address = server.doors[door]
        run = Run(SETTINGS)
        if door == "grpc":
            asyncio.run(run_load(run, lambda: GrpcTarget(address)))
        else:
            asyncio.run(run_load(run, lambda: HttpTarget(address)))
        records = server.records()
    assert run.error is None
    assert [record["door"] for record in records] == [door] * 5
    # One at a time, so they match in order; the clock is the machine's, and so is one.
    assert min(delays(run.repeats[0], records[1:])) >= 0
    for sample, record in zip(run.repeats[0].measured.samples, records[1:], strict=True):
        heard, sent = sample.receipt.token_times, record["emitted"]
        assert len(heard) == len(sent) == 5
        assert sample.receipt.sent_at <= record["received"]
        assert all(emitted <= came for emitted, came in zip(sent, heard, strict=True))
        assert record["emitted"][0] - record["received"] >= 0.002
        assert heard[-1] <= sample.receipt.ended_at


def test_the_same_times_are_close_and_later_ones_are_not() -> None:
    times = [1.0, 1.25, 1.5]
    receipt = Receipt(sent_at=0.5, token_times=times, ended_at=2.0, completion_tokens=3)
    measured = Pass([Sample(0, 0, None, 0.5, 3, 1, outcome=COMPLETED, receipt=receipt)])
    same = compare(measured, [{"received": 0.5, "emitted": times}])
    assert [c.name for c in same] == [
        f"{name} {share}" for name in ("ttft", "itl") for share in ("p50", "p90", "p99")
    ]
    assert all(c.generator_s == c.stub_s and c.is_close for c in same)
    other = compare(measured, [{"received": 0.52, "emitted": [a + 0.01 for a in times]}])
    assert [c.is_close for c in other] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("generator_s", "stub_s", "close"),
    [(0.1019, 0.1, True), (0.1021, 0.1, False), (0.0109, 0.01, True), (0.0111, 0.01, False)],
)
def test_close_is_two_percent_or_a_millisecond(
    generator_s: float, stub_s: float, close: bool
) -> None:
    assert Comparison("x", generator_s, stub_s).is_close is close


def test_lateness_is_counted_from_each_token_s_due_moment() -> None:
    records = [{"received": 1.0, "emitted": [1.5, 1.8]}, {"received": 2.0, "emitted": [2.75]}]
    assert lateness(records, 0.5, 0.25) == pytest.approx([0.0, 0.05, 0.25])
