"""Full load and no fault, to count the deaths that are declared nevertheless."""

from __future__ import annotations

import asyncio
import time
from itertools import cycle

import grpc.aio
import psutil

from kvferry.cluster.chaos.load import References
from kvferry.cluster.chaos.results import Soak
from kvferry.cluster.chaos.streams import NO_FAULTS, StreamRecord, follow
from kvferry.cluster.chaos.workload import BACKGROUND, BLOCKERS, TARGET

CONCURRENCY = 8


async def soak(channel: grpc.aio.Channel, references: References, duration_s: float) -> Soak:
    """Keep ``CONCURRENCY`` requests running for ``duration_s`` seconds, then let them end.

    A request fails that ends with an error or with other tokens than its reference.
    """
    prompts = cycle((TARGET, *BACKGROUND, *BLOCKERS))
    num_requests = num_failed = 0
    began = time.monotonic()

    async def one_client() -> None:
        nonlocal num_requests, num_failed
        while time.monotonic() - began < duration_s:
            prompt, record = next(prompts), StreamRecord()
            await follow(channel, prompt, record)
            num_requests += 1
            good = record.error is None and record.faults(references[prompt]) == NO_FAULTS
            num_failed += not good

    psutil.cpu_percent()  # begins to measure
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(one_client())
    busy = psutil.cpu_percent() / 100
    return Soak(time.monotonic() - began, num_requests, num_failed, busy)
