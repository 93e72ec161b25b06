"""Placement from a snapshot: the least loaded pair that can work together, or nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.policy import LeastLoaded, Placement, WorkerView
from kvferry.worker.messages import NodeRef, Role

PREFILL, DECODE = (Role.PREFILL,), (Role.DECODE,)
BOTH = (Role.PREFILL, Role.DECODE)
WINDOW = 100
POLICY = LeastLoaded(WINDOW)


def prefill(name: str, tokens: int = 0, capacity: int = 1000) -> WorkerView:
    return WorkerView(NodeRef(name, 1), PREFILL, capacity, tokens, 0, False, frozenset())


def decode(
    name: str,
    sources: Iterable[WorkerView],
    tokens: int = 0,
    capacity: int = 1000,
    waits: bool = False,
) -> WorkerView:
    connected = frozenset(view.ref for view in sources)
    return WorkerView(NodeRef(name, 2), DECODE, capacity, 0, tokens, waits, connected)


def colocated(name: str, prefill_tokens: int = 0, decode_tokens: int = 0) -> WorkerView:
    return WorkerView(
        NodeRef(name, 3), BOTH, 1000, prefill_tokens, decode_tokens, False, frozenset()
    )


def names(placement: Placement | None) -> tuple[str | None, str | None]:
    if placement is None:
        return (None, None)
    source = placement.prefill
    return (source.node_id if source is not None else None, placement.decode.node_id)


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    sources = [prefill("p0", 30), prefill("p1", 10), prefill("p2", 20)]
    readers = [decode("d0", sources, 500), decode("d1", sources, 600), decode("d2", sources, 400)]
    assert names(POLICY.place(10, [*sources, *readers])) == ("p1", "d2")


def test_load_of_decode_is_measured_against_the_size_of_its_pool() -> None:
    source = prefill("p0")
    small, large = decode("d0", [source], 50, 100), decode("d1", [source], 300, 1000)
    assert names(POLICY.place(10, [source, small, large])) == ("p0", "d1")


@given(st.permutations(["a", "b", "c"]), st.permutations(["x", "y", "z"]))
def test_ties_go_by_name_whatever_the_order_of_the_snapshot(
    sources: list[str], readers: list[str]
) -> None:
    views = [prefill(name) for name in sources]
    views += [decode(name, views[:3]) for name in readers]
    assert names(POLICY.place(10, views)) == ("a", "x")


def test_unknown_load_never_reads_as_idle() -> None:
    """A worker that has not reported has capacity 0."""
    busy, silent = prefill("p0", 90), prefill("p1", 0, capacity=0)
    readers = [decode("d0", [busy, silent], 900), decode("d1", [busy, silent], 0, capacity=0)]
    assert names(POLICY.place(10, [busy, silent, *readers])) == ("p0", "d0")
    assert POLICY.place(10, [silent, *readers]) is None
    assert POLICY.place(10, [busy, readers[1]]) is None


def test_a_decode_worker_where_somebody_waits_for_blocks_is_not_eligible() -> None:
    source = prefill("p0")
    full, other = decode("d0", [source], waits=True), decode("d1", [source], 999)
    assert names(POLICY.place(10, [source, full, other])) == ("p0", "d1")
    assert POLICY.place(10, [source, full]) is None


def test_only_a_source_that_the_reader_has_opened_is_chosen() -> None:
    far, near = prefill("p0"), prefill("p1", 50)
    reader = decode("d0", [near])
    assert names(POLICY.place(10, [far, near, reader])) == ("p1", "d0")
    assert POLICY.place(10, [far, reader]) is None


def test_a_reader_without_any_source_is_passed_over_for_a_busier_one_with_one() -> None:
    source = prefill("p0")
    lonely, busy = decode("d0", []), decode("d1", [source], 900)
    assert names(POLICY.place(10, [source, lonely, busy])) == ("p0", "d1")


def test_another_life_of_the_source_is_another_source() -> None:
    old = prefill("p0")
    reader = decode("d0", [old])
    assert POLICY.place(10, [replace(old, ref=NodeRef("p0", 9)), reader]) is None


@pytest.mark.parametrize(
    ("outstanding", "tokens", "placed"),
    [(0, 50, True), (0, 5000, True), (60, 40, True), (60, 41, False), (101, 1, False)],
)
def test_the_window_bounds_what_a_prefill_worker_holds_beyond_what_it_runs(
    outstanding: int, tokens: int, placed: bool
) -> None:
    """A prompt larger than the window is taken by a worker with nothing outstanding."""
    source = prefill("p0", outstanding)
    assert (POLICY.place(tokens, [source, decode("d0", [source])]) is not None) == placed
    alone = colocated("c0", prefill_tokens=outstanding)
    assert (POLICY.place(tokens, [alone]) is not None) == placed


def test_the_choice_after_a_wait_for_blocks_is_not_held_up_by_the_window() -> None:
    source = prefill("p0", WINDOW)
    reader = decode("d0", [source])
    views = [source, reader]
    assert POLICY.choose_prefill(10, reader.ref, views, windowed=True) is None
    assert POLICY.choose_prefill(10, reader.ref, views, windowed=False) == source.ref
    assert POLICY.choose_prefill(10, NodeRef("gone", 1), views, windowed=False) is None


def test_a_colocated_worker_computes_the_prompt_where_it_decodes() -> None:
    assert names(POLICY.place(10, [colocated("c1", 0, 5), colocated("c0", 0, 9)])) == (None, "c1")


def test_a_colocated_worker_without_room_leaves_the_request_to_a_pair() -> None:
    source = prefill("p0")
    views = [colocated("c0", WINDOW), source, decode("d0", [source], 999)]
    assert names(POLICY.place(10, views)) == ("p0", "d0")


def test_nobody_is_chosen_from_nobody_or_from_one_role_alone() -> None:
    assert POLICY.place(10, []) is None
    assert POLICY.place(10, [prefill("p0")]) is None
    assert POLICY.place(10, [decode("d0", [])]) is None


views = st.builds(
    WorkerView,
    st.builds(NodeRef, st.sampled_from("abcdef"), st.integers(1, 2)),
    st.sampled_from([PREFILL, DECODE, BOTH]),
    st.sampled_from([0, 100, 1000]),
    st.integers(0, 150),
    st.integers(0, 1000),
    st.booleans(),
    st.frozensets(st.builds(NodeRef, st.sampled_from("abcdef"), st.integers(1, 2))),
)


@given(st.integers(1, 200), st.lists(views, max_size=6, unique_by=lambda view: view.ref.node_id))
def test_whatever_is_placed_is_eligible_and_the_same_snapshot_gives_the_same_answer(
    tokens: int, snapshot: list[WorkerView]
) -> None:
    placement = POLICY.place(tokens, snapshot)
    assert POLICY.place(tokens, list(reversed(snapshot))) == placement
    if placement is None:
        return
    chosen = {view.ref: view for view in snapshot}
    reader = chosen[placement.decode]
    computes = chosen[placement.prefill or placement.decode]
    assert Role.DECODE in reader.roles and Role.PREFILL in computes.roles
    assert reader.capacity_tokens and computes.capacity_tokens and not reader.has_waiting
    assert computes is reader or computes.ref in reader.connected_to
    assert not computes.prefill_tokens or computes.prefill_tokens + tokens <= WINDOW
