"""A running worker over real sockets: it serves, tells a hung step, and dies loudly."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

from kvferry.cluster.policy import LeastLoaded
from kvferry.cluster.router import Router
from kvferry.cluster.router_config import RouterConfig
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.request import Attempt, RequestId
from kvferry.kv_transfer.authentication import NO_KEY
from kvferry.kv_transfer.local import LocalFabric
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, Envelope, NodeRef, Role
from kvferry.worker.network import Network
from kvferry.worker.process import WorkerProcess
from kvferry.worker.worker import RoleHandler, WorkerTimes
from tests.fakes import ATTEMPT, RecordingListener, StubRunner, stub_output, stub_spec
from tests.worker.making import MadeWorker, RecordingRole, attach, make_worker

LONG = 60.0  # a bound, never waited for when all is well
# no router falls silent within a test, however slow the machine
TIMES = WorkerTimes(list_period=0.05, heartbeat=0.02, heartbeat_timeout=LONG, stall_limit=LONG)
ROUTER = NodeRef("router", 1)
R = RequestId("r")
T = TypeVar("T")


class GatedRunner(StubRunner):
    """A stub model whose steps wait at a gate while it is closed."""

    def __init__(self, inner: StubRunner) -> None:
        super().__init__(inner.blocks, inner.block_size)
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.many_steps = threading.Event()

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Say that the step has begun; go on when the gate is open."""
        self.entered.set()
        assert self.gate.wait(LONG)
        result = super().execute(output)
        if self.num_steps >= 40:
            self.many_steps.set()
        return result


@dataclass
class Running:
    """A worker process and its parts."""

    made: MadeWorker
    process: WorkerProcess
    runner: GatedRunner
    died: threading.Event

    @property
    def member(self) -> m.Member:
        """Its membership entry, with the address where it really listens."""
        return replace(self.made.member, address=self.process.address)


def take_over(network: Network, address: str) -> None:
    """Let a network that has not started listen where another has listened before."""
    network._pull.bind(address)
    network.address = address


