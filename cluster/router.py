"""The router: places requests, watches their legs, delivers their tokens, ends each once.

Plain, synchronous and deterministic: messages and the clock come in; envelopes come out of
``outbox`` and tokens go to each request's listener. Knows requests and workers; does not know
text, gRPC, Ray or sockets. The request's automaton is drawn in ``cluster.routed_request``.

Requests wait here, in order of arrival, and are placed late: one is reserved on a decode worker
before any prefill starts. The periodic lists heal whatever message was lost: a leg that a worker
should hold and does not name is asked for again, one that it should not hold is cancelled.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from kvferry.cluster.deaths import Death, DeathCause
from kvferry.cluster.delivery import Delivery
from kvferry.cluster.errors import Overloaded, WorkerLost
from kvferry.cluster.kv_index import KVIndex
from kvferry.cluster.legs import Legs
from kvferry.cluster.lists import compare
from kvferry.cluster.metrics.recorder import Recorder
from kvferry.cluster.policy import Policy
from kvferry.cluster.registry import WorkerRecord
from kvferry.cluster.routed_request import (
    ABORTED,
    FAILED,
    RequestEnd,
    RequestListener,
    RequestState,
    RoutedBranch,
    RoutedRequest,
    error_for,
)
from kvferry.cluster.router_config import RouterConfig
from kvferry.cluster.waiting_line import WaitingLine
from kvferry.engine.request import Attempt, InvalidRequest, RequestId, RequestSpec
from kvferry.engine.stopping import Finish
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope, FailureCause, Leg, Member, NodeRef, ReserveOutcome
from kvferry.worker.validity import fault

logger = logging.getLogger(__name__)


class Router:
    """See the module."""

    def __init__(self, ref: NodeRef, address: str, policy: Policy, config: RouterConfig) -> None:
        self.ref = ref
        self.policy = policy
        self.config = config
        self._legs = Legs(ref, address)
        self.kv_index = KVIndex()
        self.channels = self._legs.channels
        self.workers = self._legs.workers
        self.outbox = self._legs.outbox
        self.recorder = Recorder(ref.epoch)
        self._line = WaitingLine(policy, self._legs, self.kv_index, self.recorder, config.ageing)
        self.decisions = self._line.decisions
        self._delivery = Delivery(self._end_branch, self._end, self.recorder)
        self.requests: dict[RequestId, RoutedRequest] = {}
        self.counters: Counter[str] = Counter()
        self.lost: deque[Death] = deque(maxlen=256)
        self.audits: deque[tuple[NodeRef, m.AuditReport]] = deque(maxlen=256)
        self._arrivals = 0
        self._next_lists = self._next_beat = 0.0
        self._ticked_at = float("inf")

    # --- workers ----------------------------------------------------------------------------

    def register(self, member: Member, now: float) -> None:
        """A worker is there; everybody is told. Known already: nothing."""
        if self.workers.get(member.ref) is not None:
            return
        for older in self.workers.older_lives(member.ref):
            why = f"its successor of epoch {member.ref.epoch} is here"
            self.worker_died(older, why, now, DeathCause.REPLACED)
        self._legs.add_worker(member, now)
        self.recorder.ledger.joined(member.ref, member.roles)

    def worker_died(
        self, ref: NodeRef, why: str, now: float, cause: DeathCause = DeathCause.ENDED
    ) -> None:
        """A worker is dead (or taken for it): its legs are placed anew. Unknown: nothing."""
        if not self._legs.remove_worker(ref):
            return
        self.kv_index.drop(ref)
        logger.warning("worker %s epoch %d is lost: %s", ref.node_id, ref.epoch, why)
        self.counters["worker_deaths"] += 1
        self.recorder.ledger.died(ref, cause)
        self.lost.append(Death(ref, why, now))
        for request in list(self.requests.values()):
            if request.decode is not None and request.decode.worker == ref:
                self._retry(request, FailureCause.SOURCE_LOST, f"{ref.node_id}: {why}", now)
            elif request.prefill is not None and request.prefill.worker == ref:
                self._prefill_lost(request, f"{ref.node_id}: {why}", now)
        self._place(now)

    def dismiss(self, ref: NodeRef) -> bool:
        """Forget a worker that holds nothing: this is no death. False if it was not known."""
        self.kv_index.drop(ref)
        self.recorder.ledger.left(ref)
        return self._legs.remove_worker(ref)

    def _prefill_lost(self, request: RoutedRequest, why: str, now: float) -> None:
        """Token 1 delivered: the router has the hand-off record. Else a new attempt."""
        self._legs.drop_prefill(request)
        if request.holds_hand_off:
            self._legs.hand_off(request)
        else:
            self._retry(request, FailureCause.SOURCE_LOST, why, now)

    # --- the front door's side --------------------------------------------------------------

    def submit(
        self,
        spec: RequestSpec,
        listener: RequestListener,
        now: float,
        received_at: float | None = None,
    ) -> RoutedRequest:
        """Take a request in, received ``received_at`` (else now).

        Raises Overloaded, or InvalidRequest for what every worker would refuse as impossible.
        """
        if problem := fault(m.Reserve(spec, Attempt(self.ref.epoch, 1))):
            raise InvalidRequest(problem)
        if len(self._line) >= self.config.queue_limit:
            self.counters["rejected"] += 1
            raise Overloaded(
                f"{len(self._line)} requests are waiting, the limit is "
                f"{self.config.queue_limit}; try again later",
                retry_after_s=1.0,
            )
        self._arrivals += 1
        request = RoutedRequest(
            spec,
            listener,
            now if received_at is None else received_at,
            self._arrivals,
            Attempt(self.ref.epoch, 1),
            now,
        )
        self.requests[spec.request_id] = request
        self._line.add(request, now)
        self.counters["accepted"] += 1
        self.recorder.accepted(request)
        self._place(now)
        return request

    def cancel(self, request_id: RequestId, now: float) -> bool:
        """End a request in whatever state it is; False if it is not (any more) known."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request, RequestEnd(ABORTED), now)
        self._place(now)
        return True

    def shut_down(self, now: float) -> None:
        """End every request: this router stops serving."""
        error = WorkerLost("the router is shutting down; try again later")
        for request in list(self.requests.values()):
            self._end(request, RequestEnd(FAILED, error), now)

    def ask_audit(self, worker: NodeRef, query_id: int) -> None:
        """Ask a worker for its audit; the answer appears in ``audits``."""
        self._legs.send(worker, m.AuditRequest(query_id))

    # --- messages ---------------------------------------------------------------------------

    def deliver(self, envelope: Envelope, now: float) -> None:
        """Take one arriving message."""
        if not self.channels.accept(envelope):
            return
        record = self.workers.get(envelope.sender)
        if record is None:
            return
        record.last_heard = now
        match envelope.body:
            case m.WorkerHeartbeat(load, step_age_s):
                record.load, record.step_age_s = load, step_age_s
                self.recorder.ledger.heard(record.ref, load)
            case m.ReserveReply() as reply:
                self._reserved(envelope.sender, reply, now)
            case m.PrefillDone() as done:
                self._prefill_done(envelope.sender, done, now)
            case m.TokenEvents(tokens):
                for event in tokens:
                    self._token_event(envelope.sender, event, now)
            case m.LegFailed() as failure:
                self._leg_failed(envelope.sender, failure, now)
            case m.HeldList(items):
                self._held(record, envelope, items, now)
            case m.KVEvents() as events:
                self.kv_index.apply(envelope.sender, events)
            case m.KVSnapshot() as snapshot:
                self.kv_index.load(envelope.sender, snapshot)
            case m.AuditReport() as report:
                self.audits.append((envelope.sender, report))
            case _:
                self.counters["unexpected_messages"] += 1
        self._place(now)

    def _current(
        self, sender: NodeRef, request_id: RequestId, attempt: Attempt, leg: Leg
    ) -> RoutedRequest | None:
        """The request, if this worker holds that leg of its current attempt; else counted."""
        request = self.requests.get(request_id)
        if request is not None and request.attempt == attempt:
            ticket = request.decode if leg is Leg.DECODE else request.prefill
            if ticket is not None and ticket.worker == sender:
                return request
        self.counters["stale_refused"] += 1
        return None

    def _reserved(self, sender: NodeRef, reply: m.ReserveReply, now: float) -> None:
        request = self._current(sender, reply.request_id, reply.attempt, Leg.DECODE)
        if request is not None:
            self._answered(request, reply.outcome, reply.missing_from, now)

    def _answered(
        self, request: RoutedRequest, outcome: ReserveOutcome, missing_from: int, now: float
    ) -> None:
        """The decode worker has said what becomes of the reservation, perhaps once more."""
        if request.state is not RequestState.RESERVING or request.decode is None:
            return
        worker = request.decode.worker
        if outcome is ReserveOutcome.FULL:
            self._legs.wait_for_blocks(request, worker)
            return
        if outcome is ReserveOutcome.COMPUTING:
            self._legs.computes_rest(request, worker)
            request.dispatched_at = request.dispatched_at or request.reserved_at
        else:
            self._legs.granted(request, worker)
        if request.prefill_here:
            request.state = RequestState.PREFILLING
            return
        target = request.planned_prefill or self.policy.choose_prefill(
            request.num_kv_prompt, request.decode.worker, self.workers.views(), windowed=False
        )
        if target is None or self.workers.get(target) is None:
            self._requeue(request, now)
            return
        request.state = RequestState.PREFILLING
        request.dispatched_at = request.dispatched_at or now
        self._legs.prefill(request, request.decode, target, missing_from)

    def _prefill_done(self, sender: NodeRef, done: m.PrefillDone, now: float) -> None:
        overtaken = self.requests.get(done.request_id)
        if overtaken is not None and overtaken.expects_stats(sender, done.attempt):
            overtaken.prefill_stats = done.stats  # even by decode's first event
        request = self._current(sender, done.request_id, done.attempt, Leg.PREFILL)
        if request is None:
            return
        self.workers.uncount_prefill(request.request_id)
        self._delivery.first_tokens(request, done, now)

    def _token_event(self, sender: NodeRef, event: m.TokenEvent, now: float) -> None:
        request = self._current(sender, event.request_id, event.attempt, Leg.DECODE)
        if request is None:
            return
        if event.stats is not None:
            request.take_stats(event, event.stats)
        self._decodes(request)
        if (missing := self._delivery.event(request, event, now)) is not None:
            self._legs.send(sender, missing)

    def _decodes(self, request: RoutedRequest) -> None:
        """The decode worker has the whole prompt: the prefill leg is over."""
        if request.state is RequestState.PREFILLING:
            request.state = RequestState.DECODING
            self._legs.drop_prefill(request)

    def _leg_failed(self, sender: NodeRef, failure: m.LegFailed, now: float) -> None:
        request = self._current(sender, failure.request_id, failure.attempt, failure.leg)
        if request is None:
            return
        if failure.cause is FailureCause.SHAPE:
            error = InvalidRequest(f"{sender.node_id}: {failure.message}")
            self._end(request, RequestEnd(FAILED, error), now)
        else:
            self._retry(request, failure.cause, f"{sender.node_id}: {failure.message}", now)

    # --- lists ------------------------------------------------------------------------------

    def _held(
        self, record: WorkerRecord, envelope: Envelope, items: tuple[m.HeldItem, ...], now: float
    ) -> None:
        """Heal both ways what differs between what a worker holds and what is wanted there."""
        found = compare(record.ref, items, envelope.heard, self.requests)
        for item in found.unwanted:
            self._legs.send(record.ref, m.CancelLeg(item.request_id, item.attempt, item.leg))
        for request, outcome, missing_from in found.answers:
            self._answered(request, outcome, missing_from, now)
        for request in found.decoding:
            self._decodes(request)
        for request in found.unstarted:
            self._legs.hand_off(request)
        for ticket in found.lost:
            ticket.seq = self._legs.send(record.ref, ticket.body)

    # --- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Drive every timer; called a few times per heartbeat period."""
        timeout, stall = self.config.heartbeat_timeout, self.config.stall_limit
        if now - self._ticked_at > timeout / 2:
            self._legs.excuse_silence(now)
        self._ticked_at = now
        for ref, why, cause in self.workers.overdue(now, timeout, stall):
            self.worker_died(ref, why, now, cause)
        if now >= self._next_beat:
            self._next_beat = now + self.config.heartbeat
            self._legs.send_heartbeats()
        if now >= self._next_lists:
            self._next_lists = now + self.config.list_period
            self._legs.send_lists(self.requests)
            for record in self.workers:
                load = record.load
                if load is not None and self.kv_index.wants_snapshot(
                    record.ref, load.num_kv_events
                ):
                    self._legs.send(record.ref, m.KVSnapshotRequest())
        self._give_up_waiting(now)
        self._place(now)

    def _give_up_waiting(self, now: float) -> None:
        """Requests that no worker could ever take since ``worker_wait`` end; others wait on."""
        late, reasons = self._line.overdue(now, self.config.worker_wait)
        for request in late:
            error = WorkerLost(
                f"{'; '.join(reasons)} for {self.config.worker_wait:g} s; try again later"
            )
            self._end(request, RequestEnd(FAILED, error), now)

    # --- placement, retry, end --------------------------------------------------------------

    def _place(self, now: float) -> None:
        """Place what waits; first whoever waits for one worker's blocks while another has some."""
        full = [self.requests.get(r.waiting) for r in self.workers if r.waiting is not None]
        for request in self._line.movable((r for r in full if r is not None), now):
            self._requeue(request, now)
        self._line.place(now)

    def _retry(self, request: RoutedRequest, cause: FailureCause, why: str, now: float) -> None:
        """A new attempt, prompt + delivered tokens, within the budget."""
        for branch in request.live:
            finish = branch.finish_of_delivered(request.spec)
            if finish is not None:  # only its terminal event was lost
                self._end_branch(request, branch, finish, now)
        if request.end is not None:
            return
        if cause is not FailureCause.ENDED:  # that one the worker had let go of by itself
            request.failures += 1
        if request.failures >= self.config.max_attempts:
            why = f"{why} (attempt {request.num_attempts}, the last allowed)"
            self._end(request, RequestEnd(FAILED, error_for(cause, why)), now)
            return
        logger.info("request %s is tried again: %s", request.request_id, why, extra=request.about)
        self.counters["recovered"] += 1
        self.recorder.recovered(request, cause, now)
        request.num_attempts += 1
        request.count_past_attempt()
        self._requeue(request, now)

    def _requeue(self, request: RoutedRequest, now: float) -> None:
        self._legs.drop(request)
        request.attempt = Attempt(self.ref.epoch, request.attempt.number + 1)
        request.first_tokens_here = False
        self._line.add(request, now)

    def _end_branch(
        self, request: RoutedRequest, branch: RoutedBranch, finish: Finish, now: float
    ) -> None:
        """A branch has its finish, and with the last one the request."""
        if request.live == [branch]:
            self._end(request, RequestEnd(finish, branch=branch.number), now)
            return
        branch.finish = finish
        self._legs.drop_branch(request, branch.number)
        request.listener.on_branch_end(branch.number, finish, now)

    def _end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """The one place where a request ends."""
        if request.end is not None:
            return
        request.end = end
        del self.requests[request.request_id]
        if request.state is RequestState.QUEUED:
            self._line.remove(request)
        self._legs.drop(request)
        request.state = RequestState.ENDED
        self.counters[f"finished_{end.finish.reason.value}"] += 1
        self.counters["preempted"] += request.num_preemptions
        self.recorder.ended(request, now)
        request.listener.on_end(request, end, now)
