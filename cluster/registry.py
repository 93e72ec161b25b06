"""The router's workers: who is registered, heard and loaded, and what this router placed there.

Load counters are not kept but derived: ``prefill`` and ``decode`` map the live requests placed on
a worker's present life to their tokens, so that they are zero when nothing is placed, whatever
has happened before. Knows no requests' states and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.cluster.deaths import DeathCause
from kvferry.cluster.policy import WorkerView
from kvferry.engine.request import RequestId
from kvferry.worker.messages import LoadReport, Member, NodeRef, Role


def role_name(roles: Sequence[Role]) -> str:
    """``colocated`` for a worker with both roles."""
    return roles[0].value if len(roles) == 1 else "colocated"


@dataclass(slots=True)
class WorkerRecord:
    """One live worker.

    Attributes:
        prefill, decode: tokens of the requests placed here, by request.
        waiting: the request that found the pool FULL, if any.
        draining: it takes nothing new (``cluster.draining``).
    """

    member: Member
    block_size: int
    last_heard: float
    load: LoadReport | None = None
    step_age_s: float | None = None
    prefill: dict[RequestId, int] = field(default_factory=dict)
    decode: dict[RequestId, int] = field(default_factory=dict)
    waiting: RequestId | None = None
    draining: bool = False

    @property
    def ref(self) -> NodeRef:
        """The worker in this life."""
        return self.member.ref

    def connected_to(self) -> frozenset[NodeRef]:
        """Sources whose handshake with this worker is done."""
        peers = self.load.peers if self.load is not None else ()
        return frozenset(peer.ref for peer in peers if peer.connected)

    def view(self) -> WorkerView:
        """The worker as placement sees it."""
        blocks = self.load.num_blocks if self.load is not None else 0
        return WorkerView(
            self.ref,
            self.member.roles,
            blocks * self.block_size,
            sum(self.prefill.values()),
            sum(self.decode.values()),
            self.waiting is not None,
            self.connected_to(),
            (self.load.num_free_blocks if self.load is not None else 0) * self.block_size,
            self.draining,
        )


class WorkerRegistry:
    """Live workers by reference; the membership version rises with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._records: dict[NodeRef, WorkerRecord] = {}

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._records.values()))

    def get(self, ref: NodeRef) -> WorkerRecord | None:
        """The record of a worker in this life; None if it is not (any more) alive."""
        return self._records.get(ref)

    def add(self, member: Member, now: float) -> WorkerRecord:
        """Register a worker."""
        record = WorkerRecord(member, member.peer_info.layout.block_size, now)
        self._records[member.ref] = record
        self.version += 1
        return record

    def remove(self, ref: NodeRef) -> WorkerRecord | None:
        """Forget a worker and all counted for it."""
        record = self._records.pop(ref, None)
        if record is not None:
            self.version += 1
        return record

    def older_lives(self, ref: NodeRef) -> list[NodeRef]:
        """Lives of the same worker before this one that are still taken for alive."""
        return [r for r in self._records if r.node_id == ref.node_id and r.epoch < ref.epoch]

    def overdue(
        self, now: float, heartbeat_timeout: float, stall_limit: float
    ) -> list[tuple[NodeRef, str, DeathCause]]:
        """Workers that are to be taken for dead, each with why: silent, or hung in one step."""
        found = []
        for record in self._records.values():
            silent, in_step = now - record.last_heard, record.step_age_s or 0.0
            if silent > heartbeat_timeout:
                found.append((record.ref, f"silent for {silent:.1f} s", DeathCause.SILENT))
            elif in_step > stall_limit:
                found.append((record.ref, f"in one step for {in_step:.0f} s", DeathCause.HUNG))
        return found

    def count_prefill(self, request_id: RequestId, ref: NodeRef, num_tokens: int) -> None:
        """Note that a prefill is placed on a worker, and on no other."""
        self.uncount_prefill(request_id)
        record = self._records.get(ref)
        if record is not None:
            record.prefill[request_id] = num_tokens

    def uncount_prefill(self, request_id: RequestId) -> None:
        """Note that a prefill is done, or placed no longer."""
        for record in self._records.values():
            record.prefill.pop(request_id, None)

    def count_decode(self, request_id: RequestId, ref: NodeRef, num_tokens: int) -> None:
        """Note that a request's KV is placed on a worker."""
        self._records[ref].decode[request_id] = num_tokens

    def uncount_decode(self, request_id: RequestId, ref: NodeRef) -> None:
        """Note that it no longer is; neither does the request wait there."""
        record = self._records.get(ref)
        if record is not None:
            record.decode.pop(request_id, None)
            self.set_waiting(request_id, ref, waits=False)

    def set_waiting(self, request_id: RequestId, ref: NodeRef, waits: bool) -> None:
        """Note that a request waits for blocks of a worker, or no longer does."""
        record = self._records.get(ref)
        if record is None:
            return
        if waits:
            record.waiting = request_id
        elif record.waiting == request_id:
            record.waiting = None

    def views(self) -> list[WorkerView]:
        """All live workers as placement sees them."""
        return [record.view() for record in self._records.values()]

    def not_ready_reasons(self) -> list[str]:
        """Why no request could be served now; empty when the cluster is ready.

        Ready: a live worker for every required role, its load known, that is not draining, and a
        pair of prefill and decode workers whose connector handshake is done; a colocated worker
        is a pair by itself.
        """
        records = self._records.values()
        live = [r for r in records if r.load is not None and not r.draining]
        if any(len(record.member.roles) == 2 for record in live):
            return []
        prefill = {record.ref for record in live if Role.PREFILL in record.member.roles}
        decode = [record for record in live if Role.DECODE in record.member.roles]
        reasons = []
        if not prefill:
            reasons.append("no live prefill worker")
        if not decode:
            reasons.append("no live decode worker")
        if prefill and decode and not any(prefill & record.connected_to() for record in decode):
            reasons.append("no decode worker has connected to a prefill worker")
        return reasons
