"""The services of ``kvferry.v1`` over a ``RouterNode``: translate, stream, cancel.

A client that goes away, or whose deadline passes, cancels its request in whatever state it is; a
slow client gets its waiting deltas as one, and one that takes nothing for
``slow_client_limit_s`` has its request cancelled and counted. Knows protobuf and statuses; decides
nothing about tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc

from kvferry.cluster import wire
from kvferry.cluster.access.gate import Caller
from kvferry.cluster.errors import Cancelled, DeadlineExceeded, UnknownRequest, to_grpc
from kvferry.cluster.intake import Intake
from kvferry.cluster.reports.common import distribution_version, machine
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.router_node import RouterNode
from kvferry.cluster.scaling import ROLES
from kvferry.cluster.session import BranchEnd, SessionItem, TextDelta, coalesced
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos import kvferry_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Outgoing:
    """Items of one request on their way to its client, coalesced while it does not read."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[SessionItem] = asyncio.Queue()

    def emit(self, item: SessionItem) -> None:
        """Add an item; never blocks. What can wait here is bounded by the request's tokens."""
        self._items.put_nowait(item)

    async def next(self) -> list[SessionItem]:
        """All that waits: at most one delta and one end per branch."""
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return coalesced(items)


class InferenceServicer(kvferry_pb2_grpc.InferenceServicer):
    """Generate, Cancel, Tokenize, ListModels; not Resume, which is not built yet."""

    def __init__(self, node: RouterNode, slow_client_limit_s: float) -> None:
        self._node = node
        self._slow_client_limit_s = slow_client_limit_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream one request: accepted, deltas, finished; or an error status.

        Writes rather than yields: a cancellation does not reach a generator that is suspended
        at its ``yield``, and a client's leaving must cancel the request at once.
        """
        node = self._node
        received_at = node.clock()
        stream = Outgoing()
        try:
            caller, peer = caller_of(node, context), context.peer()
            spec = await node.prepare(request, caller, peer)
            routed = node.submit(spec, stream.emit, received_at, caller, peer)
        except Exception as error:  # the call's boundary: every error becomes a status
            await fail(context, error)
        request_id = routed.request_id
        try:
            accepted = wire.accepted(routed, request.echo_prompt_token_ids)
            await self._write(context, accepted, routed)
            while True:
                for item in await stream.next():
                    if isinstance(item, TextDelta):
                        await self._write(context, wire.delta(request_id, item), routed)
                        continue
                    if isinstance(item, BranchEnd):
                        await self._write(context, wire.branch_end(request_id, item), routed)
                        continue
                    if item.end.error is not None:
                        await fail(context, item.end.error, routed)
                    await self._write(context, wire.finished(item), routed)
                    return
        finally:
            node.cancel(request_id)

    async def _write(
        self, context: Context, message: pb.GenerateResponse, routed: RoutedRequest
    ) -> None:
        """Hand one message to the transport, which takes none while the client takes none.

        A client that takes nothing for the limit has its request cancelled at once. The status
        that ends its stream waits behind what was sent before it: until the client reads on or
        goes, which keepalive finds out. The write itself is never taken back: gRPC refuses any
        status while one that was cancelled is still under way.
        """
        write = asyncio.ensure_future(context.write(message))
        try:
            done, _ = await asyncio.wait({write}, timeout=self._slow_client_limit_s)
            if not done:
                slow = self._give_up(routed)
            await write
        finally:
            write.cancel()  # if the call has ended meanwhile; else it is done
        if not done:
            await fail(context, slow, routed)

    def _give_up(self, routed: RoutedRequest) -> Cancelled:
        """Cancel the request of a client that takes nothing; what it will be told."""
        self._node.cancel(routed.request_id)
        self._node.router.counters["slow_clients"] += 1
        limit = f"{self._slow_client_limit_s:g} s (server.slow_client_limit)"
        slow = Cancelled(f"the client took nothing of its stream for {limit}: read faster")
        logger.warning("request %s: %s", routed.request_id, slow, extra=routed.about)
        return slow

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End a request; its stream finishes with reason abort."""
        try:
            found = self._node.cancel_for(caller_of(self._node, context), request.request_id)
        except Exception as error:  # the call's boundary: every error becomes a status
            await fail(context, error)
        return pb.CancelResponse(found=found)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text or conversation."""
        intake: Intake = self._node.intake
        try:
            ids = await self._node.take_in(intake.tokenize_input, request)
        except Exception as error:  # the call's boundary: every error becomes a status
            await fail(context, error)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=intake.model.max_model_len)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The one served model."""
        return pb.ListModelsResponse(models=[wire.model(self._node.intake.model)])

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:
        """Nothing yet, said without a trace in the log."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Resume is not built yet")


class ClusterServicer(kvferry_pb2_grpc.ClusterServicer):
    """Status, Audit, Drain, Scale."""

    def __init__(self, node: RouterNode, endpoints: pb.Endpoints) -> None:
        self._node = node
        self._endpoints = endpoints
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
            endpoints=self._endpoints,
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
            await fail(context, UnknownRequest(f"no live worker {request.worker_id!r}"))
        try:
            reports = await asyncio.gather(*(self._node.audit(record.ref) for record in records))
        except TimeoutError:
            await fail(context, DeadlineExceeded("a worker did not answer the audit in time"))
        return pb.AuditResponse(
            pools=[
                wire.pool(record.ref, record.member.roles, report, request.include_blocks)
                for record, report in zip(records, reports, strict=True)
            ]
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Take a worker out of service; answers when it holds nothing and is to be ended."""
        try:
            await self._node.drain(request.worker_id, request.timeout_s or None)
        except Exception as error:  # the call's boundary: every error becomes a status
            await fail(context, error)
        return pb.DrainResponse()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Grow and shrink; answers when there are as many workers as were asked for."""
        counts = {role: getattr(request, role) for role in ROLES if request.HasField(role)}
        try:
            present = await self._node.scaling.scale(counts, request.timeout_s or None)
        except Exception as error:  # the call's boundary: every error becomes a status
            await fail(context, error)
        return pb.ScaleResponse(**present)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The authorization header of a call; the first, if there are several."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def caller_of(node: RouterNode, context: Context) -> Caller:
    """Who calls. Raises Unauthenticated, which the guard has done before."""
    return node.access.gate.caller(authorization(context.invocation_metadata()))


async def fail(
    context: Context, error: Exception, request: RoutedRequest | None = None
) -> NoReturn:
    """End the call with the error's status and metadata."""
    request_id = request.request_id if request is not None else ""
    failure = to_grpc(error, request_id)
    if failure.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        extra = request.about if request is not None else None
        name = request_id or "(none)"
        logger.error("request %s failed: %s", name, error, exc_info=error, extra=extra)
    await context.abort(failure.code, failure.details, failure.trailing_metadata)
    raise AssertionError("abort raises")
