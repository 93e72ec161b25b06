"""The KV index against a plain dictionary of what each worker holds, with any message lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.kv_index import KVIndex, chain_for
from kvferry.kv_cache.hashing import Mark
from kvferry.kv_cache.prefix_index import PrefixIndex
from kvferry.worker.messages import Envelope, KVEvents, KVSnapshot, KVSnapshotRequest, NodeRef
from tests.fakes import stub_spec
from tests.sim.cluster import MODEL, SimCluster

A = NodeRef("decode-0", 3)


def value(number: int) -> bytes:
    return number.to_bytes(16, "little")


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "drop", "clear"]), st.integers(0, 5)), max_size=40
)


@given(CHANGES, st.lists(st.sampled_from(["told", "lost", "twice"]), min_size=40, max_size=40))
def test_what_is_believed_is_what_is_there(
    changes: list[tuple[str, int]], fates: list[str]
) -> None:
    """After each message: exactly what the worker has told, or nothing while one is missing."""
    source, index = PrefixIndex(), KVIndex()
    there: dict[int, bytes] = {}
    missing = False
    for fate, (change, block) in zip(fates, changes, strict=False):
        if change == "add" and block not in there:
            there[block] = value(block)
            source.add(block, [Mark(there[block], 4)])  # type: ignore[arg-type]
        elif change == "drop":
            there.pop(block, None)
            source.drop(block)
        elif change == "clear":
            there.clear()
            source.clear()
        message = KVEvents(*source.take_events())
        if fate == "lost":
            missing = missing or bool(message.events)
        else:
            index.apply(A, message)
            if fate == "twice":
                index.apply(A, message)
            if not missing:
                assert index.num_values(A) == len(there)
            elif message.events:
                assert index.num_values(A) == 0, "believed in spite of a gap"
    late = [index.wants_snapshot(A, source.num_events) for _ in range(2)]
    assert late[1] == missing
    index.load(A, KVSnapshot(source.num_events, source.values()))
    assert index.num_values(A) == len(there)
    assert not index.wants_snapshot(A, source.num_events)
    assert not index.wants_snapshot(A, source.num_events)


def test_an_old_snapshot_does_not_undo_later_events() -> None:
    source, index = PrefixIndex(), KVIndex()
    old = KVSnapshot(source.num_events, source.values())
    source.add(1, [Mark(value(1), 4)])  # type: ignore[arg-type]
    index.apply(A, KVEvents(*source.take_events()))
    index.load(A, old)
    assert index.num_values(A) == 1


# --- in a whole cluster -----------------------------------------------------------------------


def known(cluster: SimCluster, side: str) -> tuple[int, int]:
    """Values that the router knows of a worker, and that its pool has."""
    assert cluster.router is not None
    sim = cluster.named(side)
    index = sim.worker.engine.pool.index
    assert index is not None
    return cluster.router.kv_index.num_values(sim.ref), len(index)


def serve(cluster: SimCluster, name: str, prompt: Sequence[int], salt: str = "") -> None:
    cluster.submit(replace(stub_spec(name, prompt, 6), cache_salt=salt))
    cluster.run_until_ended()
    cluster.run(1.2)


def test_the_router_knows_what_every_pool_holds_and_says_so_of_its_placements() -> None:
    cluster = SimCluster()
    cluster.run(1.5)
    serve(cluster, "a", range(20))
    for side in ("prefill", "decode"):
        there, really = known(cluster, side)
        assert there == really > 0
    serve(cluster, "b", [*range(16), 99, 98])
    serve(cluster, "other tenant", range(20), salt="x")
    assert cluster.router is not None
    found = {decision.request_id: decision.cached_tokens for decision in cluster.router.decisions}
    assert found == {"a": 0, "b": 16, "other tenant": 0}
    chain = chain_for(MODEL, "x", 4)
    ref = cluster.named("decode").ref
    assert cluster.router.kv_index.cached_tokens(ref, chain, range(20)) == 20


@pytest.mark.parametrize("kind", [KVEvents, KVSnapshotRequest, KVSnapshot])
@pytest.mark.parametrize("count", [1, 2])
def test_lost_words_are_healed_within_some_periods(kind: type, count: int) -> None:
    cluster = SimCluster()
    cluster.run(1.5)
    lost = 0

    def lose(envelope: Envelope) -> Sequence[int]:
        nonlocal lost
        is_first = isinstance(envelope.body, KVEvents) and lost < 1
        if is_first or (isinstance(envelope.body, kind) and lost < count):
            lost += 1
            return ()
        return (0,)

    cluster.filter = lose
    serve(cluster, "a", range(20))
    assert lost
    assert cluster.run(
        (3 + count) * cluster.times.list_period,
        lambda: all(len(set(known(cluster, side))) == 1 for side in ("prefill", "decode")),
    )


def test_a_new_router_learns_it_by_a_snapshot_and_a_new_life_begins_with_nothing() -> None:
    cluster = SimCluster()
    cluster.run(1.5)
    serve(cluster, "a", range(20))
    cluster.kill_router()
    cluster.listeners.clear()
    cluster.start_router()
    cluster.run(4.0)
    there, really = known(cluster, "prefill")
    assert there == really > 0
    old = cluster.named("decode")
    cluster.kill(old)
    fresh = cluster.start_worker("decode-0", (cluster.workers[1].worker.roles[0].role,))
    cluster.run(4.0)
    assert cluster.router is not None
    assert cluster.router.kv_index.num_values(old.ref) == 0
    assert cluster.router.kv_index.num_values(fresh.ref) == 0
