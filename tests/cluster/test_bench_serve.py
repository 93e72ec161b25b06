"""``bench serve`` sends exactly its workload and reports what the client measured."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.cluster.bench_cpu import CpuMeter
from kvferry.cluster.bench_serve import Bench, bench_json, bench_serve
from kvferry.cluster.client import Completion
from kvferry.cluster.closed_loop import Repeat, Workload
from kvferry.cluster.errors import NotReady, WorkerLost
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.fake_server import FakeServer, finished, status_response

LOCAL = "127.0.0.1:50051"
WORKLOAD = Workload(input_tokens=5, output_tokens=4, concurrency=2, num_requests=6, seed=3)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def run(server: FakeServer, workload: Workload = WORKLOAD, repeats: int = 1) -> Bench:
    return asyncio.run(bench_serve(server.endpoint, workload, repeats, lambda *_: None))


def test_every_request_has_the_asked_lengths(server: FakeServer) -> None:
    bench = run(server)
    measured = server.requests[1:]  # the first one warms up
    assert len(measured) == 6
    for request in measured:
        assert len(request.token_ids.ids) == 5
        assert max(request.token_ids.ids) < 100  # the vocabulary
        assert request.sampling.max_tokens == 4
        assert request.sampling.ignore_eos
        assert request.sampling.temperature == 0
    assert bench.error is None
    results = bench_json(bench)["results"]
    assert results["completed"] == 6
    assert results["itl_s"]["n"] == 6 * 3
    assert results["ttft_s"]["n"] == results["tpot_s"]["n"] == 6


def test_prompts_are_a_function_of_seed_and_repeat() -> None:
    assert WORKLOAD.prompts(0, 100) == WORKLOAD.prompts(0, 100)
    others = [
        WORKLOAD.prompts(1, 100),
        Workload(5, 4, 2, 6, seed=4).prompts(0, 100),
    ]
    assert all(other != WORKLOAD.prompts(0, 100) for other in others)
    assert WORKLOAD.prompts(0, 100)[0] == [66, 48, 65, 13, 26]  # in every process


def test_progress_counts_up_in_every_repeat(server: FakeServer) -> None:
    seen: list[tuple[int, int]] = []
    asyncio.run(bench_serve(server.endpoint, WORKLOAD, 2, lambda *news: seen.append(news)))
    assert seen == list(itertools.product((0, 1), range(1, 7)))


class InPairs(FakeServer):
    """Serves a measured request only while exactly one other is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = asyncio.Barrier(2)
        self.in_flight = self.most_in_flight = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.requests:  # the warm-up comes alone
            async with asyncio.timeout(10):
                await self.pair.wait()
        await super().Generate(request, context)
        self.in_flight -= 1


def test_as_many_requests_as_asked_are_in_flight() -> None:
    with InPairs() as server:
        assert run(server).error is None
    assert server.most_in_flight == 2


def test_failures_are_counted_and_fail_the_run() -> None:
    repeat = Repeat([completion(0.1, 0.1)], [WorkerLost("gone")], duration_s=1.0)
    bench = Bench("e", Workload(1, 3, 1, 2), status_response(), [repeat])
    results = bench_json(bench)["results"]
    assert (results["completed"], results["failed"]) == (1, 1)
    assert results["first_error"]["type"] == "WorkerLost"
    assert "1 of 2 requests failed" in str(bench.error)


def test_output_of_another_length_is_a_failure(server: FakeServer) -> None:
    class Short(FakeServer):
        async def Generate(self, request: pb.GenerateRequest, context: object) -> None:
            if len(self.requests) > 3:
                request.sampling.max_tokens = 2
            await super().Generate(request, context)

    with Short() as short:
        bench = run(short)
    assert len(bench.median.failures) == 3
    assert "wanted 4" in str(bench.error)


def test_a_workload_that_does_not_fit_the_model_is_refused_at_once(server: FakeServer) -> None:
    with pytest.raises(InvalidRequest, match="64"):
        run(server, Workload(60, 5, 1, 1))
    assert server.requests == []


def test_a_cluster_that_is_not_ready_is_refused_at_once(server: FakeServer) -> None:
    server.status = pb.StatusResponse(ready=False, not_ready_reasons=["no decode worker"])
    with pytest.raises(NotReady, match="no decode worker"):
        run(server)


def completion(ttft_s: float, *itl_s: float) -> Completion:
    ids = tuple(range(len(itl_s) + 1))
    return Completion("r", (), "", ids, finished(len(ids)), ttft_s, itl_s, ttft_s + sum(itl_s))


def test_times_are_those_of_the_client() -> None:
    repeat = Repeat([completion(0.1, 0.02, 0.04), completion(0.3, 0.01, 0.01)], duration_s=2.0)
    results = bench_json(Bench("e", WORKLOAD, status_response(), [repeat]))["results"]
    assert results["output_tokens_per_s"] == 3.0
    assert results["requests_per_s"] == 1.0
    assert results["ttft_s"]["max"] == 0.3
    assert results["ttst_s"]["max"] == pytest.approx(0.31)
    assert results["tpot_s"]["max"] == pytest.approx(0.03)
    assert results["itl_s"]["n"] == 4
    assert results["cpu_s_per_output_token"] is None


@pytest.mark.parametrize(("durations", "median"), [((3, 1, 2), 2), ((4, 1, 2, 3), 3)])
def test_results_are_those_of_the_median_repeat(durations: tuple[int, ...], median: int) -> None:
    repeats = [Repeat([completion(0.1, 0.1)], duration_s=float(d)) for d in durations]
    fields = bench_json(Bench("e", WORKLOAD, status_response(), repeats))
    assert fields["results"]["duration_s"] == median
    assert [r["duration_s"] for r in fields["repeats"]] == list(durations)


def local_status(pid: int) -> pb.StatusResponse:
    status = status_response()
    for router in status.routers:
        router.pid = pid
    for entry in status.workers:
        entry.worker.pid = pid
    return status


def test_cpu_time_is_that_of_the_named_processes() -> None:
    meter = CpuMeter.of_cluster(local_status(os.getpid()), LOCAL)
    assert meter is not None
    before = os.times()
    while os.times().user - before.user < 0.1:
        sum(range(1000))
    elapsed = meter.elapsed()
    assert elapsed is not None
    assert 0.05 < elapsed < 5


@pytest.mark.parametrize("endpoint", ["127.0.0.1:5", "localhost:5", "[::1]:5"])
def test_cpu_time_is_known_on_this_machine(endpoint: str) -> None:
    assert CpuMeter.of_cluster(local_status(os.getpid()), endpoint) is not None


def test_cpu_time_of_other_machines_is_unknown() -> None:
    local = local_status(os.getpid())
    for endpoint in ("10.0.0.1:5", "example.org:5", "nonsense"):
        assert CpuMeter.of_cluster(local, endpoint) is None
    assert CpuMeter.of_cluster(pb.StatusResponse(), LOCAL) is None
    local.workers[0].worker.host = "another"
    assert CpuMeter.of_cluster(local, LOCAL) is None


def test_cpu_time_of_a_process_that_is_gone_is_unknown() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        meter = CpuMeter.of_cluster(local_status(process.pid), LOCAL)
        process.communicate()
    assert meter is not None
    assert meter.elapsed() is None
    assert CpuMeter.of_cluster(local_status(process.pid), LOCAL) is None


def test_cpu_time_goes_into_the_results(server: FakeServer) -> None:
    server.status = local_status(os.getpid())
    results = bench_json(run(server))["results"]
    assert results["cpu_s_per_output_token"] is not None
