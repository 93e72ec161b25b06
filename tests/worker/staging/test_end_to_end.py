"""Prefill, slots, a connector, slots, decode: the tokens of the CPU path, whatever the devices do
when; and with a cancel, a death or a fault in the middle nothing is lost and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import pytest

from kvferry.cluster.policy import LeastLoaded, Placement, WorkerView
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.request import Attempt, RequestId, RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.connector import ReadStatus
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker.messages import LegState, NodeRef
from kvferry.worker.worker import WorkerTimes
from tests.engine.generation import prompt, small_model
from tests.golden.cluster import RealCluster, greedy
from tests.worker.staging.device_cluster import DeviceCluster

SCHEDULER = SchedulerConfig(6, 48, 24, watermark=0.0)
SIZE = 8
OPENING = prompt(99, 40)
PROMPTS = [
    prompt(1, 61),
    prompt(2, 8),
    OPENING + prompt(3, 5),
    OPENING + prompt(4, 17),
    prompt(5, 1),
    prompt(6, 90),
]


class Crossed(LeastLoaded):
    """What one of two workers decodes the other has computed; by turns."""

    turn = 0

    def place(self, num_tokens: int, workers: Sequence[WorkerView]) -> Placement | None:
        """Whoever's turn it is decodes."""
        decode, prefill = (workers[(self.turn + i) % 2] for i in range(2))
        if prefill.ref not in decode.connected_to:
            return None
        self.turn += 1
        return Placement(decode.ref, prefill.ref, "crossed")

    def choose_prefill(
        self, num_tokens: int, decode: NodeRef, workers: Sequence[WorkerView], windowed: bool
    ) -> NodeRef | None:
        """The other one."""
        return next(worker.ref for worker in workers if worker.ref != decode)


@cache
def model() -> LlamaModel:
    return small_model()


def specs() -> list[RequestSpec]:
    return [greedy(f"r{i}", ids, 12) for i, ids in enumerate(PROMPTS)]


def small(**changes: object) -> dict[str, object]:
    """A small cluster's settings."""
    return {
        "model": model(),
        "block_size": SIZE,
        "prefill_blocks": 48,
        "decode_blocks": 80,
        "scheduler": SCHEDULER,
        **changes,
    }


@cache
def on_the_cpu() -> dict[str, list[int]]:
    """The same requests' tokens where every pool is in host memory."""
    cluster = RealCluster(**small())  # type: ignore[arg-type]
    for spec in specs():
        cluster.submit(spec)
    cluster.run_until_ended()
    tokens = {name: listener.tokens for name, listener in cluster.listeners.items()}
    cluster.close()
    return tokens


@pytest.fixture
def clusters() -> Iterator[list[DeviceCluster]]:
    """Those made in a test, closed at its end."""
    made: list[DeviceCluster] = []
    yield made
    for cluster in made:
        cluster.close()


def start(made: list[DeviceCluster], **changes: object) -> DeviceCluster:
    made.append(DeviceCluster(**small(**changes)))  # type: ignore[arg-type]
    return made[-1]


def assert_right(cluster: DeviceCluster) -> None:
    """Every stream has the CPU's tokens, and nothing is held any longer."""
    cluster.run_until_ended(600.0)
    for name, listener in cluster.listeners.items():
        assert len(listener.ends) == 1 and listener.ends[0].error is None, listener.ends
        assert listener.tokens == on_the_cpu()[name], name
    assert_clean(cluster)


def assert_clean(cluster: DeviceCluster) -> None:
    cluster.run(10.0)
    assert cluster.leftovers() == []
    for sim in cluster.workers:
        if not sim.alive or sim.ref not in cluster.parts:
            continue
        parts = cluster.parts[sim.ref]
        cluster.devices[sim.ref].run_all()
        parts.publisher.poll()
        assert parts.publisher.num_pending == 0 and not parts.publisher._offers
        for slots in (parts.publisher._slots, parts.connector._slots):
            assert slots.num_free == slots.num_slots == cluster.staging_blocks


@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_are_those_of_the_cpu_path(
    clusters: list[DeviceCluster], connector: str, seed: int
) -> None:
    cluster = start(clusters, connector=connector, seed=100 * seed, caching=seed % 2 == 1)
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)
    graphs = [graph for device in cluster.devices.values() for graph in device.graphs]
    assert sum(graph.num_launches for graph in graphs) >= 11, "decode steps are replayed"


@pytest.mark.parametrize("staging_blocks", [1, 2])
def test_a_slot_or_two_are_enough(clusters: list[DeviceCluster], staging_blocks: int) -> None:
    cluster = start(clusters, staging_blocks=staging_blocks, seed=7)
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)


@pytest.mark.parametrize("on_cpu", ["prefill", "decode"])
@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_one_side_may_be_on_the_cpu(
    clusters: list[DeviceCluster], on_cpu: str, connector: str
) -> None:
    cluster = start(clusters, on_cpu=frozenset([on_cpu]), connector=connector, seed=3)
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)


def test_a_pool_in_host_memory_takes_a_device_s_blocks_of_another_size(
    clusters: list[DeviceCluster],
) -> None:
    cluster = start(clusters, on_cpu=frozenset(["decode"]), prefill_block_size=4, seed=9)
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)


