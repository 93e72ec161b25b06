"""``kvferry bench serve``: a closed loop of fixed lengths against a gRPC endpoint.

``concurrency`` clients each send their next request when the last one has ended. Prompts are
random token ids from a seed, outputs have an exact length (``ignore_eos``), and every time is
measured here, at the client. One request before the measured ones warms the connections up and is
not counted. Does not know how results are printed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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
from kvferry.cluster.errors import Internal, NotReady, StreamError
from kvferry.cluster.reports.common import Json, dist
from kvferry.cluster.reports.documents import error_json, to_json
from kvferry.engine.models.size import ModelSize
from kvferry.engine.request import InvalidRequest
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

CPU_KERNELS = ("reference", "cpu")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent: lengths in tokens, requests in flight, requests in all."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int
    seed: int = 0

    def prompts(self, repeat: int, vocab_size: int) -> list[list[int]]:
        """Prompts of one repeat; other repeats get others, so that no cache answers for them.

        Returns ``[num_requests][input_tokens]`` ids below ``vocab_size``.
        """
        rng = random.Random(f"{self.seed}/{repeat}")
        return [
            [rng.randrange(vocab_size) for _ in range(self.input_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass(slots=True)
class Repeat:
    """One pass over the workload."""

    completions: list[Completion] = field(default_factory=list)
    failures: list[KVFerryError] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_s: float | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens received, of requests that ended well."""
        return sum(len(c.output_token_ids) for c in self.completions)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the time from the first request to the last end."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0


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
) -> Bench:
    """Run ``num_repeats`` passes; ``on_progress(repeat, num_ended)`` follows each request's end.

    ``measure``, if given, is called before, between and after them for a cluster on this machine's
    processors.

    Raises the client's typed errors where the server cannot serve the workload at all.
    """
    async with AsyncClient(endpoint, clock=clock) as client:
        status = await client.status()
        _check(workload, status)
        warm_up = workload.prompts(-1, status.model.vocab_size)[0]
        await _one(client, warm_up, workload.output_tokens)
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
            repeat = await _run(client, workload, prompts, ended, clock)
            repeat.cpu_s = meter.elapsed() if meter is not None else None
            repeats.append(repeat)
        read_machine()
        return Bench(endpoint, workload, status, repeats, readings)


def _arrangement(status: pb.StatusResponse) -> Arrangement | None:
    workers = [entry.worker for entry in status.workers]
    if any(worker.kernels.implementation not in CPU_KERNELS for worker in workers):
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


async def _run(
    client: AsyncClient,
    workload: Workload,
    prompts: Sequence[list[int]],
    ended: Callable[[int], None],
    clock: Callable[[], float],
) -> Repeat:
    repeat = Repeat()
    waiting: Iterator[list[int]] = iter(prompts)

    async def one_client() -> None:
        for prompt in waiting:
            try:
                repeat.completions.append(await _one(client, prompt, workload.output_tokens))
            except KVFerryError as exc:
                repeat.failures.append(exc)
            ended(len(repeat.completions) + len(repeat.failures))

    started = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(workload.concurrency, len(prompts))):
            group.create_task(one_client())
    repeat.duration_s = clock() - started
    return repeat


async def _one(client: AsyncClient, prompt: list[int], output_tokens: int) -> Completion:
    completion = await client.generate_text(
        token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0.0
    )
    if len(completion.output_token_ids) != output_tokens:
        raise StreamError(
            f"request {completion.request_id}: got {len(completion.output_token_ids)} tokens, "
            f"wanted {output_tokens}: ignore_eos was not honoured"
        )
    return completion


def bench_json(bench: Bench) -> Json:
    """The fields of ``bench serve``; ``results`` are the median repeat's."""
    workload, status = bench.workload, bench.status
    roles = [worker.worker.role for worker in status.workers]
    return {
        "target": {
            "kind": "kvferry",
            "endpoint": bench.endpoint,
            "server_version": status.version or None,
            "model": to_json(status.model),
            "machine": to_json(status.machine) if status.HasField("machine") else None,
        },
        "arrangement": {
            "prefill": roles.count("prefill"),
            "decode": roles.count("decode"),
            "colocated": roles.count("colocated"),
            "threads": sum(worker.worker.threads for worker in status.workers),
            "dtype": status.model.dtype,
        },
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


def results_json(repeat: Repeat) -> Json:
    """Figures of one repeat; what only an open loop has is null."""
    done, tokens = repeat.completions, repeat.output_tokens
    ttft = [c.ttft_s for c in done if c.ttft_s is not None]
    seconds = [c.ttft_s + c.itl_s[0] for c in done if c.ttft_s is not None and c.itl_s]
    return {
        "completed": len(done),
        "failed": len(repeat.failures),
        "first_error": error_json(repeat.failures[0]) if repeat.failures else None,
        "duration_s": repeat.duration_s,
        "output_tokens_per_s": repeat.output_tokens_per_s,
        "requests_per_s": len(done) / repeat.duration_s if repeat.duration_s > 0 else None,
        "ttft_s": dist(ttft),
        "ttst_s": dist(seconds),
        "tpot_s": dist([sum(c.itl_s) / len(c.itl_s) for c in done if c.itl_s]),
        "itl_s": dist([gap for c in done for gap in c.itl_s]),
        "e2e_s": dist([c.e2e_s for c in done]),
        "cpu_s_per_output_token": (
            repeat.cpu_s / tokens if repeat.cpu_s is not None and tokens else None
        ),
        "schedule_lag_s": None,
        "goodput_per_s": None,
        "slo": None,
    }
