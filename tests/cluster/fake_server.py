"""A small gRPC server of ``kvferry.v1`` that answers from scripts instead of models.

It runs in a thread of its own and speaks real gRPC on a free port of 127.0.0.1. A script is a
list of steps, chosen by the prompt's text: an event is sent, an error ends the call, HOLD waits
until the caller has gone. Prompts without a script are echoed, one token per word.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.cluster.errors import InvalidRequest, KVFerryError, UnknownRequest, to_grpc
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import (
    ClusterServicer,
    InferenceServicer,
    add_ClusterServicer_to_server,
    add_InferenceServicer_to_server,
)

REQUEST_ID = "f00d" * 8
HOLD = "hold"
Step: TypeAlias = pb.Accepted | pb.Delta | pb.Finished | KVFerryError | str


def accepted(prompt_tokens: int = 3) -> pb.Accepted:
    return pb.Accepted(prompt_tokens=prompt_tokens)


def delta(index: int, *token_ids: int, text: str = "", branch: int = 0) -> pb.Delta:
    return pb.Delta(branch=branch, index=index, token_ids=token_ids, text=text)


def finished(
    completion_tokens: int, *, reason: str = "length", prompt_tokens: int = 3, is_last: bool = True
) -> pb.Finished:
    return pb.Finished(
        finish_reason=reason,
        usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens),
        timing=pb.Timing(
            queue_s=0.1,
            prefill_s=0.2,
            delivery_s=0.05,
            ttft_s=0.35,
            e2e_s=0.5,
            itl_s=[0.01] * max(0, completion_tokens - 1),
        ),
        transfer=pb.Transfer(connector="shm", blocks_moved=2, bytes_moved=2048, transfer_s=0.01),
        attempt=1,
        is_last=is_last,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        num_prefill_chunks=1,
    )


def status_response() -> pb.StatusResponse:
    workers = [
        pb.WorkerStatus(
            worker=pb.Worker(
                worker_id=f"{role}-0",
                role=role,
                state="ready",
                epoch=epoch,
                pid=epoch + 1000,
                host="elsewhere",
                address="127.0.0.1:1",
                threads=1,
                kernels=pb.Kernels(implementation="reference"),
                connectors=["shm"],
            ),
            heartbeat_age_s=0.1,
            kv=pb.KVUsage(num_total=8, num_free=8),
            peers=[
                pb.Peer(
                    worker_id="prefill-0",
                    epoch=1,
                    connector="shm",
                    state="connected",
                    reason="same host",
                )
            ]
            if role == "decode"
            else [],
        )
        for epoch, role in enumerate(("prefill", "decode"), start=1)
    ]
    return pb.StatusResponse(
        ready=True,
        model=pb.Model(
            name="tiny",
            architecture="llama",
            dtype="float32",
            kv_dtype="int8",
            block_size=16,
            block_bytes=195_840,
            max_model_len=64,
            vocab_size=100,
        ),
        endpoints=pb.Endpoints(grpc=["127.0.0.1:1"]),
        routers=[pb.Router(router_id="router-0", epoch=1, pid=1000, host="elsewhere")],
        workers=workers,
        counters=pb.Counters(accepted=1, finished_stop=1),
        version="1.2.3",
        decisions=[
            pb.Decision(
                request_id=REQUEST_ID,
                policy="least_loaded",
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                reason="least loaded pair",
            )
        ],
    )


def audit_response() -> pb.AuditResponse:
    owner = pb.Owner(kind="index")
    block = pb.Block(block_id=3, generation=1, block_class="cached", num_tokens=16, owners=[owner])
    pools = [
        pb.Pool(
            worker_id=f"{role}-0",
            role=role,
            epoch=1,
            block_size=16,
            block_bytes=1024,
            num_total=8,
            num_free=7,
            num_cached=1,
            consistent=True,
            blocks=[block],
        )
        for role in ("prefill", "decode")
    ]
    return pb.AuditResponse(pools=pools)


class FakeServer(InferenceServicer, ClusterServicer):
    """A context manager; ``endpoint`` is where it listens.

    ``requests`` are the Generate requests in order of arrival, ``left`` is set when a caller has
    gone before its stream's end, ``holding`` when a stream has come to HOLD.
    """

    def __init__(self, scripts: dict[str, Sequence[Step]] | None = None) -> None:
        self.scripts = dict(scripts or {})
        self.status: pb.StatusResponse | KVFerryError = status_response()
        self.audit: pb.AuditResponse | KVFerryError = audit_response()
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.left = threading.Event()
        self.holding = threading.Event()
        self.endpoint = ""
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake-server")

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        # Writes instead of yielding: a cancellation would not reach a generator at its yield.
        self.requests.append(request)
        try:
            for step in self.scripts.get(request.text) or _echo(request):
                if isinstance(step, KVFerryError):
                    await _abort(context, step)
                elif isinstance(step, str):
                    self.holding.set()
                    await asyncio.Event().wait()
                else:
                    await context.write(_response(step))
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.cancelled.append(request.request_id)
        return pb.CancelResponse(found=request.request_id == REQUEST_ID)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        if isinstance(self.status, KVFerryError):
            await _abort(context, self.status)
        assert isinstance(self.status, pb.StatusResponse)
        return self.status

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        if isinstance(self.audit, KVFerryError):
            await _abort(context, self.audit)
        assert isinstance(self.audit, pb.AuditResponse)
        wanted = [p for p in self.audit.pools if request.worker_id in ("", p.worker_id)]
        if not wanted:
            await _abort(context, UnknownRequest(f"no worker {request.worker_id!r}"))
        return pb.AuditResponse(pools=wanted)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server()
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # stubs lag
        await checks.set("kvferry.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
        add_InferenceServicer_to_server(self, server)
        add_ClusterServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(grace=0)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


def _response(event: pb.Accepted | pb.Delta | pb.Finished) -> pb.GenerateResponse:
    if isinstance(event, pb.Accepted):
        return pb.GenerateResponse(request_id=REQUEST_ID, accepted=event)
    if isinstance(event, pb.Delta):
        return pb.GenerateResponse(request_id=REQUEST_ID, delta=event)
    return pb.GenerateResponse(request_id=REQUEST_ID, finished=event)


def _echo(request: pb.GenerateRequest) -> list[Step]:
    """As many tokens as were asked for: the prompt's words, or its ids, over and over."""
    kind = request.WhichOneof("input")
    if kind == "token_ids":
        words = [f" {token}" for token in request.token_ids.ids]
    elif kind == "text":
        words = [f" {word}" for word in request.text.split()]
    else:
        words = [
            f" {word}" for message in request.chat.messages for word in message.content.split()
        ]
    if not words:
        return [InvalidRequest("prompt: got nothing, wanted at least one token")]
    limit = request.sampling.max_tokens or 16
    start = pb.Accepted(prompt_tokens=len(words))
    if request.echo_prompt_token_ids:
        start.prompt_token_ids.extend(range(len(words)))
    deltas = [delta(at, at, text=words[at % len(words)]) for at in range(limit)]
    return [start, *deltas, finished(limit, prompt_tokens=len(words))]


async def _abort(context: Any, error: KVFerryError) -> None:
    failure = to_grpc(error, REQUEST_ID)
    await context.abort(failure.code, failure.details, failure.trailing_metadata)
