"""``make cancel-storm``: requests of which a third are cancelled at random moments.

Some ask for several outputs, and half of them find a part of their prompt, or all, in the pools.

Cancels come by call, by deadline and by leaving. In the end every pool is free, every counter adds
up, and the memory of the processes has not grown since the warm-up. The command runs it on a real
cluster of one prefill and one decode worker with a small model of random weights; the suite, a
shorter one over a stub model in one process, with real gRPC, ZeroMQ and shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from kvferry.cluster.client import AsyncClient, AsyncGenerateStream, Client
from kvferry.cluster.errors import DeadlineExceeded
from kvferry.protos import kvferry_pb2 as pb
from tests.engine.tiny_gguf import CONTEXT, vocabulary, write_tiny_gguf
from tests.stack import Stack
from tests.system.pools import assert_quiet
from tests.system.processes import Served

CONCURRENCY = 32
SHARE_CANCELLED = 1 / 3
LONGEST_S = 0.5  # deadlines
SWITCH_S = 0.0005  # all parties share one interpreter here: let them take turns
RENAMED = {"aborted": "finished_abort", "failed": "finished_error"}  # of the status, here
READINGS = 8  # of resident memory
LONGEST_PROMPT = 60
NUM_KNOWN = 16  # prompts that come again
VOCAB_SIZE = len(vocabulary())
CONFIG = "{cache: {num_blocks: 96}, decode: {num_blocks: 64}}"  # too few for all at once


@dataclass
class Outcome:
    """What became of a storm, as the clients and the router saw it."""

    sent: int
    duration_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What does not add up; empty if all does."""
        count = self.counters
        finished = {name: n for name, n in count.items() if name.startswith("finished_")}
        checks = {
            "every request has ended at its client": self.ends.total() == self.sent,
            "the router accepted no more than were sent": count["accepted"] <= self.sent,
            "accepted = finished by reason": count["accepted"] == sum(finished.values()),
            "those that finished did so for their client": (
                self.ends["length"] <= count["finished_length"]
            ),
            "nothing failed": not count.get("finished_error") and not self.ends["error"],
            "nothing was tried again": not count.get("recovered"),
        }
        return [name for name, holds in checks.items() if not holds]


