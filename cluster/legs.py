"""What this router has asked of workers: sends it, counts it, repeats it, takes it back.

Owns the channels to the workers, who is alive, and the tickets of each request's two legs. Knows
how a leg is placed and cancelled; does not know when, nor what becomes of a request: that is the
automaton in ``cluster.router``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvferry.cluster.lists import wanted_on
from kvferry.cluster.policy import Placement
from kvferry.cluster.registry import WorkerRegistry
from kvferry.cluster.routed_request import RoutedRequest, Ticket
from kvferry.engine.request import RequestId
from kvferry.worker import messages as m
from kvferry.worker.channel import Channels
from kvferry.worker.messages import Body, Envelope, Leg, Member, NodeRef


class Legs:
    """See the module. ``outbox`` holds stamped envelopes in sending order."""

    def __init__(self, ref: NodeRef, address: str) -> None:
        self.channels = Channels(ref)
        self.workers = WorkerRegistry()
        self.outbox: deque[Envelope] = deque()
        self._address = address

    # --- workers ----------------------------------------------------------------------------

    def add_worker(self, member: Member, now: float) -> None:
        """A worker is there; everybody is told."""
        self.channels.know(member.ref)
        self.workers.add(member, now)
        self._broadcast()

    def remove_worker(self, ref: NodeRef) -> bool:
        """A worker is dead; everybody is told. False if it was not known."""
        if self.workers.remove(ref) is None:
            return False
        self.channels.forget(ref)
        self._broadcast()
        return True

    def excuse_silence(self, now: float) -> None:
        """This router stood still: it could hear nobody, and workers may take it for dead."""
        for record in self.workers:
            record.last_heard = now
        self._broadcast()

    def send(self, receiver: NodeRef, body: Body) -> int:
        """Queue a message to a live worker; its number, 0 if the worker is not alive."""
        if self.workers.get(receiver) is None:
            return 0
        envelope = self.channels.stamp(receiver, body)
        self.outbox.append(envelope)
        return envelope.seq

    def send_heartbeats(self) -> None:
        """Tell every worker that this router lives."""
        for record in self.workers:
            beat = self.channels.stamp_heartbeat(record.ref, m.RouterHeartbeat())
            self.outbox.append(beat)

    def send_lists(self, requests: Mapping[RequestId, RoutedRequest]) -> None:
        """Tell every worker what is still wanted of it, and the membership if it lacks it."""
        for record in self.workers:
            known = record.load.membership_version if record.load is not None else -1
            if known != self.workers.version:
                self.send(record.ref, self._membership())
            items = wanted_on(record.ref, requests.values())
            if items:
                self.send(record.ref, m.WantedList(items))

    def _broadcast(self) -> None:
        for record in self.workers:
            self.send(record.ref, self._membership())

    def _membership(self) -> m.Membership:
        members = tuple(record.member for record in self.workers)
        return m.Membership(self.workers.version, self._address, members)

    # --- a request's legs -------------------------------------------------------------------

    def reserve(self, request: RoutedRequest, placement: Placement) -> None:
        """Ask the decode worker for the request's blocks, delivered tokens included."""
        request.decode_ref = placement.decode
        request.prefill_here = placement.prefill is None
        request.planned_prefill = placement.prefill
        if request.prefill_here:
            request.prefill_ref = placement.decode
        body = m.Reserve(request.attempt_spec(), request.attempt, request.prefill_here)
        request.decode = Ticket(placement.decode, body, self.send(placement.decode, body))
        tokens = request.num_kv_prompt
        self.workers.count_decode(request.request_id, placement.decode, tokens)
        computes = placement.prefill or placement.decode
        self.workers.count_prefill(request.request_id, computes, tokens)

    def wait_for_blocks(self, request: RoutedRequest, worker: NodeRef) -> None:
        """The decode worker is full: the request waits there and counts for no prefill."""
        request.full = True
        request.planned_prefill = None
        self.workers.set_waiting(request.request_id, worker, waits=True)
        self.workers.uncount_prefill(request.request_id)

    def granted(self, request: RoutedRequest, worker: NodeRef) -> None:
        """The decode worker holds the blocks; if it computes the prompt, that begins."""
        request.full = False
        self.workers.set_waiting(request.request_id, worker, waits=False)
        if request.prefill_here:
            self.workers.count_prefill(request.request_id, worker, request.num_kv_prompt)

    def computes_rest(self, request: RoutedRequest, worker: NodeRef) -> None:
        """The decode worker computes what it lacks of the prompt: there is no prefill leg."""
        self.granted(request, worker)
        if request.prefill_here:
            return
        request.prefill_here, request.prefill_ref = True, worker
        request.planned_prefill = None
        if request.decision is not None:
            request.decision.prefill_worker = worker.node_id
        self.workers.count_prefill(request.request_id, worker, 1)

    def prefill(
        self, request: RoutedRequest, decode: Ticket, target: NodeRef, missing_from: int
    ) -> None:
        """Ask a prefill worker to compute the prompt for the decode worker."""
        request.prefill_ref = target
        if request.decision is not None:
            request.decision.prefill_worker = target.node_id
        body = m.PrefillRequest(decode.body.spec, request.attempt, decode.worker, missing_from)
        request.prefill = Ticket(target, body, self.send(target, body))
        self.workers.count_prefill(request.request_id, target, request.num_kv_prompt)

    def hand_off(self, request: RoutedRequest) -> None:
        """Give the decode worker the hand-off that its dead prefill worker can no longer give."""
        assert request.decode is not None
        record = m.HandOffRecord(request.request_id, request.attempt, request.hand_off())
        self.send(request.decode.worker, record)

    def drop_branch(self, request: RoutedRequest, number: int) -> None:
        """One of several branches is wanted no longer."""
        if request.decode is not None:
            cancel = m.CancelLeg(request.request_id, request.attempt, Leg.DECODE, number)
            self.send(request.decode.worker, cancel)

    def drop_prefill(self, request: RoutedRequest) -> None:
        """The prefill leg is wanted no longer."""
        self.workers.uncount_prefill(request.request_id)
        ticket, request.prefill = request.prefill, None
        if ticket is not None:
            self.send(ticket.worker, m.CancelLeg(request.request_id, request.attempt, Leg.PREFILL))

    def drop(self, request: RoutedRequest) -> None:
        """Neither leg is wanted any longer; nothing counts for the request."""
        self.drop_prefill(request)
        ticket, request.decode = request.decode, None
        request.planned_prefill = None
        request.full = False
        if ticket is not None:
            self.workers.uncount_decode(request.request_id, ticket.worker)
            self.send(ticket.worker, m.CancelLeg(request.request_id, request.attempt, Leg.DECODE))
