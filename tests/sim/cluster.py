"""A whole cluster in one process, stepped by hand under a virtual clock.

Real router, workers, roles, schedulers, leases and read queue; a stub model, an in-memory
connector, and a transport whose faults the test decides message by message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from kvferry.cluster.policy import LeastLoaded
from kvferry.cluster.router import Router
from kvferry.cluster.router_config import RouterConfig
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.engine import Engine
from kvferry.engine.request import RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.audit import BlockClass
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.kv_transfer.local import LocalConnector, LocalFabric
from kvferry.kv_transfer.memory import allocate_private
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker.codec import decode, encode
from kvferry.worker.messages import Body, Envelope, LeaseEnded, Member, NodeRef, Role
from kvferry.worker.worker import Worker, WorkerTimes
from tests.fakes import FakeClock, RecordingListener, StubRunner, stub_answer, stub_layout

MODEL = "stub@1"
TICK = 0.05

# A filter sees a message and says how many copies arrive, each after so many ticks.
Filter = Callable[[Envelope], Sequence[int]]


def deliver_all(envelope: Envelope) -> Sequence[int]:
    """No faults: one copy, next tick."""
    return (0,)


@dataclass
class SimWorker:
    """A worker and the parts of it that tests look into."""

    worker: Worker
    runner: Any
    connector: Any
    prefill: PrefillRole | None = None
    decode: DecodeRole | None = None
    alive: bool = True

    @property
    def ref(self) -> NodeRef:
        """The worker in this life."""
        return self.worker.ref


@dataclass
class SimCluster:
    """See the module. ``filter`` decides what happens to each message."""

    num_prefill: int = 1
    num_decode: int = 1
    num_colocated: int = 0
    prefill_blocks: int = 32
    decode_blocks: int = 32
    block_size: int = 4
    prefill_block_size: int = 0
    decode_block_size: int = 0
    blocks_per_poll: int = 2
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=32, chunk_tokens=8, watermark=0.0
        )
    )
    router_config: RouterConfig = field(default_factory=RouterConfig)
    times: WorkerTimes = field(default_factory=WorkerTimes)
    audit_every_step: bool = True
    caching: bool = True

    @property
    def match_unit(self) -> int:
        """Tokens per chain value: what divides every worker's block size."""
        return gcd(*(size for size in self._sizes.values() if size))

    @property
    def _sizes(self) -> dict[str, int]:
        usual = {"colocated": self.block_size if self.num_colocated else 0}
        usual["prefill"] = self.prefill_block_size or self.block_size
        usual["decode"] = self.decode_block_size or self.block_size
        return usual

    def block_size_of(self, ref: NodeRef) -> int:
        """Positions per block of a worker: its role's, or that of all."""
        return self._sizes[ref.node_id.partition("-")[0]]

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.fabric = LocalFabric()
        self.filter: Filter = deliver_all
        self.sent: Counter[str] = Counter()
        self.in_flight: list[tuple[float, Envelope]] = []
        self.workers: list[SimWorker] = []
        self.listeners: dict[str, RecordingListener] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.epoch = 0
        self.router: Router | None = None
        self._next_beat = 0.0
        self.start_router()
        for i in range(self.num_prefill):
            self.start_worker(f"prefill-{i}", (Role.PREFILL,))
        for i in range(self.num_decode):
            self.start_worker(f"decode-{i}", (Role.DECODE,))
        for i in range(self.num_colocated):
            self.start_worker(f"colocated-{i}", (Role.PREFILL, Role.DECODE))

    # --- starting and killing ---------------------------------------------------------------

    def start_router(self) -> Router:
        """A new life of the router, which registers all live workers."""
        self.epoch += 1
        policy = LeastLoaded(prefill_window=64)
        self.router = Router(NodeRef("router", self.epoch), "r", policy, self.router_config)
        for worker in self.workers:
            if worker.alive:
                self.router.register(self._member(worker), self.clock.now)
        return self.router

    def start_worker(self, name: str, roles: tuple[Role, ...]) -> SimWorker:
        """A new life of a worker, registered at the router."""
        self.epoch += 1
        ref = NodeRef(name, self.epoch)
        is_prefill = roles == (Role.PREFILL,)
        num_blocks = self.prefill_blocks if is_prefill else self.decode_blocks
        sim = self.build(ref, num_blocks)
        worker = sim.worker
        if Role.PREFILL in roles:
            sim.prefill = PrefillRole(worker)
            worker.attach(sim.prefill)
        if Role.DECODE in roles:
            sim.decode = DecodeRole(worker)
            worker.attach(sim.decode)
        self.workers.append(sim)
        if self.router is not None:
            self.router.register(self._member(sim), self.clock.now)
        return sim

    def build(self, ref: NodeRef, num_blocks: int) -> SimWorker:
        """A worker without roles: here of stub parts; the golden tests build real ones."""
        block_size = self.block_size_of(ref)
        layout = stub_layout(block_size)
        memory = allocate_private(num_blocks, layout.block_bytes())
        connector = LocalConnector(
            self.fabric,
            memory,
            worker_id=ref.node_id,
            epoch=ref.epoch,
            model=MODEL,
            layout=layout,
            blocks_per_poll=self.blocks_per_poll,
            match_unit=self.match_unit,
        )
        runner = StubRunner(memory.blocks, block_size)
        pool = BlockPool(num_blocks, memory.raise_generation, self.index(), self.clock)
        engine = Engine(
            self.scheduler, runner, pool, block_size, MODEL, self.clock, self.match_unit
        )
        return SimWorker(Worker(ref, engine, connector, self.times), runner, connector)

    def index(self) -> PrefixIndex | None:
        """What a worker's pool finds prefixes with."""
        return PrefixIndex() if self.caching else None

    def _member(self, sim: SimWorker) -> Member:
        roles = tuple(role.role for role in sim.worker.roles)
        return Member(sim.ref, roles, sim.ref.node_id, sim.connector.local_info())

    def kill(self, sim: SimWorker) -> None:
        """kill -9: it sends and reads nothing more, its pool is gone."""
        sim.alive = False
        self.fabric.kill(sim.connector.local_info().address)

    def kill_router(self) -> None:
        """kill -9 of the router."""
        self.router = None

    def named(self, prefix: str) -> SimWorker:
        """The newest live worker whose name begins so."""
        return next(
            w for w in reversed(self.workers) if w.alive and w.ref.node_id.startswith(prefix)
        )

    # --- requests ---------------------------------------------------------------------------

    def submit(
        self, spec: RequestSpec, listener: RecordingListener | None = None
    ) -> RecordingListener:
        """Hand a request to the router."""
        assert self.router is not None
        listener = listener or RecordingListener()
        self.listeners[spec.request_id] = listener
        self.specs[spec.request_id] = spec
        self.router.submit(spec, listener, self.clock.now)
        return listener

    def expected(self, request_id: str, branch: int = 0) -> list[int]:
        """What the stub model answers to a submitted request."""
        return stub_answer(self.specs[request_id], branch)

    # --- time -------------------------------------------------------------------------------

    def advance(self) -> None:
        """One tick: deliver what is due, drive timers, one step per worker."""
        self.clock.now += TICK
        now = self.clock.now
        due = [envelope for at, envelope in self.in_flight if at <= now]
        self.in_flight = [(at, envelope) for at, envelope in self.in_flight if at > now]
        for envelope in due:
            self._arrive(envelope, now)
        if self.router is not None:
            self.router.tick(now)
            self._post(self.router.outbox)
        beat = now >= self._next_beat
        if beat:
            self._next_beat = now + self.times.heartbeat
        for sim in self.workers:
            if not sim.alive:
                continue
            sim.worker.tick(now)
            sim.worker.step()
            self._post(sim.worker.outbox)
            if beat:
                for envelope in sim.worker.heartbeats():
                    self._send(envelope)
            if self.audit_every_step:
                found = sim.worker.audit(now)
                assert found.consistent, (sim.ref, found.problems)
                assert found.counts == sim.worker.engine.pool.count_classes(), sim.ref
                assert sum(found.counts.values()) == sim.worker.engine.pool.num_blocks

    def _arrive(self, envelope: Envelope, now: float) -> None:
        name = envelope.receiver.node_id
        if name == "router":
            if self.router is not None:
                self.router.deliver(envelope, now)
            return
        for sim in self.workers:
            if sim.alive and sim.ref.node_id == name:
                sim.worker.deliver(envelope, now)

    def _post(self, outbox: deque[Envelope]) -> None:
        while outbox:
            self._send(outbox.popleft())

    def _send(self, envelope: Envelope) -> None:
        self.sent[type(envelope.body).__name__] += 1
        again = decode(encode(envelope))
        assert again == envelope
        for delay in self.filter(again):
            self.in_flight.append((self.clock.now + delay * TICK, again))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Advance until the condition holds; False if it did not within ``seconds``."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.advance()
            if until is not None and until():
                return True
        return until is None

    def run_until_ended(self, seconds: float = 60.0) -> None:
        """Advance until every submitted request has ended; fails if one does not."""
        done = self.run(seconds, lambda: all(x.ends for x in self.listeners.values()))
        waiting = [name for name, x in self.listeners.items() if not x.ends]
        assert done, f"not ended after {seconds} s: {waiting}"

    # --- what must hold ---------------------------------------------------------------------

    def assert_exact(self) -> None:
        """Every stream has exactly its tokens and one terminal event."""
        for name, listener in self.listeners.items():
            assert len(listener.ends) == 1, name
            assert listener.ends[0].error is None, (name, listener.ends)
            self.assert_whole(name)

    def assert_whole(self, name: str) -> None:
        """A stream that has ended well has all tokens and one end of each branch."""
        listener, branches = self.listeners[name], self.specs[name].branches
        for branch in branches:
            assert listener.branches[branch] == self.expected(name, branch), (name, branch)
        assert {*listener.branch_ends, listener.ends[0].branch} == set(branches)
        assert len(listener.branch_ends) == len(branches) - 1

    def assert_prefixes(self, name: str) -> None:
        """What a stream has so far is right."""
        for branch, tokens in self.listeners[name].branches.items():
            assert tokens == self.expected(name, branch)[: len(tokens)], (name, branch)

    def leftovers(self) -> list[str]:
        """What live workers and the router still hold; empty when clean."""
        found: list[str] = []
        for sim in self.workers:
            if not sim.alive:
                continue
            audit = sim.worker.audit(self.clock.now)
            found.extend(f"{sim.ref.node_id}: {problem}" for problem in audit.problems)
            free = audit.counts[BlockClass.FREE] + audit.counts[BlockClass.CACHED]
            if free != sim.worker.engine.pool.num_blocks:
                found.append(f"{sim.ref.node_id}: {audit.counts}")
            if sim.prefill is not None and (sim.prefill.jobs or len(sim.prefill.leases)):
                found.append(f"{sim.ref.node_id}: jobs {list(sim.prefill.jobs)}")
            if sim.decode is not None and sim.decode.legs:
                found.append(f"{sim.ref.node_id}: legs {list(sim.decode.legs)}")
            if sim.worker.engine.scheduler.sequences:
                found.append(f"{sim.ref.node_id}: sequences")
        if self.router is not None:
            found.extend(f"router: {name}" for name in self.router.requests)
            for record in self.router.workers:
                if record.prefill or record.decode or record.waiting:
                    found.append(f"router counts load on {record.ref.node_id}")
        return found


def body_name(body: Body) -> str:
    """The message's class name."""
    return type(body).__name__


__all__ = ["TICK", "LeaseEnded", "SimCluster", "SimWorker", "body_name", "deliver_all"]
