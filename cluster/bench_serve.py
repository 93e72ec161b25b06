"""``kvferry bench serve``: the closed loop against a gRPC endpoint.

One request before the measured ones warms the connections up and is not counted. Does not know
how results are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cluster.bench.served_roof import (
    STEADY,
    Arrangement,
    Load,
    Reading,
    output_tokens_per_s,
    spread,
    typical,
)
from kvferry.cluster.bench_cpu import CpuMeter
from kvferry.cluster.client import AsyncClient, Completion
from kvferry.cluster.client_security import PLAIN, ClientSecurity
from kvferry.cluster.closed_loop import (
    Repeat,
    Send,
    Workload,
    results_json,
    run_closed_loop,
    send_one,
)
from kvferry.cluster.errors import Internal, NotReady
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import to_json
from kvferry.engine.models.size import ModelSize
from kvferry.engine.request import InvalidRequest
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

CPU_KERNELS = ("reference", "cpu")


Measure = Callable[[Arrangement], Reading]
"""Measures the idle machine; takes a second or so."""


@dataclass(frozen=True, slots=True)
class Bench:
    """All repeats, and what the server said of itself before them.

    ``readings`` are the machine's before each repeat and after the last; none where the workers
    are elsewhere or on other devices.
    """

    endpoint: str
    workload: Workload
    status: pb.StatusResponse
    repeats: Sequence[Repeat]
    readings: Sequence[Reading] = ()

    @property
    def median(self) -> Repeat:
        """The repeat of median throughput (of an even number, the slower of the middle two)."""
        ordered = sorted(self.repeats, key=lambda repeat: repeat.output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def error(self) -> KVFerryError | None:
        """Why the run does not count; None if every request of every repeat completed."""
        failures = [failure for repeat in self.repeats for failure in repeat.failures]
        if not failures:
            return None
        first = f"{type(failures[0]).__name__}: {failures[0]}"
        total = self.workload.num_requests * len(self.repeats)
        return Internal(f"{len(failures)} of {total} requests failed; the first: {first}")


async def bench_serve(
    endpoint: str,
    workload: Workload,
    num_repeats: int,
    on_progress: Callable[[int, int], None],
    measure: Measure | None = None,
    clock: Callable[[], float] = time.monotonic,
    security: ClientSecurity = PLAIN,
) -> Bench:
    """Run ``num_repeats`` passes; ``on_progress(repeat, num_ended)`` follows each request's end.

    ``measure``, if given, is called before, between and after them for a cluster on this machine's
    processors.

    Raises the client's typed errors where the server cannot serve the workload at all.
    """
    async with AsyncClient(endpoint, clock=clock, security=security) as client:
        status = await client.status()
        _check(workload, status)
        warm_up = workload.prompts(-1, status.model.vocab_size)[0]
        send = sender(client)
        await send_one(send, warm_up, workload.output_tokens)
        arrangement = _arrangement(status) if CpuMeter.of_cluster(status, endpoint) else None
        readings: list[Reading] = []

        def read_machine() -> None:
            if measure is not None and arrangement is not None:
                readings.append(measure(arrangement))

        repeats = []
        for number in range(num_repeats):
            prompts = workload.prompts(number, status.model.vocab_size)

            def ended(count: int, number: int = number) -> None:
                on_progress(number, count)

            read_machine()
            meter = CpuMeter.of_cluster(status, endpoint)
            repeat = await run_closed_loop(send, workload, prompts, ended, clock)
            repeat.cpu_s = meter.elapsed() if meter is not None else None
            repeats.append(repeat)
        read_machine()
        return Bench(endpoint, workload, status, repeats, readings)


def _is_on_cpu(worker: pb.Worker) -> bool:
    """Plain torch has an instruction set on a GPU only: its architecture."""
    kernels = worker.kernels
    plain_on_gpu = kernels.implementation == "reference" and bool(kernels.isa)
    return kernels.implementation in CPU_KERNELS and not plain_on_gpu


def _arrangement(status: pb.StatusResponse) -> Arrangement | None:
    workers = [entry.worker for entry in status.workers]
    if not all(_is_on_cpu(worker) for worker in workers):
        return None
    return Arrangement.of([(worker.role, worker.threads) for worker in workers])


def _check(workload: Workload, status: pb.StatusResponse) -> None:
    if not status.ready:
        raise NotReady(f"the cluster is not ready: {', '.join(status.not_ready_reasons)}")
    longest = workload.input_tokens + workload.output_tokens
    if longest > status.model.max_model_len:
        raise InvalidRequest(
            f"got {workload.input_tokens} input and {workload.output_tokens} output tokens; the "
            f"model takes {status.model.max_model_len} together: ask for fewer"
        )


def sender(client: AsyncClient) -> Send:
    """Sends the closed loop's requests through ``client``."""

    async def send(prompt: list[int], output_tokens: int) -> Completion:
        return await client.generate_text(
            token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0.0
        )

    return send


def bench_json(bench: Bench) -> Json:
    """The fields of ``bench serve``; ``results`` are the median repeat's."""
    workload, status = bench.workload, bench.status
    return {
        "target": {
            "kind": "kvferry",
            "endpoint": bench.endpoint,
            "server_version": status.version or None,
            "model": to_json(status.model),
            "machine": to_json(status.machine) if status.HasField("machine") else None,
        },
        "arrangement": arrangement_json(status),
        "workload": {
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            "concurrency": workload.concurrency,
            "rate": None,
            "num_requests": workload.num_requests,
            "seed": workload.seed,
        },
        "results": results_json(bench.median),
        "repeats": [results_json(repeat) for repeat in bench.repeats],
        "roof": _roof_json(bench),
        "peer": None,
        "ratio_to_peer": None,
    }


def arrangement_json(status: pb.StatusResponse) -> Json:
    """Workers by role, their threads together, and the model's type."""
    roles = [worker.worker.role for worker in status.workers]
    return {
        "prefill": roles.count("prefill"),
        "decode": roles.count("decode"),
        "colocated": roles.count("colocated"),
        "threads": sum(worker.worker.threads for worker in status.workers),
        "dtype": status.model.dtype,
    }


def _roof_json(bench: Bench) -> Json | None:
    arrangement = _arrangement(bench.status)
    if not bench.readings or arrangement is None:
        return None
    model, workload = bench.status.model, bench.workload
    size = ModelSize(model.weight_bytes, model.num_layer_parameters, model.num_head_parameters)
    load = Load(workload.input_tokens, workload.output_tokens, workload.concurrency)
    can = typical(bench.readings)
    kv_bytes_per_token = model.block_bytes / model.block_size
    roof = output_tokens_per_s(load, size, kv_bytes_per_token, arrangement, can)
    apart = spread(bench.readings)
    return {
        "output_tokens_per_s": roof,
        "fraction": bench.median.output_tokens_per_s / roof,
        "gemm_flops": can.gemm_flops,
        "read_bytes_per_s": can.read_bytes_per_s,
        "gemm_threads": arrangement.gemm_threads,
        "read_threads": arrangement.read_threads,
        "spread": apart,
        "steady": apart <= STEADY,
    }
