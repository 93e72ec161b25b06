"""What the router counts of its requests, event by event."""

from __future__ import annotations

import pytest

from kvferry.cluster.metrics import catalog
from kvferry.cluster.metrics.recorder import MAX_TEXTS, Recorder
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.timing import request_timing
from kvferry.engine.request import InvalidRequest
from kvferry.worker import messages as m
from kvferry.worker.messages import FailureCause
from tests.cluster.metrics.scraping import Scrape, scrape
from tests.cluster.routing import Bench


def page(bench: Bench) -> Scrape:
    return scrape(bench.router, bench.now)


def serve(bench: Bench, name: str = "r", max_tokens: int = 4) -> RoutedRequest:
    """One request: placed at 0.5 s, token 1 at 1 s, then 2 at 2 s, and 3 and 4 together at 4 s."""
    bench.now += 0.5
    request, _ = bench.submit(name, max_tokens=max_tokens)
    bench.grant(request)
    bench.now += 0.5
    bench.first_token(request)
    bench.now += 1.0
    bench.tokens(request, 0, 100, 101)
    bench.now += 2.0
    bench.tokens(request, 2, 102, 103, finish="length")
    assert request.end is not None
    return request


def test_the_histograms_of_a_request_are_its_times() -> None:
    bench = Bench()
    request = serve(bench)
    timing, found = request_timing(request, bench.now), page(bench)

    def total(name: str) -> float:
        assert found.value(f"kvferry_{name}_seconds_count") == 1
        return found.value(f"kvferry_{name}_seconds_sum")

    assert total("time_to_first_token") == timing.ttft_s == 0.5
    assert total("e2e_request_latency") == timing.e2e_s == 3.5
    assert total("request_queue_time") == timing.queue_s
    assert total("request_prefill_time") == timing.prefill_s
    assert total("request_decode_time") == 3.0
    assert total("request_time_per_output_token") == timing.tpot_s == 1.0
    assert found.value("kvferry_inter_token_latency_seconds_count") == len(timing.itl_s) == 3
    assert found.value("kvferry_inter_token_latency_seconds_sum") == sum(timing.itl_s) == 3.0
    assert found.value("kvferry_generation_tokens_total") == 4
    assert found.value("kvferry_prompt_tokens_total") == 9
    assert found.by("reason", "kvferry_router_decisions_total") == {"least loaded pair": 1}


def test_tokens_that_come_together_lie_nothing_apart() -> None:
    bench = Bench()
    serve(bench)
    gaps = page(bench)
    name = "kvferry_inter_token_latency_seconds_bucket"
    assert gaps.value(name, le="0.0025") == 1
    assert gaps.value(name, le="1.0") == 2
    assert gaps.value(name, le="2.5") == 3


def test_a_stream_s_first_token_and_gaps_show_while_it_runs() -> None:
    bench = Bench()
    request, _ = bench.submit(max_tokens=9)
    bench.grant(request)
    bench.now = 2.0
    bench.first_token(request)
    bench.now = 3.0
    bench.tokens(request, 0, 100, 101)
    found = page(bench)
    assert found.value("kvferry_time_to_first_token_seconds_sum") == 2.0
    assert found.value("kvferry_inter_token_latency_seconds_sum") == 1.0
    assert found.value("kvferry_e2e_request_latency_seconds_count") == 0


def test_what_did_not_end_well_has_no_latency_but_an_outcome() -> None:
    bench = Bench()
    cancelled, _ = bench.submit("cancelled")
    request, _ = bench.submit("failed")
    bench.now = 1.0
    bench.router.cancel(cancelled.request_id, bench.now)
    for _ in range(bench.config.max_attempts):
        bench.fail(request, FailureCause.STEP)
    found = page(bench)
    assert found.by("finished_reason", "kvferry_requests_finished_total") == {
        "abort": 1,
        "error": 1,
    }
    assert found.by("type", "kvferry_request_errors_total") == {"RequestPoisoned": 1}
    assert found.by("cause", "kvferry_recovered_requests_total") == {"step": 2}
    assert found.value("kvferry_e2e_request_latency_seconds_count") == 0


def test_a_gap_of_recovery_lasts_from_the_first_loss_to_the_next_token() -> None:
    bench = Bench(num_decode=2)
    request, _ = bench.submit(max_tokens=9)
    bench.grant(request)
    bench.first_token(request)
    bench.now = 1.0
    bench.tokens(request, 0, 100, 101)
    bench.now = 2.0
    bench.fail(request, FailureCause.STEP)
    bench.now = 3.0
    bench.fail(request, FailureCause.STEP)
    bench.grant(request)
    bench.now = 5.5
    bench.first_token(request, 102)
    bench.tokens(request, 2, 102, 103)
    found = page(bench)
    assert found.value("kvferry_recovery_gap_seconds_count") == 1
    assert found.value("kvferry_recovery_gap_seconds_sum") == 3.5


def test_deaths_are_counted_by_how_they_were_found_out() -> None:
    bench = Bench(num_prefill=2, num_decode=2)
    bench.router.worker_died(bench.ref("prefill-1"), "its process has ended", bench.now)
    del bench.members["prefill-1"]
    bench.beat(step_age_s=99.0)
    bench.router.tick(bench.now)
    bench.join("decode-1", bench.members["decode-1"].roles)
    found = page(bench)
    deaths = {
        (s.labels["worker_id"], s.labels["role"], s.labels["cause"])
        for s in found.families["kvferry_worker_deaths"].samples
        if s.value
    }
    assert ("prefill-1", "prefill", "ended") in deaths
    assert ("prefill-0", "prefill", "hung") in deaths


def test_a_successor_shows_that_the_life_before_is_over() -> None:
    bench = Bench()
    bench.join("decode-0", bench.members["decode-0"].roles)
    found = page(bench)
    assert found.value("kvferry_worker_deaths_total", cause="replaced", role="decode") == 1


def test_a_drained_worker_is_not_missed() -> None:
    bench = Bench(num_decode=2)
    assert bench.router.dismiss(bench.ref("decode-1"))
    found = page(bench)
    ready = found.by("worker_id", "kvferry_worker_ready")
    assert set(ready) == {"prefill-0", "decode-0"}
    assert not list(found.values("kvferry_worker_ready", worker_id="decode-1"))
    assert found.sum("kvferry_worker_deaths_total") == 0


def test_stale_messages_at_the_router_are_counted_by_kind() -> None:
    bench = Bench()
    request, _ = bench.submit()
    bench.grant(request)
    old = bench.ref("decode-0")
    bench.join("decode-0", bench.members["decode-0"].roles)
    bench.say(old, m.WorkerHeartbeat(m.LoadReport()))
    found = page(bench)
    assert found.value("kvferry_stale_messages_refused_total", role="router", kind="sender") == 1


@pytest.mark.parametrize("error", [InvalidRequest("x"), ValueError("x")])
def test_refusals_are_counted_by_the_class_that_the_client_is_told(error: Exception) -> None:
    recorder = Recorder(1)
    recorder.rejected(error)
    expected = "InvalidRequest" if isinstance(error, InvalidRequest) else "Internal"
    assert recorder.counts == {(catalog.REJECTED, (expected,)): 1}


def test_reasons_of_placements_are_bounded() -> None:
    recorder = Recorder(1)
    for number in range(1000):
        recorder.placed("cost", f"costs {number} s")
    kinds = [labels for metric, labels in recorder.counts if metric is catalog.DECISIONS]
    assert len(kinds) == MAX_TEXTS + 1
    assert recorder.counts[catalog.DECISIONS, ("cost", "other")] == 1000 - MAX_TEXTS
