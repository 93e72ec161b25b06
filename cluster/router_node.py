"""The router and its front door as one asyncio program: router, sockets, clients' streams.

Everything here runs on one event loop, except the network thread, which hands arriving messages
to the loop. Decisions are the router's; this shell moves messages, drives the clock and keeps
what status needs to say about workers. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from kvferry.cluster.access.gate import ANYBODY, Caller
from kvferry.cluster.access.refusals import Refusals
from kvferry.cluster.access.settings import Access
from kvferry.cluster.deaths import Death
from kvferry.cluster.draining import begin_drain, holds_any, serves_any
from kvferry.cluster.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    UnknownRequest,
    WorkerLost,
)
from kvferry.cluster.intake import Intake
from kvferry.cluster.metrics.families import Family, WorkerInfo, families
from kvferry.cluster.policy import LeastLoaded
from kvferry.cluster.registry import role_name
from kvferry.cluster.reports.common import distribution_version
from kvferry.cluster.routed_request import RoutedRequest
from kvferry.cluster.router import Router
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.scale_desk import ScaleDesk
from kvferry.cluster.scaling import RouterNews
from kvferry.cluster.session import (
    BranchedSession,
    Session,
    SessionEnd,
    SessionItem,
    TextDelta,
)
from kvferry.engine.chat import HelperUnavailable
from kvferry.engine.chat_pool import MAX_HELPERS
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.request import RequestId, RequestSpec
from kvferry.kv_transfer.authentication import NoKey
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker import messages as m
from kvferry.worker.cluster_key import ClusterKey
from kvferry.worker.description import WorkerDescription
from kvferry.worker.messages import Envelope, NodeRef
from kvferry.worker.network import Network

logger = logging.getLogger(__name__)

AUDIT_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.1
HERE = "this process"  # a request's peer where it came through no door
MAX_WAITING_CHATS = 256  # each may hold megabytes

T = TypeVar("T")
Request = TypeVar("Request", pb.GenerateRequest, pb.TokenizeRequest)


class RouterNode:
    """See the module. Construct on the loop that will run it."""

    def __init__(
        self,
        ref: NodeRef,
        intake: Intake,
        config: RouterConfig,
        prefill_window: int,
        bind_host: str = "127.0.0.1",
        access: Access | None = None,
        *,
        key: ClusterKey | NoKey,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._network = Network(bind_host, self._from_network, key=key)
        self.access = access or Access()
        self.intake = intake
        self.router = Router(ref, self._network.address, LeastLoaded(prefill_window), config)
        self.refusals = Refusals(self.router.recorder, self._loop.call_soon_threadsafe)
        self.descriptions: dict[NodeRef, WorkerDescription] = {}
        self._tenant_of: dict[RequestId, str] = {}
        self._audits: dict[tuple[NodeRef, int], asyncio.Future[m.AuditReport]] = {}
        self._audit_ids = 0
        self._version = distribution_version("kvferry") or ""
        self.drained: deque[Death] = deque(maxlen=256)
        self._untold: deque[tuple[int, Death]] = deque(maxlen=256)
        self._num_told = 0
        self._drains: dict[NodeRef, asyncio.Task[None]] = {}
        self.scaling = ScaleDesk(ref.epoch, self.router.workers)
        # Conversations have threads of their own: slow ones hold up each other, and no text.
        self._chat_threads = ThreadPoolExecutor(MAX_HELPERS, "kvferry-chat")
        self._num_chats = 0
        self._timer = self._loop.create_task(self._run_timer(config.heartbeat / 4))
        self._network.start()

    @staticmethod
    def clock() -> float:
        """Seconds, monotonic: the router's clock."""
        return time.monotonic()

    def register(self, description: WorkerDescription) -> None:
        """A worker has started. Known already in this life: nothing."""
        if self.router.workers.get(description.member.ref) is not None:
            return
        name = description.member.ref.node_id
        for older in [ref for ref in self.descriptions if ref.node_id == name]:
            del self.descriptions[older]
        self.descriptions[description.member.ref] = description
        self.router.register(description.member, self.clock())
        self._flush()

    def worker_died(self, ref: NodeRef, why: str) -> None:
        """A worker is known to be dead."""
        self.router.worker_died(ref, why, self.clock())
        self._flush()

    async def prepare(
        self, request: pb.GenerateRequest, caller: Caller = ANYBODY, peer: str = HERE
    ) -> RequestSpec:
        """Take a caller's request in: its specification, salted as the caller's.

        Raises what ``take_in`` does, and PermissionDenied, and Overloaded beyond a quota.
        """
        self._check_tenant(caller, request.tenant, peer)
        spec = await self.take_in(self.intake.prepare, request)
        return replace(spec, cache_salt=self.access.tenants.salt(caller, spec.cache_salt))

    def _check_tenant(self, caller: Caller, named: str, peer: str) -> None:
        try:
            self.access.tenants.check(caller, named, self.clock())
        except Exception as error:  # whatever it is, it is counted and goes on to the door
            self.refusals.call(caller.name, f"a request of {caller.name}", peer, error)
            raise

    async def take_in(self, step: Callable[[Request], T], request: Request) -> T:
        """Run a step of the intake on a thread: one of the few for conversations, or any.

        Raises what the step does, Overloaded, and NotReady where no template can be run; what
        keeps a request to generate from being taken in is counted.
        """
        try:
            return await self._take_in(step, request)
        except Exception as error:  # whatever it is, it is counted and goes on to the door
            if isinstance(request, pb.GenerateRequest):
                self.router.recorder.rejected(error)
            raise

    async def _take_in(self, step: Callable[[Request], T], request: Request) -> T:
        if request.WhichOneof("input") != "chat":
            return await self._loop.run_in_executor(None, step, request)
        if self._num_chats >= MAX_WAITING_CHATS:
            raise Overloaded(
                f"{self._num_chats} conversations wait to be rendered, the limit is "
                f"{MAX_WAITING_CHATS}; try again later",
                retry_after_s=1.0,
            )
        self._num_chats += 1
        try:
            return await self._loop.run_in_executor(self._chat_threads, step, request)
        except HelperUnavailable as error:
            raise NotReady(str(error)) from error
        finally:
            self._num_chats -= 1

    def submit(
        self,
        spec: RequestSpec,
        emit: Callable[[SessionItem], None],
        received_at: float,
        caller: Caller = ANYBODY,
        peer: str = HERE,
        is_more: bool = False,
    ) -> RoutedRequest:
        """Begin a caller's stream; items for the client go to ``emit``. Raises Overloaded.

        ``is_more``: it is of one call with the one before it, and with that it has been let in.
        """
        if not is_more:
            self._check_tenant(caller, "", peer)  # others may have come since it was prepared
        tenants, output = self.access.tenants, spec.num_branches * spec.max_output_tokens
        if caller.tenant:
            emit = self._metered(spec.request_id, emit, caller, output)
        skip = spec.sampling.skip_special_tokens
        sessions = [
            Session(spec, IncrementalDetokenizer(self.intake.tokenizer, skip), emit)
            for _ in spec.branches
        ]
        session = sessions[0] if len(sessions) == 1 else BranchedSession(sessions, emit)
        most = len(spec.prompt_token_ids) + output
        tenants.began(caller, most, self.clock())
        try:
            request = self.router.submit(spec, session, self.clock(), received_at)
        except Exception as error:  # whatever it is, it is counted and goes on to the door
            tenants.ended(caller, most, self.clock())
            self._tenant_of.pop(spec.request_id, None)
            self.router.recorder.rejected(error)
            raise
        self._flush()
        return request

    def _metered(
        self,
        request_id: RequestId,
        emit: Callable[[SessionItem], None],
        caller: Caller,
        output: int,
    ) -> Callable[[SessionItem], None]:
        """``emit``, where a tenant gets back what it does not use of ``output`` tokens, and the
        request is known as the tenant's until it ends.
        """
        self._tenant_of[request_id] = caller.tenant
        unused = output

        def metered(item: SessionItem) -> None:
            nonlocal unused
            if isinstance(item, TextDelta):
                unused -= len(item.run.token_ids)
            elif isinstance(item, SessionEnd):
                self._tenant_of.pop(request_id, None)
                self.access.tenants.ended(caller, unused, self.clock())
            emit(item)

        return metered

    def metrics(self) -> list[Family]:
        """Every metric with its samples now, for whoever exports them; on the loop."""
        infos = {
            ref: WorkerInfo(worker.kernels, worker.isa or "", worker.connectors)
            for ref, worker in self.descriptions.items()
        }
        self.router.recorder.connections_refused("control", self._network.refused)
        return families(self.router, self.intake.model.name, self._version, infos, self.clock())

    def cancel_for(self, caller: Caller, request_id: str) -> bool:
        """End a request for who may: those who run the cluster, and its own tenant. To others it is
        unknown.
        """
        if caller.tenant and self._tenant_of.get(RequestId(request_id)) != caller.tenant:
            return False
        return self.cancel(request_id)

    def cancel(self, request_id: str) -> bool:
        """End a request; False if it is unknown or has ended."""
        found = self.router.cancel(RequestId(request_id), self.clock())
        self._flush()
        return found

    async def drain(self, worker_id: str, timeout_s: float | None) -> None:
        """Take a worker out of service; returns when it holds nothing and is to be ended.

        Goes on when the caller has gone. Raises UnknownRequest, WorkerLost if it dies meanwhile,
        DeadlineExceeded after ``timeout_s``.
        """
        leaves = next((r for r in self.router.workers if r.ref.node_id == worker_id), None)
        if leaves is not None and not leaves.draining:
            self.scaling.drains(worker_id, role_name(leaves.member.roles))
        draining = self._begin_drain(worker_id)
        done, _ = await asyncio.wait({draining}, timeout=timeout_s)
        if not done:
            raise DeadlineExceeded(f"{worker_id} still holds something after {timeout_s:g} s")
        draining.result()

    def begin_drain(self, worker_id: str) -> None:
        """Likewise, without waiting; a worker that is unknown has gone already."""
        with contextlib.suppress(UnknownRequest):
            self._begin_drain(worker_id)

    def _begin_drain(self, worker_id: str) -> asyncio.Task[None]:
        ref = begin_drain(self.router.workers, self.router.requests.values(), worker_id)
        if ref not in self._drains:
            self._drains[ref] = self._loop.create_task(self._drain(ref))
        return self._drains[ref]

    async def _drain(self, ref: NodeRef) -> None:
        while self.router.workers.get(ref) is not None:
            if not serves_any(ref, self.router.requests.values()):
                with contextlib.suppress(TimeoutError):
                    if not holds_any(await self.audit(ref)):
                        break
            await asyncio.sleep(DRAIN_POLL_S)
        if not self.router.dismiss(ref):
            raise WorkerLost(f"{ref.node_id} died while it was drained")
        self.drained.append(Death(ref, "drained", self.clock(), drained=True))
        del self.descriptions[ref]
        self._flush()

    def news(self, heard: int) -> RouterNews:
        """What there is to tell whoever watches; ``heard``: the last number that it knows."""
        while self._untold and self._untold[0][0] <= heard:
            self._untold.popleft()
        for told in (self.router.lost, self.drained):
            for death in told:
                self._num_told += 1
                self._untold.append((self._num_told, death))
            told.clear()
        return RouterNews(
            self._num_told,
            tuple(death for _, death in self._untold),
            self.scaling.unanswered(),
            frozenset(record.ref for record in self.router.workers),
            frozenset(record.ref for record in self.router.workers if record.draining),
        )

    async def audit(self, ref: NodeRef) -> m.AuditReport:
        """Ask a worker to walk its pool. Raises TimeoutError."""
        self._audit_ids += 1
        key = (ref, self._audit_ids)
        future: asyncio.Future[m.AuditReport] = self._loop.create_future()
        self._audits[key] = future
        try:
            self.router.ask_audit(ref, self._audit_ids)
            self._flush()
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                return await future
        finally:
            del self._audits[key]

    def end_requests(self) -> None:
        """End every request that still runs, with an error: this router stops serving."""
        self.router.shut_down(self.clock())
        self._flush()

    async def stop(self) -> None:
        """End every request and close the sockets."""
        self.end_requests()
        tasks = [self._timer, *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._chat_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.intake.close)
        await asyncio.to_thread(self._network.stop)

    # --- the loop's two inputs --------------------------------------------------------------

    def _from_network(self, envelope: Envelope) -> None:
        """On the network thread."""
        self._loop.call_soon_threadsafe(self._deliver, envelope)

    def _deliver(self, envelope: Envelope) -> None:
        self.router.deliver(envelope, self.clock())
        while self.router.audits:
            sender, report = self.router.audits.popleft()
            future = self._audits.get((sender, report.query_id))
            if future is not None and not future.done():
                future.set_result(report)
        self._flush()

    async def _run_timer(self, period: float) -> None:
        while True:
            try:
                self.router.tick(self.clock())
            except Exception:  # the timer's boundary: a dead timer would be a router that hangs
                logger.exception("a tick of the router failed")
            self._flush()
            await asyncio.sleep(period)

    def _flush(self) -> None:
        outbox = self.router.outbox
        if not outbox:
            return
        envelopes = list(outbox)
        outbox.clear()
        self._network.send(
            (description.member.address, envelope)
            for envelope in envelopes
            if (description := self.descriptions.get(envelope.receiver)) is not None
        )