class Storm:
    """Sends the requests; ``random`` decides every moment."""

    def __init__(
        self,
        endpoint: str,
        watched: Sequence[psutil.Process],
        longest_output: int,
        num_requests: int,
        random: Random,
    ) -> None:
        self.outcome = Outcome(num_requests)
        self._endpoint = endpoint
        self._watched = watched
        self._longest_output = longest_output
        self._random = random
        self._known: list[list[int]] = []

    async def run(self) -> Outcome:
        """All requests, ``CONCURRENCY`` at a time; memory is read along the way."""
        began = time.monotonic()
        async with AsyncClient(self._endpoint) as client:
            left = iter(range(self.outcome.sent))
            reading = asyncio.create_task(self._read_memory())
            await asyncio.gather(*(self._send(client, left) for _ in range(CONCURRENCY)))
            reading.cancel()
        self.outcome.duration_s = time.monotonic() - began
        return self.outcome

    async def _send(self, client: AsyncClient, left: Iterator[int]) -> None:
        for _ in left:
            self.outcome.ends[await self._one(client)] += 1

    async def _one(self, client: AsyncClient) -> str:
        random = self._random
        prompt = self._prompt()
        is_doomed = random.random() < SHARE_CANCELLED
        max_tokens = self._longest_output if is_doomed else random.randint(1, 40)
        n = random.choice([1, 1, 1, 2, 4])
        sampling = pb.SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        how = random.choice(["call", "deadline", "leave"])
        if not is_doomed:
            return await self._to_the_end(client, request, None)
        if how == "deadline":
            return await self._to_the_end(client, request, random.uniform(0.001, LONGEST_S))
        async with client.stream(request) as stream:
            after = random.randrange(8)  # so many events, and then at some moment
            seen = asyncio.Event()
            reading = asyncio.create_task(self._read(stream, after, seen))
            await asyncio.wait(
                {reading, asyncio.create_task(seen.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            seen.set()
            await asyncio.wait({reading}, timeout=random.choice([0.0, random.uniform(0.0, 0.05)]))
            if how == "call" and stream.request_id:
                await client.cancel(stream.request_id)
                return await reading
            reading.cancel()
            stream.close()
            await asyncio.wait({reading})
            return "left" if reading.cancelled() or reading.exception() else reading.result()

    def _prompt(self) -> list[int]:
        """A quarter came before, another quarter begins like one that did."""
        random = self._random
        length = random.randint(1, LONGEST_PROMPT)
        fresh = [random.randrange(VOCAB_SIZE) for _ in range(length)]
        known = random.choice(self._known) if self._known else []
        prompt = random.choice([fresh, fresh, known, (known + fresh)[:LONGEST_PROMPT]]) or fresh
        if len(self._known) < NUM_KNOWN:
            self._known.append(prompt)
        return prompt

    async def _to_the_end(
        self, client: AsyncClient, request: pb.GenerateRequest, timeout_s: float | None
    ) -> str:
        try:
            async with client.stream(request, timeout_s=timeout_s) as stream:
                return await self._read(stream)
        except DeadlineExceeded:
            return "deadline"

    async def _read(
        self, stream: AsyncGenerateStream, after: int = 0, seen: asyncio.Event | None = None
    ) -> str:
        """To the end, whose reason it returns; sets ``seen`` after so many events."""
        reason = "error"
        count = 0
        if seen is not None and not after:
            seen.set()
        async for event in stream:
            count += 1
            if seen is not None and count >= after:
                seen.set()
            if isinstance(event, pb.Finished):
                reason = event.finish_reason
        return reason

    async def _read_memory(self) -> None:
        """After the first eighth, and then at every eighth, of the requests."""
        for share in range(1, READINGS):
            while self.outcome.ends.total() < self.outcome.sent * share / READINGS:
                await asyncio.sleep(0.05)
            self.note_memory()

    def note_memory(self) -> None:
        """Read the resident memory of each process."""
        gc.collect()
        for process in self._watched:
            name = process.name().removeprefix("ray::").partition(".")[0]
            readings = self.outcome.resident_bytes.setdefault(name, [])
            readings.append(process.memory_info().rss)


def storm(folder: Path, num_requests: int, seed: int = 1) -> Outcome:
    """Run one in this process; the pools must be free and every load zero when it is over."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with Stack(folder, num_blocks=96, decode_blocks=64) as stack:
            weather = Storm(stack.endpoint, [psutil.Process()], 130, num_requests, Random(seed))
            outcome = asyncio.run(weather.run())
            stack.assert_quiet()
            outcome.counters = stack.counters()
            weather.note_memory()
            return outcome
    finally:
        sys.setswitchinterval(usual)


def real_storm(folder: Path, num_requests: int, seed: int) -> Outcome:
    """Run one on real processes; the pools must be free when it is over."""
    model = folder / "random.gguf"
    write_tiny_gguf(model)
    with (
        Served(folder, CONFIG, "--model", str(model)) as served,
        Client(served.endpoint) as client,
    ):
        watched = [p for p in served.family() if "Worker" in p.name() or "Router" in p.name()]
        assert len(watched) == 3, watched
        weather = Storm(
            served.endpoint, watched, CONTEXT - LONGEST_PROMPT, num_requests, Random(seed)
        )
        outcome = asyncio.run(weather.run())
        assert_quiet(client)
        outcome.counters = {
            RENAMED.get(item.name, item.name): value
            for item, value in client.status().counters.ListFields()
        }
        weather.note_memory()
        return outcome


def main() -> None:
    """Print what became of the requests; exit 1 if something does not add up."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        outcome = real_storm(Path(folder), options.requests, options.seed)
    print(f"{outcome.sent} requests in {outcome.duration_s:.1f} s, ended as {dict(outcome.ends)}")
    print(f"router: {outcome.counters}")
    for name, readings in outcome.resident_bytes.items():
        megabytes = " ".join(f"{resident / 2**20:.1f}" for resident in readings)
        print(f"resident MiB of {name}, from the first eighth to the end: {megabytes}")
    problems = outcome.problems()
    print("pools free, loads zero; " + ("; ".join(problems) or "counters add up"))
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
