"""The registry: load is what is placed on a worker's present life; ready means able to serve."""

from __future__ import annotations

import pytest

from kvferry.cluster.registry import WorkerRegistry
from kvferry.engine.request import RequestId
from kvferry.worker import messages as m
from kvferry.worker.messages import NodeRef, Role
from tests.cluster.routing import member

P0, P1, D0 = NodeRef("prefill-0", 1), NodeRef("prefill-1", 2), NodeRef("decode-0", 3)
C0 = NodeRef("colocated-0", 4)
A, B = RequestId("a"), RequestId("b")
ROLES = {P0: (Role.PREFILL,), P1: (Role.PREFILL,), D0: (Role.DECODE,)}
BOTH = (Role.PREFILL, Role.DECODE)


def registry(*refs: NodeRef) -> WorkerRegistry:
    made = WorkerRegistry()
    for ref in refs:
        made.add(member(ref, ROLES.get(ref, BOTH)), 5.0)
    return made


def tell_load(made: WorkerRegistry, ref: NodeRef, *peers: NodeRef, connected: bool = True) -> None:
    """The worker reports eight blocks, and its connections."""
    record = made.get(ref)
    assert record is not None
    states = tuple(m.PeerState(peer, "local", connected) for peer in peers)
    record.load = m.LoadReport(num_blocks=8, num_free_blocks=8, peers=states)


def test_every_change_of_membership_raises_the_version() -> None:
    made = registry()
    versions = [made.version]
    made.add(member(P0, (Role.PREFILL,)), 0.0)
    versions.append(made.version)
    made.add(member(D0, (Role.DECODE,)), 0.0)
    versions.append(made.version)
    assert made.remove(P0) is not None
    versions.append(made.version)
    assert versions == sorted(set(versions))
    assert made.remove(P0) is None
    assert made.version == versions[-1]


def test_a_worker_is_known_in_its_own_life_only() -> None:
    made = registry(P0)
    assert made.get(P0) is not None
    assert made.get(NodeRef("prefill-0", 9)) is None
    assert made.remove(NodeRef("prefill-0", 9)) is None


def test_older_lives_are_those_of_the_same_name_and_a_lower_epoch() -> None:
    lives = [NodeRef("prefill-0", epoch) for epoch in (1, 3, 5)]
    made = registry(*lives, P1, D0)
    assert made.older_lives(NodeRef("prefill-0", 5)) == lives[:2]
    assert made.older_lives(NodeRef("prefill-0", 1)) == []


def test_a_view_shows_what_is_placed_and_an_unknown_load_as_no_capacity() -> None:
    made = registry(P0, D0)
    made.count_prefill(A, P0, 9)
    made.count_prefill(B, P0, 5)
    made.count_decode(A, D0, 9)
    made.set_waiting(A, D0, waits=True)
    views = {view.ref: view for view in made.views()}
    assert views[P0].prefill_tokens == 14 and views[P0].decode_tokens == 0
    assert views[D0].decode_tokens == 9 and views[D0].has_waiting
    assert views[D0].capacity_tokens == 0
    tell_load(made, D0, P0)
    (view,) = [view for view in made.views() if view.ref == D0]
    assert view.capacity_tokens == 32
    assert view.connected_to == {P0}
    tell_load(made, D0, P0, connected=False)
    (view,) = [view for view in made.views() if view.ref == D0]
    assert view.connected_to == frozenset()


def test_a_prefill_counts_on_one_worker_at_a_time_and_once() -> None:
    made = registry(P0, P1)
    for _ in range(2):
        made.count_prefill(A, P0, 9)
    made.count_prefill(A, P1, 9)
    assert [view.prefill_tokens for view in made.views()] == [0, 9]
    made.uncount_prefill(A)
    made.uncount_prefill(A)
    assert [view.prefill_tokens for view in made.views()] == [0, 0]


def test_what_counted_on_a_dead_life_does_not_count_on_its_successor() -> None:
    made = registry(P0, D0)
    made.count_prefill(A, P0, 9)
    made.count_decode(A, D0, 9)
    successor = NodeRef("decode-0", 9)
    made.remove(D0)
    made.add(member(successor, (Role.DECODE,)), 0.0)
    made.uncount_decode(A, D0)
    made.count_prefill(A, D0, 9)  # to a life that is over: counts nowhere
    assert all(view.prefill_tokens == view.decode_tokens == 0 for view in made.views())


def test_only_the_request_that_waits_ends_the_wait() -> None:
    made = registry(D0)
    made.count_decode(A, D0, 9)
    made.count_decode(B, D0, 9)
    made.set_waiting(A, D0, waits=True)
    made.set_waiting(B, D0, waits=False)
    made.uncount_decode(B, D0)
    assert made.views()[0].has_waiting
    made.uncount_decode(A, D0)
    assert not made.views()[0].has_waiting
    made.set_waiting(A, NodeRef("gone", 1), waits=True)


# --- readiness ---------------------------------------------------------------------------------


def test_ready_means_both_roles_with_load_and_a_handshake_done() -> None:
    made = registry()
    assert made.not_ready_reasons() == ["no live prefill worker", "no live decode worker"]
    made = registry(P0, D0)
    tell_load(made, P0)
    assert made.not_ready_reasons() == ["no live decode worker"], "alive is: has told its load"
    tell_load(made, D0)
    assert made.not_ready_reasons() == ["no decode worker has connected to a prefill worker"]
    tell_load(made, D0, P0, connected=False)
    assert made.not_ready_reasons()
    tell_load(made, D0, P0)
    assert made.not_ready_reasons() == []


def test_a_handshake_with_a_life_that_is_over_is_none() -> None:
    made = registry(P0, D0)
    tell_load(made, P0)
    tell_load(made, D0, NodeRef("prefill-0", 99))
    assert made.not_ready_reasons() == ["no decode worker has connected to a prefill worker"]


@pytest.mark.parametrize(("gone", "reason"), [(P0, "prefill"), (D0, "decode")])
def test_not_ready_after_the_last_of_a_role_is_gone(gone: NodeRef, reason: str) -> None:
    made = registry(P0, D0)
    tell_load(made, P0)
    tell_load(made, D0, P0)
    made.remove(gone)
    assert made.not_ready_reasons() == [f"no live {reason} worker"]


def test_a_colocated_worker_is_ready_by_itself_once_its_load_is_known() -> None:
    made = registry(C0)
    assert made.not_ready_reasons()
    tell_load(made, C0)
    assert made.not_ready_reasons() == []
