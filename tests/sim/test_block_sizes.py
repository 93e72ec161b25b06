"""Prefill and decode with blocks of different sizes, through the whole protocol and its faults."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.engine.request import RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_transfer.connector import Move
from kvferry.kv_transfer.faults import FaultPlan, FaultyConnector
from kvferry.worker.messages import Envelope
from kvferry.worker.worker import WorkerTimes
from tests.fakes import stub_spec, stub_value
from tests.sim.cluster import SimCluster, SimWorker, body_name
from tests.sim.test_protocol import submit_mix
from tests.sim.test_serving import assert_clean

SIZES = (1, 4, 8, 16, 32, 64, 128)
ODDS = (85, 5, 5, 5)  # of a message: arrives, is lost, is doubled, is late
TAILS = (1, 2, 5, 16, 17)
PAIRS = ((16, 4), (4, 16), (1, 128), (128, 1), (12, 8))


def sized(prefill: int, decode: int, **changes: object) -> SimCluster:
    """A started cluster whose pools have room for 320 positions and some blocks."""
    options: dict[str, object] = {
        "prefill_block_size": prefill,
        "decode_block_size": decode,
        "prefill_blocks": 320 // prefill + 8,
        "decode_blocks": 320 // decode + 8,
        **changes,
    }
    cluster = SimCluster(**options)  # type: ignore[arg-type]
    cluster.run(1.5)
    return cluster


def served(cluster: SimCluster, spec: RequestSpec) -> RoutedRequest:
    """The request's state at its end."""
    cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[spec.request_id]
    cluster.run_until_ended()
    cluster.assert_exact()
    return request


