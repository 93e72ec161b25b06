"""Streams against a cluster, each event noted with its time: ``python -m tests.hosts.streams OUT``.

Runs on a machine, and looks at the cluster's status meanwhile. OUT becomes JSON lines: {"stream",
"at", "index", "ids"} for each delta, {"stream", "at", "end", ...} for each end, {"at", "workers",
"recovered"} for each change of the status. Times are of the host's monotonic clock, which all
machines of namespaces share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, TextIO

from kvferry.cluster.client import AsyncClient
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb

LOOK_S = 0.02
# Their continuations go on for long with one clear favourite at each step.
PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "2, 4, 6, 8, 10, 12, 14, 16, 18,",
    "for i in range(10):\n    print(i)\nfor i in range(20):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
)


class Log:
    """Lines of JSON, each flushed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, **fields: Any) -> None:
        print(json.dumps({"at": time.monotonic(), **fields}), file=self._file, flush=True)


async def follow(client: AsyncClient, number: int, tokens: int, log: Log) -> None:
    prompt = PROMPTS[number % len(PROMPTS)]
    stream = client.generate(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True)
    try:
        async for event in stream:
            if isinstance(event, pb.Delta):
                log.note(stream=number, index=event.index, ids=list(event.token_ids))
            elif isinstance(event, pb.Finished):
                log.note(
                    stream=number,
                    end=event.finish_reason,
                    attempt=event.attempt,
                    tokens=event.usage.completion_tokens,
                    worker=event.decode_worker,
                )
    except KVFerryError as error:
        log.note(stream=number, end="error", error=f"{type(error).__name__}: {error}")


async def look(client: AsyncClient, log: Log) -> None:
    """Note the status whenever it has changed."""
    before = None
    while True:
        try:
            status = await client.status()
        except KVFerryError as error:  # it is not what is tried here
            log.note(unanswered=f"{type(error).__name__}: {error}")
            continue
        workers = {
            entry.worker.worker_id: [entry.worker.state, entry.worker.epoch]
            for entry in status.workers
        }
        if (workers, status.counters.recovered) != before:
            before = (workers, status.counters.recovered)
            log.note(workers=workers, recovered=status.counters.recovered)
        await asyncio.sleep(LOOK_S)


async def run(endpoint: str, number: int, tokens: int, log: Log) -> None:
    async with AsyncClient(endpoint) as client:
        looking = asyncio.create_task(look(client, log))
        try:
            await asyncio.gather(*(follow(client, at, tokens, log) for at in range(number)))
        finally:
            looking.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--endpoint", default="127.0.0.1:50051")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        asyncio.run(run(args.endpoint, args.streams, args.tokens, Log(file)))