def test_two_workers_that_read_from_each_other_do_not_wait_for_one_another(
    clusters: list[DeviceCluster],
) -> None:
    """Each is source and reader at once, with one slot for either."""
    cluster = start(
        clusters, num_prefill=0, num_decode=0, num_colocated=2, staging_blocks=1, seed=5
    )
    assert cluster.router is not None
    crossed = Crossed(prefill_window=1000)
    cluster.router.policy = cluster.router._line._policy = crossed
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)
    moved = [sim.decode.puller.blocks_moved for sim in cluster.workers if sim.decode is not None]
    assert len(moved) == 2 and all(moved)


def request_that_is(cluster: DeviceCluster, state: str) -> RequestId | None:
    """A request in this state of its way from pool to pool; None: there is none now."""
    for sim in cluster.workers:
        for job in sim.prefill.jobs.values() if sim.prefill is not None else ():
            if (state == "waiting to be announced" and job.offered) or (
                state == "announced" and job.unverified
            ):
                return job.request.spec.request_id
        for leg in sim.decode.legs.values() if sim.decode is not None else ():
            connector = cluster.parts[sim.ref].connector
            read_by = {
                "waiting for a slot": {q.read_id for e in connector._turns for q in e.waiting},
                "read into a slot": {s.queued.read_id for s in connector._reading.values()},
                "copied in": {s.queued.read_id for s in connector._copying},
            }
            running = state == "decoding" and leg.state is LegState.RUNNING
            if running or read_by.get(state, set()) & set(leg.pull.reading):
                return leg.request.spec.request_id
    return None


STATES = (
    "waiting to be announced",
    "announced",
    "waiting for a slot",
    "read into a slot",
    "copied in",
    "decoding",
)


def run_until(cluster: DeviceCluster, state: str) -> RequestId:
    """Advance until some request is in a state."""
    for spec in specs():
        cluster.submit(spec)
    assert cluster.run(100.0, lambda: request_that_is(cluster, state) is not None), state
    found = request_that_is(cluster, state)
    assert found is not None
    return found


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_a_cancel_in_every_state_leaves_nothing_and_spoils_nobody(
    clusters: list[DeviceCluster], state: str, connector: str
) -> None:
    cluster = start(
        clusters, seed=len(state), connector=connector, blocks_per_poll=1, staging_blocks=6
    )
    found = run_until(cluster, state)
    assert cluster.router is not None
    cluster.router.cancel(found, cluster.clock.now)
    del cluster.listeners[found]
    assert_right(cluster)


def _held(role: PrefillRole | DecodeRole | None) -> Iterable[tuple[RequestId, Attempt]]:
    if role is None:
        return ()
    return role.jobs if isinstance(role, PrefillRole) else role.legs


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_a_worker_s_death_in_every_state_costs_no_token(
    clusters: list[DeviceCluster], role: str, state: str
) -> None:
    """That of the worker which has, or is read by whoever has, a request in that state."""
    cluster = start(
        clusters, num_prefill=2, num_decode=2, seed=len(state), connector="tcp", blocks_per_poll=1
    )
    found = run_until(cluster, state)
    holders = [
        sim
        for sim in cluster.workers
        if any(
            request == found
            for role_here in (sim.prefill, sim.decode)
            for request, _ in _held(role_here)
        )
    ]
    cluster.kill(next(sim for sim in holders if sim.ref.node_id.startswith(role)))
    assert_right(cluster)


def test_reads_that_are_given_up_late_are_fenced_and_made_again(
    clusters: list[DeviceCluster],
) -> None:
    """The device of the reader does nothing for longer than a read may take."""
    times = WorkerTimes(read_timeout=0.4)
    cluster = start(clusters, seed=2, times=times)
    cluster.submit(specs()[0])
    decode = cluster.named("decode")
    device = cluster.devices[decode.ref]
    assert cluster.run(10.0, lambda: any(stream.queue for stream in device.streams))
    drift, device._rng = device._rng, None
    cluster.run(2.0)
    device._rng = drift
    assert_right(cluster)


def test_a_damaged_block_is_read_again(clusters: list[DeviceCluster]) -> None:
    cluster = start(clusters, seed=11)
    decode = cluster.named("decode")
    hits = iter([True, False, True])

    def flip(_move: object, received: object) -> None:
        if next(hits, False):
            received[0] ^= 1  # type: ignore[index]

    decode.connector._inner.tamper = flip
    for spec in specs():
        cluster.submit(spec)
    assert_right(cluster)
    failures = decode.decode.puller.tallies() if decode.decode is not None else ()
    corrupt = [dict(tally.failures).get(ReadStatus.CORRUPT.value, 0) for tally in failures]
    assert corrupt == [2]


def test_a_source_with_other_blocks_is_refused_by_name(clusters: list[DeviceCluster]) -> None:
    """And the router is told why."""
    cluster = start(clusters, prefill_block_size=4, decode_block_size=8, seed=1)
    cluster.run(3.0)
    states = list(cluster.named("decode").worker._peer_states())
    assert ["block_size is 4 there, 8 here" in state.error for state in states] == [True]
