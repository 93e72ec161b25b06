"""One run: a started system under the closed loop, at each concurrency in turn.

Both systems get the same prompts at the same place of the plan, and no prompt twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.peers.systems import Running
from kvferry.cluster.bench_cpu import CpuMeter
from kvferry.cluster.closed_loop import Repeat, Workload, run_closed_loop, send_one

MIN_REQUESTS = 8
REQUESTS_PER_CLIENT = 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What every run sends.

    Attributes:
        concurrencies: numbers of clients, measured one after the other.
        num_requests: of one repeat; None for four per client, but eight at least.
        num_repeats: of each concurrency, in one run.
        vocab_size: prompts are random ids below it.
    """

    input_tokens: int
    output_tokens: int
    concurrencies: Sequence[int]
    num_requests: int | None
    num_repeats: int
    seed: int
    vocab_size: int

    def workload(self, concurrency: int) -> Workload:
        """Of one concurrency; its seed is its own, so that no other's prompts come again."""
        count = self.num_requests or max(MIN_REQUESTS, REQUESTS_PER_CLIENT * concurrency)
        seed = self.seed * 1000 + concurrency
        return Workload(self.input_tokens, self.output_tokens, concurrency, count, seed)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's repeats by concurrency, and the tokens that answered the first prompt of all."""

    repeats: dict[int, list[Repeat]]
    first_tokens: list[int]


async def put_under_load(running: Running, load: Load, round_number: int, say: Say) -> Measured:
    """Warm up and measure every concurrency. Raises KVFerryError if the warm-up fails."""
    repeats: dict[int, list[Repeat]] = {}
    async with running.client() as send:
        first = load.workload(0).prompts(-1, load.vocab_size)[0]
        answer = await send_one(send, first, load.output_tokens)
        for concurrency in load.concurrencies:
            workload = load.workload(concurrency)
            # as many as measured ones at once, so that every batch has been computed before
            warm_up = workload.prompts(-1 - round_number, load.vocab_size)[:concurrency]
            for failure in (await run_closed_loop(send, workload, warm_up)).failures:
                raise failure
            repeats[concurrency] = []
            for number in range(load.num_repeats):
                prompts = workload.prompts(
                    round_number * load.num_repeats + number, load.vocab_size
                )
                meter = _cpu_meter(running)
                repeat = await run_closed_loop(send, workload, prompts)
                repeat.cpu_s = meter.elapsed() if meter is not None else None
                repeats[concurrency].append(repeat)
                say(
                    f"  concurrency {concurrency}, repeat {number + 1} of {load.num_repeats}: "
                    f"{repeat.output_tokens_per_s:.1f} output tokens/s, "
                    f"{len(repeat.failures)} of {workload.num_requests} failed"
                )
    return Measured(repeats, list(answer.output_token_ids))


def _cpu_meter(running: Running) -> CpuMeter | None:
    """Of every process of the system; None if one ends just now."""
    try:
        return CpuMeter(running.family())
    except psutil.Error:
        return None


def measure(running: Running, load: Load, round_number: int, say: Say) -> Measured:
    """``put_under_load`` in a loop of its own."""
    return asyncio.run(put_under_load(running, load, round_number, say))
