"""Workers go where they fit; decode is spread, prefill packed; each place has its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.placement import (
    NodeView,
    Want,
    bundle_for,
    fits,
    place,
    share_threads,
)


def node(name: str, cpus: float, *roles: str, **custom: float) -> NodeView:
    return NodeView(name, f"10.0.0.{name}", {"CPU": cpus, **custom}, roles)


def wants(role: str, number: int, **bundle: float) -> list[Want]:
    return [Want(f"{role}-{at}", role, bundle or {"CPU": 1.0}) for at in range(number)]


def chosen(role: str, number: int, nodes: list[NodeView], **bundle: float) -> list[str | None]:
    wishes, _ = place(wants(role, number, **bundle), nodes)
    return [wish.node_id for wish in wishes]


def test_decode_workers_are_spread_and_prefill_workers_packed() -> None:
    nodes = [node("1", 4), node("2", 4), node("3", 4)]
    assert sorted(filter(None, chosen("decode", 3, nodes))) == ["1", "2", "3"]
    assert chosen("prefill", 3, nodes) == ["1", "1", "1"]


def test_a_decode_worker_avoids_its_like_before_others() -> None:
    nodes = [node("1", 9, "decode"), node("2", 2, "prefill", "prefill")]
    assert chosen("decode", 1, nodes) == ["2"]
    (wish,), _ = place(wants("decode", 1), nodes)
    assert wish.why == "decode workers are spread: no other decode there"


def test_a_node_that_lacks_something_is_none_and_the_only_one_left_is_said() -> None:
    nodes = [node("1", 8), node("2", 1, GPU=1)]
    (wish,), _ = place(wants("decode", 1, CPU=1, GPU=1), nodes)
    assert (wish.node_id, wish.why) == ("2", "the only node with 1 CPU, 1 GPU free")
    (wish,), _ = place(wants("decode", 1, TPU=1), nodes)
    assert (wish.node_id, wish.why) == (None, "no node had 1 TPU free: Ray placed it later")


def shared(workers: int, nodes: list[NodeView], **resources: float) -> int:
    return share_threads({"decode": workers}, {}, {"decode": resources}, nodes)["decode"]


@pytest.mark.parametrize(
    ("workers", "cpus", "threads"),
    [(2, [4], 2), (3, [4], 1), (3, [4, 4], 2), (3, [3, 3], 1), (1, [16], 16), (5, [2], 1)],
)
def test_threads_are_the_most_with_which_all_fit(
    workers: int, cpus: list[float], threads: int
) -> None:
    assert shared(workers, [node(str(at), cpu) for at, cpu in enumerate(cpus)]) == threads


@given(st.integers(1, 12), st.lists(st.integers(0, 16), min_size=1, max_size=5))
def test_what_the_threads_make_fits_wherever_one_thread_each_would(
    workers: int, cpus: list[int]
) -> None:
    nodes = [node(str(at), cpu) for at, cpu in enumerate(cpus)]
    threads = shared(workers, nodes)
    placed = chosen("decode", workers, nodes, CPU=threads)
    if sum(cpus) >= workers:
        assert None not in placed
    assert threads == 1 or sum(cpu // (threads + 1) for cpu in cpus) < workers


def test_a_large_node_that_a_role_cannot_go_to_lends_it_no_threads() -> None:
    nodes = [node("1", 31), node("2", 16, P=1), node("3", 4, D=1)]
    resources = {"prefill": {"P": 1.0}, "decode": {"D": 1.0}}
    counts = {"prefill": 1, "decode": 1}
    assert share_threads(counts, {}, resources, nodes) == {"prefill": 4, "decode": 4}
    told = share_threads(counts, {"decode": 2}, resources, nodes)
    assert told == {"prefill": 16, "decode": 2}
    assert share_threads(counts, {}, {**resources, "decode": {"E": 1.0}}, nodes) == {
        "prefill": 1,
        "decode": 1,
    }


@given(
    st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 3)), max_size=12),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_no_node_is_promised_more_than_it_has(
    workers: list[tuple[str, int]], cpus: list[int]
) -> None:
    nodes = [node(str(at), cpu) for at, cpu in enumerate(cpus)]
    asked = [Want(f"w{at}", role, {"CPU": cpu}) for at, (role, cpu) in enumerate(workers)]
    wishes, after = place(asked, nodes)
    assert all(view.free["CPU"] >= 0 for view in after)
    assert sum(view.free["CPU"] for view in after) == sum(cpus) - sum(
        wish.want.bundle["CPU"] for wish in wishes if wish.node_id is not None
    )
    for wish in wishes:
        if wish.node_id is None:
            assert not any(fits(wish.want.bundle, view.free) for view in after)


def test_a_role_with_its_own_threads_leaves_the_rest_to_the_others() -> None:
    nodes = [node("1", 8), node("2", 8)]
    counts = {"prefill": 1, "decode": 4}
    assert share_threads(counts, {}, {}, nodes) == {"prefill": 2, "decode": 2}
    assert share_threads(counts, {"prefill": 8}, {}, nodes) == {"prefill": 8, "decode": 2}
    free = {"prefill": {"CPU": 0.0}}
    assert share_threads(counts, {"prefill": 8}, free, nodes) == {"prefill": 8, "decode": 4}


def test_a_bundle_is_a_cpu_per_thread_unless_resources_say_otherwise() -> None:
    assert bundle_for({}, 4) == {"CPU": 4}
    assert bundle_for({"GPU": 1, "CPU": 2}, 4) == {"CPU": 2, "GPU": 1}
    assert bundle_for({"CPU": 0, "kvferry_decode": 1}, 4) == {"kvferry_decode": 1}
