"""One stream as a client sees it, kept whole: what came when, and how that differs from right.

The usual client raises at the first fault of a stream; here faults are counted. ``StreamRecord``
is pure; ``follow`` and ``insist`` drive it from a gRPC channel.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from kvferry.cluster.chaos.workload import Prompt
from kvferry.cluster.client_stream import GenerateOptions, build_request
from kvferry.cluster.errors import NotReady, StreamError, WorkerLost, from_grpc
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from kvferry.protos.kvferry_pb2_grpc import InferenceAsyncStub

STREAM_TIMEOUT_S = 120.0
RETRY_PAUSE_S = 0.1
UNAVAILABLE = (NotReady, WorkerLost)


@dataclass(frozen=True, slots=True)
class Faults:
    """Tokens of a stream that are not as they should be."""

    lost: int = 0
    repeated: int = 0
    wrong: int = 0

    def __add__(self, other: Faults) -> Faults:
        return Faults(
            self.lost + other.lost, self.repeated + other.repeated, self.wrong + other.wrong
        )


NO_FAULTS = Faults()


@dataclass(slots=True)
class StreamRecord:
    """Everything that came of one request; times are readings of one monotonic clock."""

    request_id: str = ""
    tokens: dict[int, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    num_repeated: int = 0
    finished: pb.Finished | None = None
    error: KVFerryError | None = None

    def add(self, response: pb.GenerateResponse, now: float) -> None:
        """Take in one response that arrived at ``now``."""
        self.request_id = response.request_id
        kind = response.WhichOneof("event")
        if kind == "delta":
            for index, token_id in enumerate(response.delta.token_ids, response.delta.index):
                self.num_repeated += index in self.tokens
                self.tokens[index] = token_id
                self.times.append(now)
        elif kind == "finished":
            self.finished = response.finished

    @property
    def output(self) -> list[int]:
        """Token ids in order of their index."""
        return [self.tokens[index] for index in sorted(self.tokens)]

    @property
    def longest_gap_s(self) -> float | None:
        """The longest time between two tokens; None with fewer than two."""
        return max((b - a for a, b in pairwise(self.times)), default=None)

    def faults(self, reference: Sequence[int]) -> Faults:
        """Compare with the right output; a stream that did not finish is right as a prefix of it.

        A token beyond the reference is wrong.
        """
        wanted = len(reference) if self.finished is not None else max(self.tokens, default=-1) + 1
        lost = sum(index not in self.tokens for index in range(wanted))
        wrong = sum(
            index >= len(reference) or token_id != reference[index]
            for index, token_id in self.tokens.items()
        )
        return Faults(lost, self.num_repeated, wrong)


async def follow(channel: grpc.aio.Channel, prompt: Prompt, record: StreamRecord) -> None:
    """Send ``prompt`` and record its stream to its end, however that comes.

    Under a salt of its own: it finds nothing in the pools, so that it is computed and moved.
    """
    stub = cast("InferenceAsyncStub", InferenceStub(channel))
    request = build_request(prompt.text, cast(GenerateOptions, prompt.options))
    request.cache_salt = secrets.token_hex(8)
    call = stub.Generate(request, timeout=STREAM_TIMEOUT_S)
    try:
        async for response in call:
            record.add(response, time.monotonic())
    except grpc.RpcError as error:
        record.error = from_grpc(error)
    else:
        if record.finished is None:
            record.error = StreamError("the stream ended without its terminal event")
    finally:
        call.cancel()


async def insist(
    channel: grpc.aio.Channel, prompt: Prompt, records: list[StreamRecord], within_s: float
) -> None:
    """Send ``prompt`` as new requests until one is not answered UNAVAILABLE, or time is up.

    Every try is added to ``records``.
    """
    deadline = time.monotonic() + within_s
    while True:
        record = StreamRecord()
        records.append(record)
        await follow(channel, prompt, record)
        if not isinstance(record.error, UNAVAILABLE) or time.monotonic() > deadline:
            return
        await asyncio.sleep(RETRY_PAUSE_S)