class Door:
    """A router's network without a router: what workers send can be waited for."""

    def __init__(self, ref: NodeRef = ROUTER, host: str = "127.0.0.1", at: str = "") -> None:
        self.ref = ref
        self.arrived: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.network = Network(host, self.arrived.put, key=NO_KEY)
        if at:
            take_over(self.network, at)
        self.network.start()
        self._seq = itertools.count(1)

    def send(self, running: Running, *bodies: Body, to: NodeRef | None = None) -> None:
        """Send messages to a worker, in its present life unless said otherwise."""
        ref = to or running.made.worker.ref
        self.network.send(
            (running.process.address, Envelope(self.ref, ref, next(self._seq), 0, body))
            for body in bodies
        )

    def introduce(self, running: Running) -> None:
        """Tell a worker who we are."""
        self.send(running, m.Membership(1, self.network.address, (running.member,)))

    def wait_for(self, kind: type[T], accept: Callable[[T], bool] = lambda _: True) -> T:
        """The next message of a kind that is acceptable; others are dropped."""
        while True:
            body = self.arrived.get(timeout=LONG).body
            if isinstance(body, kind) and accept(body):
                return body


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts worker processes of one fabric, and stops them."""
    fabric = LocalFabric()
    running: list[Running] = []

    def begin(
        ref: NodeRef,
        roles: tuple[Role, ...],
        *,
        handler: RoleHandler | None = None,
        audit: bool = False,
        host: str = "127.0.0.1",
        begun: bool = True,
    ) -> Running:
        made = make_worker(fabric, ref, roles, clock=time.monotonic, times=TIMES)
        runner = GatedRunner(made.runner)
        made.worker.engine._runner = runner
        if handler is not None:
            attach(made, handler)
        elif Role.PREFILL in roles:
            attach(made, PrefillRole(made.worker))
        if handler is None and Role.DECODE in roles:
            attach(made, DecodeRole(made.worker))
        died = threading.Event()
        process = WorkerProcess(made.worker, host, audit, died.set, key=NO_KEY)
        running.append(Running(made, process, runner, died))
        if begun:
            process.start()
        return running[-1]

    yield begin
    for each in running:
        each.runner.gate.set()
        each.process.stop()


@pytest.fixture
def door() -> Iterator[Door]:
    """A running door."""
    made = Door()
    yield made
    made.network.stop()


def test_a_request_is_served_over_real_sockets_and_leaves_nothing(start: Start) -> None:
    """A real router, driven by hand; prefill and decode in processes' threads of their own."""
    door = Door()
    router = Router(ROUTER, door.network.address, LeastLoaded(64), RouterConfig(heartbeat=0.05))
    prefill = start(NodeRef("prefill-0", 2), (Role.PREFILL,))
    decode = start(NodeRef("decode-0", 3), (Role.DECODE,))
    address = {each.member.ref: each.process.address for each in (prefill, decode)}

    def turn(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < deadline
            router.tick(time.monotonic())
            while router.outbox:
                envelope = router.outbox.popleft()
                door.network.send([(address[envelope.receiver], envelope)])
            try:
                router.deliver(door.arrived.get(timeout=0.05), time.monotonic())
            except queue.Empty:
                pass

    try:
        for each in (prefill, decode):
            router.register(each.member, time.monotonic())
        turn(lambda: not router.workers.not_ready_reasons())
        listeners = {}
        for name, length in (("a", 1), ("b", 4), ("c", 23)):
            listeners[length] = RecordingListener()
            router.submit(stub_spec(name, range(length), 7), listeners[length], time.monotonic())
        turn(lambda: all(listener.ends for listener in listeners.values()))
        for length, listener in listeners.items():
            assert listener.tokens == stub_output(range(length), 7)
        for query_id in itertools.count():
            router.ask_audit(prefill.member.ref, query_id)
            router.ask_audit(decode.member.ref, query_id)
            turn(lambda: len(router.audits) == 2)
            reports = [report for _, report in router.audits]
            router.audits.clear()
            assert not any(report.problems for report in reports)
            if all(dict(report.counts)["free"] == 16 for report in reports):
                break
    finally:
        door.network.stop()


def test_heartbeats_flow_while_a_step_hangs_and_tell_its_age(start: Start, door: Door) -> None:
    worker = start(NodeRef("decode-0", 3), (Role.DECODE,))
    door.introduce(worker)
    assert door.wait_for(m.WorkerHeartbeat).step_age_s is None
    worker.runner.gate.clear()
    door.send(worker, m.Reserve(stub_spec("r", range(5), 3), ATTEMPT, prefill_here=True))
    assert worker.runner.entered.wait(LONG)
    ages = []
    for _ in range(4):
        beat = door.wait_for(m.WorkerHeartbeat, lambda beat: beat.step_age_s is not None)
        assert beat.step_age_s is not None
        ages.append(beat.step_age_s)
    assert ages == sorted(set(ages)), "the step grows older from beat to beat"
    assert not worker.died.is_set()
    worker.runner.gate.set()
    tokens: list[int] = []
    while len(tokens) < 3:
        for event in door.wait_for(m.TokenEvents).events:
            tokens[event.first_index :] = event.token_ids
    assert tokens == stub_output(range(5), 3)
    door.wait_for(m.WorkerHeartbeat, lambda beat: beat.step_age_s is None)


class _Failing(RecordingRole):
    """A role with a bug."""

    def tick(self, now: float) -> None:
        """Raise once a router is known."""
        super().tick(now)
        if self.handled:
            raise ZeroDivisionError("a bug in a role")


def test_an_error_in_the_engine_thread_is_told_and_the_worker_falls_silent(
    start: Start, door: Door
) -> None:
    worker = start(NodeRef("decode-0", 3), (Role.DECODE,), handler=_Failing())
    door.introduce(worker)
    door.wait_for(m.WorkerHeartbeat)
    assert not worker.died.is_set()
    door.send(worker, m.Replay(R, ATTEMPT, 0))
    assert worker.died.wait(LONG)
    with pytest.raises(queue.Empty):  # those under way still come; then no more
        for _ in range(200):
            door.arrived.get(timeout=20 * TIMES.heartbeat)
    worker.process.stop()


def test_a_dead_front_door_never_delays_a_step(start: Start, door: Door) -> None:
    worker = start(NodeRef("decode-0", 3), (Role.DECODE,))
    nobody = Network("127.0.0.1", lambda envelope: None, key=NO_KEY)
    nobody.stop()
    door.send(worker, m.Membership(1, nobody.address, (worker.member,)))
    door.send(worker, m.Reserve(stub_spec("r", range(5), 50), ATTEMPT, prefill_here=True))
    assert worker.runner.many_steps.wait(LONG)


def test_every_step_is_audited_when_asked_for(
    start: Start, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(NodeRef("decode-0", 3), (Role.DECODE,), audit=True, begun=False)
    (leaked,) = worker.made.pool.allocate(1)
    worker.process.start()
    door.introduce(worker)
    door.send(worker, m.Reserve(stub_spec("r", range(5), 3), ATTEMPT, prefill_here=True))
    door.wait_for(m.TokenEvents, lambda body: body.events[0].finish_reason is not None)
    assert any(f"block {leaked} leaked" in record.message for record in caplog.records)


def test_a_process_may_be_stopped_twice_or_without_having_started(start: Start) -> None:
    never = start(NodeRef("a", 1), (), begun=False)
    never.process.stop()
    once = start(NodeRef("b", 2), ())
    once.process.stop()
    once.process.stop()
    assert not once.died.is_set()


# --- another life at the same address ----------------------------------------------------------

HOSTS = (f"127.38.0.{number}" for number in range(1, 255))
"""Loopback addresses of which nobody else takes a port between two lives."""


def queued_for(door: Door, dead: Running, bodies: list[Body]) -> None:
    """Send messages to a process that is dead; returns when they wait in the socket."""
    door.send(dead, *bodies)
    done = threading.Event()
    live = Network("127.0.0.1", lambda envelope: done.set(), key=NO_KEY)
    live.start()
    door.network.send([(live.address, Envelope(door.ref, door.ref, 0, 0, m.RouterHeartbeat()))])
    assert done.wait(LONG)
    live.stop()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_was_queued_for_a_dead_worker_is_refused_by_its_successor(
    start: Start, door: Door, role: Role
) -> None:
    old, new = NodeRef("worker", 3), NodeRef("worker", 8)
    dead = start(old, (role,), host=next(HOSTS))
    door.introduce(dead)
    door.wait_for(m.WorkerHeartbeat)
    dead.process.stop()
    spec = stub_spec("r", range(9), 4)
    queued: list[Body] = [
        m.Membership(2, door.network.address, (dead.member,)),
        m.Reserve(spec, ATTEMPT, prefill_here=True),
        m.PrefillRequest(spec, ATTEMPT, NodeRef("decode-9", 9)),
        m.WantedList(()),
        m.CancelLeg(R, ATTEMPT, m.Leg.DECODE),
    ]
    queued_for(door, dead, queued)

    successor = start(new, (role,), begun=False)
    take_over(successor.process._network, dead.process.address)
    successor.process.start()
    door.introduce(successor)  # behind the others on the same socket
    beat = door.wait_for(m.WorkerHeartbeat)
    assert beat.load.stale_refused == len(queued)
    assert (beat.load.num_running, beat.load.num_waiting) == (0, 0)
    assert beat.load.num_free_blocks == beat.load.num_blocks
    assert successor.runner.num_steps == 0

    # and nothing waits for what was lost: the new life serves the same request
    again = Attempt(1, 2)
    if role is Role.DECODE:
        door.send(successor, m.Reserve(spec, again, prefill_here=True))
        door.wait_for(m.TokenEvents, lambda body: body.events[0].finish_reason is not None)
    else:
        door.send(successor, m.PrefillRequest(spec, again, NodeRef("decode-9", 9)))
        done = door.wait_for(m.PrefillDone)
        assert list(done.token_ids) == stub_output(range(9), 1)


def test_what_was_queued_for_a_dead_router_is_refused_by_its_successor(start: Start) -> None:
    worker = start(NodeRef("decode-0", 3), (Role.DECODE,))
    first = Door(host=next(HOSTS))
    first.introduce(worker)
    first.wait_for(m.WorkerHeartbeat)
    first.network.stop()
    ref = NodeRef(ROUTER.node_id, ROUTER.epoch + 8)
    second = Door(ref, at=first.network.address)
    router = Router(ref, second.network.address, LeastLoaded(64), RouterConfig())
    router.register(worker.member, 0.0)
    try:
        while router.channels.refused["receiver"] < 3:  # its heartbeats for the dead router
            router.deliver(second.arrived.get(timeout=LONG), 0.0)
        assert router.workers.views()[0].capacity_tokens == 0, (
            "a load told to another life is unknown"
        )
        second.network.send((worker.process.address, envelope) for envelope in router.outbox)
        while not router.workers.views()[0].capacity_tokens:
            router.deliver(second.arrived.get(timeout=LONG), 0.0)
        assert router.counters.total() == 0
    finally:
        second.network.stop()
