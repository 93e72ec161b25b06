"""A client in a process of its own, to be killed or stopped: python -m kvferry.cluster.chaos.client

Arguments: endpoint, prompt, output tokens. Prints the request's id as soon as the server has told
it.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio

from kvferry.cluster.chaos.streams import StreamRecord, follow
from kvferry.cluster.chaos.workload import Prompt
from kvferry.protos import kvferry_pb2 as pb


class _Telling(StreamRecord):
    """A record that prints the request's id once."""

    def add(self, response: pb.GenerateResponse, now: float) -> None:
        if not self.request_id:
            print(response.request_id, flush=True)
        StreamRecord.add(self, response, now)


async def _main(endpoint: str, text: str, max_tokens: str) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await follow(channel, Prompt(text, int(max_tokens)), _Telling())


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
