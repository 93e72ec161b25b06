"""A router between workers that a test plays by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.cluster.policy import LeastLoaded
from kvferry.cluster.routed_request import RequestState, RoutedRequest
from kvferry.cluster.router import Router
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.request import Attempt, RequestId, RequestSpec
from kvferry.kv_transfer.connector import PeerInfo
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, Envelope, Leg, Member, NodeRef, Role
from tests.fakes import RecordingListener, stub_layout, stub_spec

T = TypeVar("T")
EVERYTHING = 1 << 60  # "heard" of a worker that has handled all that was sent to it


def member(ref: NodeRef, roles: Sequence[Role]) -> Member:
    """A worker's membership entry."""
    layout = stub_layout(4)
    info = PeerInfo(ref.node_id, ref.epoch, "local", ref.node_id, "host", "stub@1", layout, 32)
    return Member(ref, tuple(roles), f"tcp://{ref.node_id}", info)


@dataclass
class Bench:
    """A router, its workers' references, and what it has sent. Blocks hold four positions."""

    num_prefill: int = 1
    num_decode: int = 1
    num_colocated: int = 0
    config: RouterConfig = field(default_factory=RouterConfig)
    window: int = 1000
    num_blocks: int = 64
    ready: bool = True

    def __post_init__(self) -> None:
        self.now = 0.0
        policy = LeastLoaded(self.window)
        self.router = Router(NodeRef("router", 1), "tcp://router", policy, self.config)
        self.seqs: Counter[NodeRef] = Counter()
        self.listeners: dict[str, RecordingListener] = {}
        self.epoch = 1
        self.free_blocks: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        for name, count, roles in (
            ("prefill", self.num_prefill, (Role.PREFILL,)),
            ("decode", self.num_decode, (Role.DECODE,)),
            ("colocated", self.num_colocated, (Role.PREFILL, Role.DECODE)),
        ):
            for index in range(count):
                self.join(f"{name}-{index}", roles)
        if self.ready:
            self.beat()
        self.drain()

    # --- workers ----------------------------------------------------------------------------

    def join(self, name: str, roles: Sequence[Role]) -> NodeRef:
        """A worker registers, in a new life."""
        self.epoch += 1
        ref = NodeRef(name, self.epoch)
        self.members[name] = member(ref, roles)
        self.router.register(self.members[name], self.now)
        return ref

    def ref(self, name: str) -> NodeRef:
        """A worker in its present life."""
        return self.members[name].ref

    def beat(self, *names: str, step_age_s: float | None = None) -> None:
        """Heartbeats of these workers or all, connected to every prefill worker."""
        for name in names or list(self.members):
            peers = tuple(
                m.PeerState(other.ref, "local", True)
                for other in self.members.values()
                if Role.PREFILL in other.roles and Role.DECODE in self.members[name].roles
            )
            load = m.LoadReport(
                self.router.workers.version,
                num_blocks=self.num_blocks,
                num_free_blocks=self.free_blocks.get(name, self.num_blocks),
                peers=peers,
            )
            self.say(name, m.WorkerHeartbeat(load, step_age_s))

    def report_free_blocks(self, count: int, *names: str) -> None:
        """These workers or all say how many blocks they have free."""
        for name in names or list(self.members):
            self.free_blocks[name] = count
            self.beat(name)

    def say(self, sender: str | NodeRef, body: Body, heard: int = EVERYTHING) -> None:
        """A worker's message arrives."""
        ref = self.ref(sender) if isinstance(sender, str) else sender
        self.seqs[ref] += 1
        self.router.deliver(Envelope(ref, self.router.ref, self.seqs[ref], heard, body), self.now)

    def drain(self) -> list[tuple[str, Body]]:
        """What the router has sent since the last call, as (worker, message)."""
        sent = [(envelope.receiver.node_id, envelope.body) for envelope in self.router.outbox]
        self.router.outbox.clear()
        return sent

    def sent(self, kind: type[T]) -> list[tuple[str, T]]:
        """The messages of one kind sent since the last call; the others are dropped."""
        return [(name, body) for name, body in self.drain() if isinstance(body, kind)]

    # --- requests ---------------------------------------------------------------------------

    def submit(
        self, name: str = "r", length: int = 9, max_tokens: int = 4, spec: RequestSpec | None = None
    ) -> tuple[RoutedRequest, RecordingListener]:
        """A client's request."""
        spec = spec or stub_spec(name, range(length), max_tokens)
        listener = self.listeners[name] = RecordingListener()
        return self.router.submit(spec, listener, self.now), listener

    def grant(self, request: RoutedRequest, missing_from: int = 0) -> None:
        """Its decode worker has blocks for it."""
        outcome = m.ReserveOutcome.GRANTED
        self._by_decode(request, m.ReserveReply(*key(request), outcome, missing_from))

    def refuse(self, request: RoutedRequest) -> None:
        """Its decode worker is full."""
        self._by_decode(request, m.ReserveReply(*key(request), m.ReserveOutcome.FULL))

    def first_token(self, request: RoutedRequest, token: int = 100) -> None:
        """Its prefill worker has token 1."""
        assert request.prefill is not None
        stats = m.PrefillStats(0.125, 0.5, 2)
        self.say(request.prefill.worker, m.PrefillDone(*key(request), (token,), stats))

    def tokens(
        self, request: RoutedRequest, first: int, *tokens: int, finish: str | None = None
    ) -> None:
        """Its decode worker reports tokens."""
        event = m.TokenEvent(*key(request), 0, first, tokens, finish)
        self._by_decode(request, m.TokenEvents((event,)))

    def fail(
        self, request: RoutedRequest, cause: m.FailureCause, leg: Leg = Leg.DECODE, why: str = "why"
    ) -> None:
        """A leg of it fails."""
        ticket = request.decode if leg is Leg.DECODE else request.prefill
        assert ticket is not None
        self.say(ticket.worker, m.LegFailed(*key(request), leg, cause, why))

    def _by_decode(self, request: RoutedRequest, body: Body) -> None:
        assert request.decode is not None
        self.say(request.decode.worker, body)

    def prefill_of(self, request: RoutedRequest) -> NodeRef | None:
        """Where its prompt is being computed for another worker."""
        return request.prefill.worker if request.prefill is not None else None

    def loads(self) -> dict[str, tuple[int, int, RequestId | None]]:
        """Per worker: (prefill tokens, decode tokens, who waits), where not all are zero."""
        return {
            record.ref.node_id: (
                sum(record.prefill.values()),
                sum(record.decode.values()),
                record.waiting,
            )
            for record in self.router.workers
            if record.prefill or record.decode or record.waiting
        }


def state(request: RoutedRequest) -> RequestState:
    """Its state now; a call, so that no type checker takes it for what it was before."""
    return request.state


def key(request: RoutedRequest) -> tuple[RequestId, Attempt]:
    """What names the present attempt."""
    return request.request_id, request.attempt
