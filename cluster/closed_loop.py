"""A closed loop of requests of fixed lengths, whatever they are sent to.

``concurrency`` clients each send their next request when the last one has ended. Prompts are
random token ids from a seed, outputs have an exact length, and every time is the client's. Knows
neither the server nor its protocol, nor how results are printed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvferry.cluster.errors import StreamError
from kvferry.cluster.reports.common import Json, dist
from kvferry.cluster.reports.documents import error_json
from kvferry.kv_cache.errors import KVFerryError


class Answer(Protocol):
    """What the loop reads of an answered request; ``client_stream.Completion`` is one."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What was streamed."""

    @property
    def ttft_s(self) -> float | None:
        """Client's own time to the first token; None without tokens."""

    @property
    def itl_s(self) -> Sequence[float]:
        """Client's own gaps between tokens; one fewer than tokens."""

    @property
    def e2e_s(self) -> float:
        """Client's own time to the end."""


Send: TypeAlias = Callable[[list[int], int], Awaitable[Answer]]
"""Sends a prompt (token ids), wants so many output tokens whatever they are, greedily. Raises
KVFerryError where the request fails."""


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

    completions: list[Answer] = field(default_factory=list)
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


async def run_closed_loop(
    send: Send,
    workload: Workload,
    prompts: Sequence[list[int]],
    ended: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Repeat:
    """Send all ``prompts``; ``ended(num_ended)`` follows each request's end.

    An answer of another length than asked for is a failure.
    """
    repeat = Repeat()
    waiting: Iterator[list[int]] = iter(prompts)

    async def one_client() -> None:
        for prompt in waiting:
            try:
                repeat.completions.append(await send_one(send, prompt, workload.output_tokens))
            except KVFerryError as exc:
                repeat.failures.append(exc)
            ended(len(repeat.completions) + len(repeat.failures))

    started = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(workload.concurrency, len(prompts))):
            group.create_task(one_client())
    repeat.duration_s = clock() - started
    return repeat


async def send_one(send: Send, prompt: list[int], output_tokens: int) -> Answer:
    """One request. Raises StreamError if the answer has another length than asked for."""
    answer = await send(prompt, output_tokens)
    if len(answer.output_token_ids) != output_tokens:
        raise StreamError(
            f"got {len(answer.output_token_ids)} tokens, wanted {output_tokens}: "
            "ignore_eos was not honoured"
        )
    return answer


def results_json(repeat: Repeat) -> Json:
    """Figures of one repeat; what only an open loop has is null."""
    done, tokens = repeat.completions, repeat.output_tokens
    return {
        "completed": len(done),
        "failed": len(repeat.failures),
        "first_error": error_json(repeat.failures[0]) if repeat.failures else None,
        "duration_s": repeat.duration_s,
        "output_tokens_per_s": repeat.output_tokens_per_s,
        "requests_per_s": len(done) / repeat.duration_s if repeat.duration_s > 0 else None,
        **latencies_json(done),
        "cpu_s_per_output_token": (
            repeat.cpu_s / tokens if repeat.cpu_s is not None and tokens else None
        ),
        "schedule_lag_s": None,
        "goodput_per_s": None,
        "slo": None,
    }


def latencies_json(done: Sequence[Answer]) -> Json:
    """DIST of each of the client's times over the answered requests."""
    ttft = [answer.ttft_s for answer in done if answer.ttft_s is not None]
    gaps = [answer.itl_s for answer in done]
    seconds = [
        answer.ttft_s + itl[0]
        for answer, itl in zip(done, gaps, strict=True)
        if answer.ttft_s is not None and itl
    ]
    return {
        "ttft_s": dist(ttft),
        "ttst_s": dist(seconds),
        "tpot_s": dist([sum(itl) / len(itl) for itl in gaps if itl]),
        "itl_s": dist([gap for itl in gaps for gap in itl]),
        "e2e_s": dist([answer.e2e_s for answer in done]),
    }
