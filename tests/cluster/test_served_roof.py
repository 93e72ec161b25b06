"""The roof of a served closed loop, against figures worked out by hand."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from kvferry.cluster.bench.served_roof import (
    Arrangement,
    Cores,
    Load,
    Reading,
    output_tokens_per_s,
    spread,
    typical,
)
from kvferry.cluster.bench_serve import bench_json, bench_serve
from kvferry.cluster.closed_loop import Workload
from kvferry.engine.models.size import ModelSize
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.fake_server import FakeServer, status_response

LOAD = Load(input_tokens=256, output_tokens=64, concurrency=8)
SIZE = ModelSize(538_000_000, 106_000_000, 28_300_000)
KV = 46_080.0  # bytes per token
COLOCATED = Arrangement(colocated=Cores(1, 2))
APART = Arrangement(prefill=Cores(1, 1), decode=Cores(1, 1))
CAN = Reading(gemm_flops=150e9, read_bytes_per_s=14e9)


def test_a_prompt_needs_the_head_once() -> None:
    assert SIZE.prompt_flops(256) == pytest.approx(54.3e9, rel=1e-2)


def test_together_a_request_pays_its_prompt_and_its_share_of_the_steps() -> None:
    kv = 8 * (256 + 32) * KV
    expected = 64 / (SIZE.prompt_flops(256) / 150e9 + 8 * (538e6 + kv) / 14e9)
    assert output_tokens_per_s(LOAD, SIZE, KV, COLOCATED, CAN) == pytest.approx(expected)


def test_apart_the_slower_side_decides() -> None:
    prefill = 64 * 150e9 / SIZE.prompt_flops(256)
    decode = 8 * 14e9 / (538e6 + 8 * 288 * KV)
    assert output_tokens_per_s(LOAD, SIZE, KV, APART, CAN) == pytest.approx(min(prefill, decode))
    slow = replace(CAN, gemm_flops=1e9)
    assert output_tokens_per_s(LOAD, SIZE, KV, APART, slow) == pytest.approx(prefill / 150)


def test_every_decoding_worker_reads_weights_of_its_own() -> None:
    two = Arrangement(prefill=Cores(1, 1), decode=Cores(2, 2))
    decode = 8 * 14e9 / (2 * 538e6 + 8 * 288 * KV)
    assert output_tokens_per_s(LOAD, SIZE, KV, two, CAN) == pytest.approx(decode)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([("prefill", 1), ("decode", 2)], Arrangement(Cores(1, 1), Cores(1, 2))),
        ([("colocated", 2), ("colocated", 1)], Arrangement(colocated=Cores(2, 3))),
        ([("prefill", 1), ("decode", 1), ("colocated", 1)], None),
        ([("decode", 1)], None),
        ([], None),
    ],
)
def test_arrangements(workers: list[tuple[str, int]], expected: Arrangement | None) -> None:
    assert Arrangement.of(workers) == expected


def test_threads_of_each_side() -> None:
    apart = Arrangement(prefill=Cores(2, 6), decode=Cores(1, 3))
    assert (apart.gemm_threads, apart.read_threads) == (6, 3)
    assert (COLOCATED.gemm_threads, COLOCATED.read_threads) == (2, 2)


def test_readings_are_taken_together() -> None:
    readings = [Reading(100.0, 10.0), Reading(110.0, 10.0), Reading(90.0, 13.0)]
    assert typical(readings) == Reading(100.0, 10.0)
    assert spread(readings) == pytest.approx(0.3)
    assert spread(readings[:1]) == 0


# --- in a run ------------------------------------------------------------------------------------


def here(implementation: str = "cpu") -> pb.StatusResponse:
    """A cluster whose processes are all this one."""
    status = status_response()
    for router in status.routers:
        router.pid = os.getpid()
    for entry in status.workers:
        entry.worker.pid, entry.worker.threads = os.getpid(), 1
        entry.worker.kernels.implementation = implementation
    model = status.model
    model.weight_bytes, model.num_layer_parameters, model.num_head_parameters = 1000, 500, 100
    model.block_size, model.block_bytes = 4, 64
    return status


def run(status: pb.StatusResponse) -> tuple[list[Arrangement], dict[str, object] | None]:
    """The arrangements that were measured, and the roof in the document."""
    measured: list[Arrangement] = []

    def measure(arrangement: Arrangement) -> Reading:
        measured.append(arrangement)
        return Reading(1e6 * len(measured), 1e6)

    with FakeServer() as server:
        server.status = status
        workload = Workload(input_tokens=5, output_tokens=4, concurrency=2, num_requests=2)
        bench = asyncio.run(bench_serve(server.endpoint, workload, 2, lambda *_: None, measure))
    return measured, bench_json(bench)["roof"]


def test_the_machine_is_measured_before_between_and_after_the_repeats() -> None:
    measured, roof = run(here())
    assert measured == [APART] * 3
    assert roof is not None
    assert roof["gemm_flops"] == 2e6
    assert roof["steady"] is False
    expected = output_tokens_per_s(
        Load(5, 4, 2), ModelSize(1000, 500, 100), 16.0, APART, Reading(2e6, 1e6)
    )
    assert roof["output_tokens_per_s"] == pytest.approx(expected)


def test_nothing_is_said_of_other_machines_and_devices() -> None:
    elsewhere = here()
    elsewhere.workers[0].worker.host = "another"
    plain_on_gpu = here("reference")
    for entry in plain_on_gpu.workers:
        entry.worker.kernels.isa = "sm_90"
    for status in (elsewhere, here("triton"), plain_on_gpu, status_response()):
        assert run(status) == ([], None)
