"""A server that emits tokens on a fixed schedule and writes down when it did. A process of its own.

    python -m tests.loadgen.stub_server [--interval S] [--ttft S]

It speaks ``kvferry.v1`` and OpenAI's completions over HTTP, on free ports of 127.0.0.1. The first
line it prints is ``{"grpc": HOST:PORT, "http": URL}``; when its standard input ends it prints one
more, a list of records ``{"door", "prompt", "received", "emitted"}`` in order of arrival, and ends.
Moments are readings of the monotonic clock, taken before the token is handed to the transport.

Token k of a request is due at its receipt + ``ttft`` + k × ``interval``. Receipt over gRPC is
when the call was accepted, half a millisecond before its handler has the message; over HTTP when
the request's head has come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import (
    ClusterServicer,
    InferenceServicer,
    add_ClusterServicer_to_server,
    add_InferenceServicer_to_server,
)
from tests.cluster.fake_server import REQUEST_ID, finished, status_response

MAX_BODY = 1 << 24

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor


@dataclass(slots=True)
class Record:
    """One request: its door and prompt, when it came, and when each token was emitted."""

    door: str
    prompt: list[int]
    received: float
    emitted: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Schedule:
    """When tokens are due; keeps the records."""

    ttft_s: float
    interval_s: float
    records: list[Record] = field(default_factory=list)

    async def tokens(
        self, door: str, prompt: list[int], count: int, received: float
    ) -> AsyncIterator[int]:
        """Each token's number, when it is due; noted as emitted."""
        record = Record(door, prompt, received)
        self.records.append(record)
        for number in range(count):
            due = record.received + self.ttft_s + number * self.interval_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            record.emitted.append(time.monotonic())
            yield number


accepted_at: ContextVar[float] = ContextVar("accepted_at")


class NoteArrival(Interceptor):
    """Writes down when a call was accepted; its handler runs in the same context."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        accepted_at.set(time.monotonic())
        return await continuation(handler_call_details)


class GrpcDoor(InferenceServicer, ClusterServicer):
    """One delta per token."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        prompt = list(request.token_ids.ids)
        accepted = pb.Accepted(prompt_tokens=len(prompt))
        await context.write(pb.GenerateResponse(request_id=REQUEST_ID, accepted=accepted))
        count = request.sampling.max_tokens
        async for number in self._schedule.tokens("grpc", prompt, count, accepted_at.get()):
            delta = pb.Delta(index=number, token_ids=[number], text=" a")
            await context.write(pb.GenerateResponse(request_id=REQUEST_ID, delta=delta))
        end = finished(count, prompt_tokens=len(prompt))
        await context.write(pb.GenerateResponse(request_id=REQUEST_ID, finished=end))

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        status = status_response()
        status.model.max_model_len = 1 << 20
        return status


class HttpDoor:
    """Completions as server-sent events, and the list of models; connections are kept."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                received = time.monotonic()
                path = head.split(" ", 2)[1]
                lengths = [
                    int(line.partition(":")[2])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length:")
                ]
                body = await reader.readexactly(lengths[0] if lengths else 0)
                if path == "/v1/completions":
                    await self._complete(json.loads(body), writer, received)
                else:
                    self._answer(path, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        known = path == "/v1/models"
        content = json.dumps({"data": [{"id": "stub"}]} if known else {}).encode()
        status = b"200 OK" if known else b"404 Not Found"
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content
        )

    async def _complete(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, received: float
    ) -> None:
        def event(value: str) -> None:
            data = f"data: {value}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with_ids = bool(body.get("return_token_ids"))
        wanted = body["prompt"], body["max_tokens"]
        async for number in self._schedule.tokens("http", *wanted, received):
            choice: dict[str, Any] = {"index": 0, "text": " a", "finish_reason": None}
            if with_ids:
                choice["token_ids"] = [number]
            event(json.dumps({"object": "text_completion", "choices": [choice]}))
            await writer.drain()
        event(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        used = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        event(json.dumps({"choices": [], "usage": used}))
        event("[DONE]")
        writer.write(b"0\r\n\r\n")


async def serve(schedule: Schedule) -> None:
    """Until standard input ends."""
    server = grpc.aio.server(interceptors=[NoteArrival()])
    door = GrpcDoor(schedule)
    add_InferenceServicer_to_server(door, server)
    add_ClusterServicer_to_server(door, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = await asyncio.start_server(HttpDoor(schedule).serve, "127.0.0.1", 0, limit=MAX_BODY)
    http_port = http.sockets[0].getsockname()[1]
    doors = {"grpc": f"127.0.0.1:{port}", "http": f"http://127.0.0.1:{http_port}"}
    print(json.dumps(doors), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    http.close()
    await server.stop(grace=0)
    print(json.dumps([asdict(record) for record in schedule.records]), flush=True)


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--ttft", type=float, default=0.1)
    options = parser.parse_args()
    asyncio.run(serve(Schedule(options.ttft, options.interval)))


if __name__ == "__main__":
    main()
