"""A worker: one engine, one connector, and the roles attached to it.

Plain, synchronous and deterministic: envelopes and the clock come in, envelopes come out of
``outbox``. Knows routers (who is alive, where) and peers (whose blocks can be read); does not
know what a prefill job or a reservation is: roles handle the messages that concern them.

Life of a router here: its first ``Membership`` introduces it; while it is heard, it lives; when
it falls silent for ``heartbeat_timeout``, or a new life of it appears, all that is held for it
is dropped. The same when a worker leaves the membership.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.engine.engine import Engine
from kvferry.kv_cache.audit import Owner, PoolAudit, audit, audit_host, index_owners
from kvferry.kv_transfer.connector import IncompatiblePeer, KVConnector, Peer, TransferFailed
from kvferry.worker import messages as m
from kvferry.worker.channel import Channels
from kvferry.worker.counting import cache_counters, worker_tallies
from kvferry.worker.messages import Body, Envelope, LoadReport, Member, NodeRef, PeerState, Role
from kvferry.worker.publishing import DirectPublisher, Publisher
from kvferry.worker.reads import Reads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Periods and limits, in seconds."""

    list_period: float = 1.0
    heartbeat: float = 0.5
    heartbeat_timeout: float = 1.5
    stall_limit: float = 30.0
    read_timeout: float = 10.0


class RoleHandler(Protocol):
    """What a role adds to a worker. All calls come from the engine thread."""

    @property
    def role(self) -> Role:
        """Which role this is."""
        ...

    def handle(self, envelope: Envelope, now: float) -> bool:
        """Take a message; False if it does not concern this role."""
        ...

    def tick(self, now: float) -> None:
        """Timers: repeat what is unacknowledged, sweep what has expired."""
        ...

    def flush(self, now: float) -> None:
        """Send what the step or poll that has just ended produced."""
        ...

    def held(self, router: NodeRef) -> list[m.HeldItem]:
        """Everything held for a router."""
        ...

    def drop_router(self, router: NodeRef) -> None:
        """The router is dead: release everything held for it."""
        ...

    def drop_peer(self, peer: NodeRef) -> None:
        """The worker is dead: end everything that depends on it."""
        ...

    def owners(self, now: float) -> Iterator[Owner]:
        """The blocks this role holds outside the engine's own sequences."""
        ...

    def add_load(self, load: LoadReport) -> LoadReport:
        """Add this role's share to the load report."""
        ...


@dataclass(slots=True)
class _Router:
    ref: NodeRef
    address: str
    last_heard: float
    membership: m.Membership
    refs: frozenset[NodeRef] = field(default_factory=frozenset)


