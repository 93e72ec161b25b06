"""Workers over a stub model and in-memory pools, and the messages that a test sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvferry.engine.engine import Engine
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.audit import Owner
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.kv_transfer.connector import PeerInfo
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import PoolMemory, allocate_private
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, Envelope, LoadReport, Member, NodeRef, Role
from kvferry.worker.worker import RoleHandler, Worker, WorkerTimes
from tests.fakes import FakeClock, StubRunner, stub_layout

MODEL = "stub@1"
BLOCK = 4
ROUTER = NodeRef("router", 1)


@dataclass
class MadeWorker:
    """A worker and the parts of it that tests look into."""

    worker: Worker
    runner: StubRunner
    memory: PoolMemory
    connector: LocalConnector
    member: Member

    @property
    def pool(self) -> BlockPool:
        """The worker's blocks."""
        return self.worker.engine.pool

    def sent(self, kind: type[Body] | None = None) -> list[Envelope]:
        """What has been sent since the last call, all or one kind; the rest is dropped."""
        found = list(self.worker.outbox)
        self.worker.outbox.clear()
        return [e for e in found if kind is None or isinstance(e.body, kind)]


def make_worker(
    fabric: LocalFabric,
    ref: NodeRef,
    roles: Sequence[Role] = (),
    *,
    clock: Callable[[], float] | None = None,
    num_blocks: int = 16,
    blocks_per_poll: int | None = None,
    times: WorkerTimes | None = None,
    scheduler: SchedulerConfig | None = None,
    model: str = MODEL,
) -> MadeWorker:
    """A worker without roles attached; ``roles`` are what its membership entry says."""
    layout = stub_layout(BLOCK)
    memory = allocate_private(num_blocks, layout.block_bytes())
    connector = LocalConnector(
        fabric,
        memory,
        worker_id=ref.node_id,
        epoch=ref.epoch,
        model=model,
        layout=layout,
        address=f"local:{ref.node_id}:{ref.epoch}",
        blocks_per_poll=blocks_per_poll,
    )
    runner = StubRunner(memory.blocks, BLOCK)
    pool = BlockPool(num_blocks, memory.raise_generation)
    config = scheduler or SchedulerConfig(8, 32, 8, 0.0)
    engine = Engine(config, runner, pool, BLOCK, model, clock or FakeClock())
    worker = Worker(ref, engine, connector, times or WorkerTimes())
    member = Member(ref, tuple(roles), f"tcp://{ref.node_id}", connector.local_info())
    return MadeWorker(worker, runner, memory, connector, member)


def member(ref: NodeRef, roles: Sequence[Role] = (Role.DECODE,), model: str = MODEL) -> Member:
    """A membership entry of a worker that need not exist."""
    info = PeerInfo(
        ref.node_id, ref.epoch, "local", f"local:{ref.node_id}", "local", model, stub_layout(4), 8
    )
    return Member(ref, tuple(roles), f"tcp://{ref.node_id}", info)


def membership(*members: Member, version: int = 1, address: str = "tcp://router") -> m.Membership:
    """The router's list of who is alive."""
    return m.Membership(version, address, members)


@dataclass
class Sender:
    """One node's side of its channel to a worker: numbers what it sends."""

    target: Worker
    ref: NodeRef = ROUTER
    seq: int = 0

    def send(self, body: Body, now: float = 0.0, heard: int | None = None) -> Envelope:
        """Deliver a message; by default it has heard everything that the worker sent."""
        self.seq += 1
        heard = 1_000_000 if heard is None else heard
        envelope = Envelope(self.ref, self.target.ref, self.seq, heard, body)
        self.target.deliver(envelope, now)
        return envelope


@dataclass
class RecordingRole:
    """A role that takes what it is told to and keeps every call."""

    role: Role = Role.DECODE
    takes: tuple[type[Body], ...] = ()
    items: list[m.HeldItem] = field(default_factory=list)
    blocks: list[Owner] = field(default_factory=list)
    handled: list[Envelope] = field(default_factory=list)
    dropped_routers: list[NodeRef] = field(default_factory=list)
    dropped_peers: list[NodeRef] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)

    def handle(self, envelope: Envelope, now: float) -> bool:
        """Keep it; say whether it was wanted."""
        self.handled.append(envelope)
        return isinstance(envelope.body, self.takes)

    def tick(self, now: float) -> None:
        """Keep the time."""
        self.ticks.append(now)

    def flush(self, now: float) -> None:
        """Nothing to send."""

    def held(self, router: NodeRef) -> list[m.HeldItem]:
        """What the test says."""
        return self.items

    def drop_router(self, router: NodeRef) -> None:
        """Keep it."""
        self.dropped_routers.append(router)

    def drop_peer(self, peer: NodeRef) -> None:
        """Keep it."""
        self.dropped_peers.append(peer)

    def owners(self, now: float) -> Iterator[Owner]:
        """What the test says."""
        return iter(self.blocks)

    def add_load(self, load: LoadReport) -> LoadReport:
        """One reservation, to see that the role was asked."""
        return replace(load, num_reserved=load.num_reserved + 1)


def attach(made: MadeWorker, *roles: RoleHandler) -> None:
    """Attach roles in order."""
    for role in roles:
        made.worker.attach(role)


__all__ = [
    "BLOCK",
    "MODEL",
    "ROUTER",
    "KVCacheLayout",
    "MadeWorker",
    "RecordingRole",
    "Sender",
    "attach",
    "make_worker",
    "member",
    "membership",
]
