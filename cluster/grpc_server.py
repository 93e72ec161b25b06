"""The gRPC front door: ``kvferry.v1`` over a ``RouterNode``.

A shell: it translates, streams and cancels. A client that goes away cancels its request; a slow
client gets its waiting deltas as one. Knows protobuf and statuses; decides nothing about tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.cluster import wire
from kvferry.cluster.errors import (
    DeadlineExceeded,
    PortUnavailable,
    UnknownRequest,
    to_grpc,
)
from kvferry.cluster.intake import Intake
from kvferry.cluster.reports.common import distribution_version, machine
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.session import SessionItem, TextDelta
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos import kvferry_pb2_grpc

logger = logging.getLogger(__name__)

SERVICES = ("", "kvferry.v1.Inference")
READY_PERIOD_S = 0.1
LAST_WORDS_S = 1.0  # for the errors of streams that a stop has ended

Context = grpc.aio.ServicerContext[Any, Any]


class _Stream:
    """Items of one request on their way to its client, coalesced while it does not read."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[SessionItem] = asyncio.Queue()

    def emit(self, item: SessionItem) -> None:
        """Add an item; never blocks. What can wait here is bounded by the request's tokens."""
        self._items.put_nowait(item)

    async def next(self) -> list[SessionItem]:
        """All that waits: at most one delta, then at most the end."""
        items = [await self._items.get()]
        while not self._items.empty():
            item = self._items.get_nowait()
            last = items[-1]
            if isinstance(last, TextDelta) and isinstance(item, TextDelta):
                items[-1] = last.then(item)
            else:
                items.append(item)
        return items


class InferenceServicer(kvferry_pb2_grpc.InferenceServicer):
    """Generate, Cancel, Tokenize, ListModels."""

    def __init__(self, node: RouterNode) -> None:
        self._node = node

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream one request: accepted, deltas, finished; or an error status.

        Writes rather than yields: a cancellation does not reach a generator that is suspended
        at its ``yield``, and a client's leaving must cancel the request at once.
        """
        node = self._node
        received_at = node.clock()
        stream = _Stream()
        try:
            spec = await asyncio.to_thread(node.intake.prepare, request)
            routed = node.submit(spec, stream.emit, received_at)
        except Exception as error:  # the call's boundary: every error becomes a status
            await _fail(context, error)
        request_id = routed.request_id
        try:
            await context.write(wire.accepted(routed, request.echo_prompt_token_ids))
            while True:
                for item in await stream.next():
                    if isinstance(item, TextDelta):
                        await context.write(wire.delta(request_id, item))
                        continue
                    if item.end.error is not None:
                        await _fail(context, item.end.error, request_id)
                    await context.write(wire.finished(item))
                    return
        finally:
            node.cancel(request_id)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End a request; its stream finishes with reason abort."""
        return pb.CancelResponse(found=self._node.cancel(request.request_id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text or conversation."""
        intake: Intake = self._node.intake
        try:
            intake.check_model(request.model)
            chat = request.WhichOneof("input") == "chat"
            text = intake.chat_text(request.chat) if chat else request.text
            ids = await asyncio.to_thread(intake.tokenize, text)
        except Exception as error:  # the call's boundary: every error becomes a status
            await _fail(context, error)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=intake.model.max_model_len)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The one served model."""
        return pb.ListModelsResponse(models=[wire.model(self._node.intake.model)])


class ClusterServicer(kvferry_pb2_grpc.ClusterServicer):
    """Status and Audit."""

    def __init__(self, node: RouterNode, endpoint: str) -> None:
        self._node = node
        self._endpoint = endpoint
        self._machine = pb.Machine(**machine())

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Who is there, how loaded, and what was counted."""
        node, router = self._node, self._node.router
        now = node.clock()
        reasons = router.workers.not_ready_reasons()
        live = {record.ref: record for record in router.workers}
        workers = [
            wire.worker_status(live[ref], description, now)
            if ref in live
            else wire.lost_worker(ref, description)
            for ref, description in node.descriptions.items()
        ]
        return pb.StatusResponse(
            ready=not reasons,
            not_ready_reasons=reasons,
            model=wire.model(node.intake.model),
            endpoints=pb.Endpoints(grpc=[self._endpoint]),
            routers=[
                pb.Router(
                    router_id=router.ref.node_id,
                    epoch=router.ref.epoch,
                    pid=os.getpid(),
                    num_in_flight=len(router.requests),
                    host=socket.gethostname(),
                )
            ],
            workers=workers,
            counters=wire.counters(router),
            decisions=(
                [wire.decision(entry) for entry in router.decisions]
                if request.include_decisions
                else ()
            ),
            version=distribution_version("kvferry") or "",
            machine=self._machine,
        )

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:
        """Every live worker's audit, or one worker's."""
        records = [
            record
            for record in self._node.router.workers
            if request.worker_id in ("", record.ref.node_id)
        ]
        if request.worker_id and not records:
            await _fail(context, UnknownRequest(f"no live worker {request.worker_id!r}"))
        try:
            reports = await asyncio.gather(*(self._node.audit(record.ref) for record in records))
        except TimeoutError:
            await _fail(context, DeadlineExceeded("a worker did not answer the audit in time"))
        return pb.AuditResponse(
            pools=[
                wire.pool(record.ref, record.member.roles, report, request.include_blocks)
                for record, report in zip(records, reports, strict=True)
            ]
        )


async def _fail(context: Context, error: Exception, request_id: str = "") -> NoReturn:
    """End the call with the error's status and metadata."""
    failure = to_grpc(error, request_id)
    if failure.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        logger.error("request %s failed: %s", request_id or "(none)", error, exc_info=error)
    await context.abort(failure.code, failure.details, failure.trailing_metadata)
    raise AssertionError("abort raises")


def check_port(address: str) -> None:
    """Raise PortUnavailable if HOST:PORT is taken now, before a model is loaded for it."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise _unavailable(address, error.strerror or str(error)) from error


def _unavailable(address: str, why: str) -> PortUnavailable:
    return PortUnavailable(
        f"cannot listen on {address}: {why}; is another server using the port? Give another "
        "address, or port 0 to pick a free one"
    )


class GrpcServer:
    """The listening server: services, health, readiness."""

    def __init__(self, node: RouterNode, address: str, max_message_bytes: int = 4 << 20) -> None:
        self._node = node
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
            ]
        )
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise _unavailable(address, str(error)) from error
        self.endpoint = f"{address.rpartition(':')[0]}:{port}"
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        kvferry_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(node), self._server)
        kvferry_pb2_grpc.add_ClusterServicer_to_server(
            ClusterServicer(node, self.endpoint), self._server
        )
        self._readiness: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; health follows readiness."""
        await self._set_health(ready=False)
        await self._server.start()
        self._readiness = asyncio.get_running_loop().create_task(self._follow_readiness())

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for ``grace_s`` seconds, then fail them."""
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.gather(self._readiness, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.get_running_loop().create_task(self._server.stop(grace_s + LAST_WORDS_S))
        await asyncio.wait({stopping}, timeout=grace_s)
        self._node.end_requests()  # a stream ends with its typed error, it is not cut off
        await stopping

    async def _follow_readiness(self) -> None:
        known: bool | None = None
        while True:
            ready = not self._node.router.workers.not_ready_reasons()
            if ready is not known:
                known = ready
                await self._set_health(ready)
            await asyncio.sleep(READY_PERIOD_S)

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self._health.set(service, status.SERVING if ready else status.NOT_SERVING)