class Worker:
    """See the module. ``outbox`` holds stamped envelopes in sending order; with ``checksum``
    announced blocks carry a digest. ``publisher``: None where blocks are read as they lie.
    """

    def __init__(
        self,
        ref: NodeRef,
        engine: Engine,
        connector: KVConnector,
        times: WorkerTimes,
        checksum: bool = True,
        publisher: Publisher | None = None,
    ) -> None:
        self.ref = ref
        self.engine = engine
        self.connector = connector
        direct = DirectPublisher(ref.epoch, engine.pool, connector, checksum)
        self.publisher: Publisher = publisher or direct
        self.times = times
        self.channels = Channels(ref)
        self.reads = Reads(connector, engine.pool)
        self.outbox: deque[Envelope] = deque()
        self.roles: list[RoleHandler] = []
        self.members: dict[NodeRef, Member] = {}
        self.peers: dict[NodeRef, Peer] = {}
        self._peer_errors: dict[NodeRef, str] = {}
        self._incompatible: set[NodeRef] = set()
        self._routers: dict[str, _Router] = {}
        self._next_lists = 0.0
        self._num_beats = 0

    def attach(self, role: RoleHandler) -> None:
        """Add a role; a colocated worker has both."""
        self.roles.append(role)

    # --- messages ---------------------------------------------------------------------------

    def send(self, receiver: NodeRef, body: Body) -> int:
        """Queue a message; returns its number on the channel to ``receiver``."""
        envelope = self.channels.stamp(receiver, body)
        self.outbox.append(envelope)
        return envelope.seq

    def address_of(self, receiver: NodeRef) -> str | None:
        """Where a router or peer listens; None if it is not known (any more)."""
        router = self._routers.get(receiver.node_id)
        if router is not None and router.ref == receiver:
            return router.address
        member = self.members.get(receiver)
        return member.address if member is not None else None

    def deliver(self, envelope: Envelope, now: float) -> None:
        """Take one arriving message."""
        body = envelope.body
        is_membership = isinstance(body, m.Membership)
        if not self.channels.accept(envelope, introduces=is_membership):
            return
        router = self._routers.get(envelope.sender.node_id)
        if router is not None and router.ref == envelope.sender:
            router.last_heard = now
        if isinstance(body, m.Membership):
            self._learn(envelope.sender, body, now)
        elif isinstance(body, m.KVSnapshotRequest):
            self._tell_everything(envelope.sender)
        elif isinstance(body, m.AuditRequest):
            self.send(envelope.sender, self._audit_report(body.query_id, now))
        elif not isinstance(body, m.RouterHeartbeat):
            handled = [role.handle(envelope, now) for role in self.roles]
            if not any(handled):
                self.channels.refused[type(body).__name__] += 1
        if isinstance(body, m.WantedList):
            self.send(envelope.sender, m.HeldList(tuple(self._held(envelope.sender))))

    # --- time and work ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Drive every timer; called between steps, and when idle at least twice a period."""
        for router in list(self._routers.values()):
            if now - router.last_heard > self.times.heartbeat_timeout:
                logger.warning("router %s fell silent: dropping its requests", router.ref)
                self._drop_router(router)
        if now >= self._next_lists:
            self._next_lists = now + self.times.list_period
            self._connect_peers()
            for router in self._routers.values():
                held = self._held(router.ref)
                if held:
                    self.send(router.ref, m.HeldList(tuple(held)))
        for role in self.roles:
            role.tick(now)
        self._tell_changes()

    def step(self) -> bool:
        """Move blocks, then compute one step; returns whether there was anything to do."""
        clock = self.engine.clock
        moved = self.reads.poll(clock) + self.publisher.poll()
        if moved:
            self._flush(clock())
        computed = self.engine.step()
        if computed:
            self._flush(clock())
        return bool(moved) or computed

    @property
    def has_work(self) -> bool:
        """Whether another step should follow at once."""
        return self.engine.has_work or len(self.reads) + self.publisher.num_pending > 0

    def _flush(self, now: float) -> None:
        for role in self.roles:
            role.flush(now)
        self._tell_changes()

    def _tell_changes(self) -> None:
        """Tell every router what can be found in the pool since it was last told."""
        index = self.engine.pool.index
        if index is None:
            return
        first, events = index.take_events()
        if events:
            for router in self._routers.values():
                self.send(router.ref, m.KVEvents(first, events))

    def _tell_everything(self, router: NodeRef) -> None:
        index = self.engine.pool.index
        if index is not None:
            self._tell_changes()
            self.send(router, m.KVSnapshot(index.num_events, index.values()))

    # --- reports ----------------------------------------------------------------------------

    def heartbeats(self) -> list[Envelope]:
        """One heartbeat per known router."""
        self._num_beats += 1
        beat = m.WorkerHeartbeat(self.load())
        return [
            self.channels.stamp_heartbeat(
                router.ref,
                replace(
                    beat,
                    load=replace(beat.load, membership_version=router.membership.version),
                ),
            )
            for router in self._routers.values()
        ]

    def load(self) -> LoadReport:
        """What this worker holds now."""
        scheduler, index = self.engine.scheduler, self.engine.pool.index
        load = LoadReport(
            num_running=scheduler.num_active,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            queued_tokens=scheduler.num_queued_tokens,
            num_blocks=self.engine.pool.num_blocks,
            num_free_blocks=self.engine.pool.num_free,
            num_cached_blocks=self.engine.pool.num_cached,
            num_preemptions=scheduler.num_preemptions,
            num_kv_events=index.num_events if index is not None else 0,
            match_unit=self.engine.match_unit if index is not None else 0,
            cache=cache_counters(self.engine),
            stale_refused=self.channels.refused.total(),
            peers=tuple(self._peer_states()),
            block_classes=tuple(self.engine.pool.count_classes().items()),
            tallies=worker_tallies(self.engine, self.channels.refused, self._num_beats),
        )
        for role in self.roles:
            load = role.add_load(load)
        return load

    def audit(self, now: float) -> PoolAudit:
        """Walk every owner and hold the pool against them, and the host tier likewise."""
        owners = [*self.reads.owners(), *index_owners(self.engine.pool)]
        for role in self.roles:
            owners.extend(role.owners(now))
        found = audit(self.engine.pool, owners)
        if self.engine.offloading is None:
            return found
        host = audit_host(self.engine.offloading.tier, self.engine.scheduler.sequences)
        return replace(found, problems=(*found.problems, *host.problems))

    def close(self) -> None:
        """Close every peer and the connector, and give the host tier back."""
        self.connector.close()
        if self.engine.offloading is not None:
            self.engine.offloading.close()

    def _audit_report(self, query_id: int, now: float) -> m.AuditReport:
        found = self.audit(now)
        layout = self.connector.local_info().layout
        return m.AuditReport(
            query_id,
            layout.block_size,
            layout.block_bytes(),
            tuple((name.value, count) for name, count in found.counts.items()),
            found.problems,
            tuple(
                m.BlockReport(
                    block.block_id,
                    block.generation,
                    block.block_class.value,
                    block.ref_count,
                    block.num_tokens,
                    block.block_hash,
                    tuple(
                        m.OwnerReport(
                            o.kind.value,
                            o.request_id or None,
                            o.attempt,
                            o.peer,
                            o.lease_remaining_s,
                        )
                        for o in block.owners
                    ),
                )
                for block in found.blocks
            ),
        )

    def _held(self, router: NodeRef) -> list[m.HeldItem]:
        return [item for role in self.roles for item in role.held(router)]

    # --- who is alive -----------------------------------------------------------------------

    def _learn(self, sender: NodeRef, membership: m.Membership, now: float) -> None:
        known = self._routers.get(sender.node_id)
        if known is not None and known.ref != sender:
            self._drop_router(known)
            self.channels.know(sender)
            known = None
        if known is not None and known.membership.version > membership.version:
            return
        refs = frozenset(member.ref for member in membership.members)
        self._routers[sender.node_id] = _Router(
            sender, membership.router_address, now, membership, refs
        )
        for member in membership.members:
            if member.ref != self.ref and member.ref not in self.members:
                self._add_member(member)
        self._drop_missing_members()
        self._connect_peers()

    def _add_member(self, member: Member) -> None:
        for old in [ref for ref in self.members if ref.node_id == member.ref.node_id]:
            if old.epoch > member.ref.epoch:
                return
            self._drop_member(old)
        self.members[member.ref] = member
        self.channels.know(member.ref)

    def _drop_router(self, router: _Router) -> None:
        del self._routers[router.ref.node_id]
        self.channels.forget(router.ref)
        for role in self.roles:
            role.drop_router(router.ref)
        self._drop_missing_members()

    def _drop_missing_members(self) -> None:
        alive = {ref for router in self._routers.values() for ref in router.refs}
        for ref in [ref for ref in self.members if ref not in alive]:
            self._drop_member(ref)

    def _drop_member(self, ref: NodeRef) -> None:
        del self.members[ref]
        self.channels.forget(ref)
        self._peer_errors.pop(ref, None)
        self._incompatible.discard(ref)
        peer = self.peers.pop(ref, None)
        for role in self.roles:
            role.drop_peer(ref)
        if peer is not None:
            peer.close()

    def lose_connection(self, peer: Peer) -> None:
        """A read through it failed: it is closed, and the source opened anew when next due."""
        for ref in [ref for ref, known in self.peers.items() if known is peer]:
            del self.peers[ref]
            self._peer_errors[ref] = "a read failed; the connection is opened anew"
            peer.close()

    def _connect_peers(self) -> None:
        """Open the sources this worker may read from; failures are tried again later."""
        if not any(role.role is Role.DECODE for role in self.roles):
            return
        for ref, member in self.members.items():
            if Role.PREFILL not in member.roles or ref in self.peers or ref in self._incompatible:
                continue
            try:
                self.peers[ref] = self.connector.connect(member.peer_info)
                self._peer_errors.pop(ref, None)
            except IncompatiblePeer as error:
                self._incompatible.add(ref)
                self._peer_errors[ref] = str(error)
                logger.error("peer %s: %s", ref, error)
            except TransferFailed as error:
                self._peer_errors[ref] = str(error)
                logger.warning("peer %s: %s", ref, error)

    def _peer_states(self) -> Iterator[PeerState]:
        for ref, member in self.members.items():
            if ref in self.peers or ref in self._peer_errors:
                peer = self.peers.get(ref)
                connector = member.peer_info.connector if peer is None else peer.connector
                reason = "" if peer is None else peer.reason
                error = self._peer_errors.get(ref, "")
                yield PeerState(ref, connector, peer is not None, error, reason)