def values_at(sim: SimWorker, num_tokens: int) -> list[int]:
    """KV of the first positions of the one sequence that a worker runs, through its table."""
    (sequence,) = sim.worker.engine.scheduler.sequences.values()
    slots = sim.runner.blocks.view(np.int64)
    values: list[int] = slots[np.asarray(sequence.table.block_ids)].reshape(-1).tolist()
    return values[:num_tokens]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.integers(1, 140),
    st.integers(1, 9),
)
def test_every_position_is_read_into_its_own_slot(
    prefill: int, decode: int, length: int, blocks_per_poll: int
) -> None:
    cluster = sized(prefill, decode, blocks_per_poll=blocks_per_poll, audit_every_step=False)
    side = cluster.named("decode")
    side.runner.forbid_prompt = True
    cluster.submit(stub_spec("r", range(50, 50 + length), 30))
    assert cluster.run(60, lambda: bool(side.worker.engine.scheduler.sequences))
    expected = [stub_value(t, p) for p, t in enumerate(range(50, 50 + length))]
    assert values_at(side, length) == expected
    cluster.run_until_ended()
    cluster.assert_exact()
    assert side.decode is not None
    assert side.decode.puller.blocks_moved == -(-length // prefill), "as the source cuts them"
    assert side.decode.puller.bytes_moved == -(-length // prefill) * prefill * 8
    assert_clean(cluster)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_prompts_of_every_residue_and_their_successors_are_exact(prefill: int, decode: int) -> None:
    """Each prompt is served twice: moved, and then with what is cached on either side."""
    cluster = sized(prefill, decode, audit_every_step=False)
    for again in range(2):
        for length in range(1, 2 * min(max(prefill, decode), 16) + 2):
            cluster.submit(stub_spec(f"r{length}.{again}", range(7, 7 + length), 3))
        cluster.run_until_ended(300)
    cluster.assert_exact()
    assert_clean(cluster)


@pytest.mark.parametrize(
    ("prefill", "decode", "placed"),
    [(16, 4, [12]), (4, 16, [4] * 4), (32, 8, [16]), (1, 16, [1] * 16), (128, 128, [])],
)
def test_what_the_reader_has_is_left_out_by_position(
    prefill: int, decode: int, placed: list[int]
) -> None:
    """The reader has what its own whole blocks hold of 38 positions; the prompt has 48."""
    cluster = sized(prefill, decode)
    served(cluster, stub_spec("first", range(38), 3))
    reader = cluster.named("decode")
    targets = reader.connector._queue._targets
    place, counts = targets.place, []

    def watch(move: Move, staged: object, source: object) -> None:
        if move.runs:
            counts.append(sum(run.count for run in move.runs))
        place(move, staged, source)

    targets.place = watch
    served(cluster, stub_spec("second", [*range(38), *range(60, 70)], 3))
    assert counts == placed
    assert_clean(cluster)


def test_a_source_block_that_begins_with_what_is_here_stays_pinned_until_its_rest_is() -> None:
    """The reader's first word is that it has twelve positions of a block of sixteen."""
    cluster = sized(16, 4, blocks_per_poll=1)
    served(cluster, stub_spec("first", range(12), 2))
    reader, source = cluster.named("decode"), cluster.named("prefill")
    assert source.prefill is not None
    held: list[int] = []
    reader.connector.tamper = lambda move, received: held.append(len(list(source.prefill.leases)))
    served(cluster, stub_spec("second", [*range(12), *range(60, 64)], 2))
    assert held == [1], "leased while it is read"
    assert_clean(cluster)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_a_corrupt_source_block_leaves_every_slot_as_it_was_and_is_read_again(
    prefill: int, decode: int
) -> None:
    cluster = sized(prefill, decode)
    reader = cluster.named("decode")
    before = reader.runner.blocks.copy()
    hits: list[bool] = []

    def flip(move: Move, received: NDArray[np.uint8]) -> None:
        if not hits:
            hits.append(bool((reader.runner.blocks == before).all()))
            received[0] ^= 1

    reader.connector.tamper = flip
    request = served(cluster, stub_spec("r", range(20), 4))
    assert hits == [True]
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    assert request.decode_stats.transfer.reads_failed == 1
    assert_clean(cluster)


def test_a_block_that_stays_corrupt_is_neither_sealed_nor_found() -> None:
    """One source block of four fails for good: the own block that it lies in is nobody's."""
    cluster = sized(4, 16)
    reader = cluster.named("decode")

    def flip(move: Move, received: NDArray[np.uint8]) -> None:
        if move.runs[0].target_first == 4:
            received[0] ^= 1

    reader.connector.tamper = flip
    listener = cluster.submit(stub_spec("r", range(32), 4))
    cluster.run_until_ended(60)
    assert listener.ends[0].error is not None
    index = reader.worker.engine.pool.index
    assert index is not None and len(list(index)) == 0
    assert_clean(cluster)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_survive_a_death_in_the_middle_of_a_pull(
    prefill: int, decode: int, role: str
) -> None:
    cluster = sized(prefill, decode, num_prefill=2, num_decode=2, blocks_per_poll=1)
    submit_mix(cluster)
    pulling = cluster.named("decode-0").decode
    assert pulling is not None
    cluster.run(20, lambda: any(leg.pull.verified for leg in pulling.legs.values()))
    cluster.kill(cluster.named(f"{role}-0"))
    cluster.run_until_ended(60)
    cluster.assert_exact()
    assert cluster.run(4, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("seed", range(30))
def test_streams_stay_exact_under_random_faults_of_messages_and_reads(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice(SIZES) for _ in range(2)]
    while sizes[0] == sizes[1]:
        sizes[1] = rng.choice(SIZES)
    cluster = sized(
        *sizes,
        num_prefill=rng.choice((1, 2)),
        num_decode=rng.choice((1, 2)),
        prefill_blocks=rng.choice((48, 96)) // sizes[0] + 3,
        decode_blocks=rng.choice((60, 120)) // sizes[1] + 3,
        blocks_per_poll=rng.choice((1, 2, 8)),
        times=WorkerTimes(read_timeout=2.0),
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice((2, 8)),
            max_num_batched_tokens=rng.choice((8, 32)),
            chunk_tokens=rng.choice((3, 8)),
            watermark=0.0,
        ),
    )
    reads = dict.fromkeys(("drop", "duplicate", "reorder", "corrupt", "die"), 0.03)
    for sim in cluster.workers:
        faulty = FaultyConnector(sim.connector, FaultPlan(seed, delay=0.2, **reads))
        sim.worker.connector = sim.worker.reads._connector = faulty

    def faults(envelope: Envelope) -> Sequence[int]:
        if body_name(envelope.body) in ("WorkerHeartbeat", "RouterHeartbeat"):
            return (0,)
        return rng.choices([(0,), (), (0, rng.randrange(30)), (rng.randrange(10),)], ODDS)[0]

    cluster.filter = faults
    for i in range(8):
        prompt = [
            *range(rng.randrange(30)),
            *(rng.randrange(900) for _ in range(rng.choice(TAILS))),
        ]
        cluster.submit(stub_spec(f"r{i}", prompt, rng.randrange(1, 12)))
        cluster.run(rng.random())
    cluster.run_until_ended(240)
    for name, listener in cluster.listeners.items():
        assert len(listener.ends) == 1
        delivered, wanted = listener.tokens, cluster.expected(name)
        if listener.ends[0].error is None:
            assert delivered == wanted, name
        else:  # the retry budget may run out; what was delivered is right all the same
            assert delivered == wanted[: len(delivered)], name
    cluster.filter = lambda envelope: (0,)
    assert cluster.run(5, lambda: not cluster.leftovers()), cluster.leftovers()
