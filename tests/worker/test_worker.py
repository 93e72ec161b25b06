"""The worker: who lives, who is told what, and that the unknown leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.request import RequestId
from kvferry.kv_cache.audit import BlockClass, Owner, OwnerKind
from kvferry.kv_transfer.choosing import ONLY_ONE
from kvferry.kv_transfer.connector import BlockRef, Move
from kvferry.kv_transfer.local import LocalFabric
from kvferry.prefill_worker.role import PrefillRole
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope, Leg, NodeRef, Role
from kvferry.worker.worker import WorkerTimes
from tests.fakes import ATTEMPT, stub_spec
from tests.worker.making import (
    ROUTER,
    MadeWorker,
    RecordingRole,
    Sender,
    attach,
    make_worker,
    member,
    membership,
)
from tests.worker.message_types import BODIES, values

OWN = NodeRef("decode-0", 5)
P0, P1 = NodeRef("prefill-0", 6), NodeRef("prefill-1", 7)
TIMES = WorkerTimes(list_period=1.0, heartbeat=0.5, heartbeat_timeout=1.5)
R = RequestId("r")


def started(*roles: RecordingRole) -> tuple[MadeWorker, Sender]:
    made = make_worker(LocalFabric(), OWN, (Role.DECODE,), times=TIMES)
    attach(made, *roles)
    return made, Sender(made.worker)


def prefill_member(ref: NodeRef) -> m.Member:
    return member(ref, (Role.PREFILL,))


# --- membership --------------------------------------------------------------------------------


def test_a_membership_introduces_its_router_and_its_members() -> None:
    made, router = started()
    router.send(membership(made.member, prefill_member(P0), address="tcp://there"))
    worker = made.worker
    assert set(worker.members) == {P0}, "a worker is no peer of its own"
    assert worker.address_of(ROUTER) == "tcp://there"
    assert worker.address_of(P0) == "tcp://prefill-0"
    assert worker.address_of(NodeRef(P0.node_id, P0.epoch + 1)) is None
    assert worker.address_of(NodeRef(ROUTER.node_id, ROUTER.epoch + 1)) is None
    assert [e.receiver for e in worker.heartbeats()] == [ROUTER]


def test_memberships_that_come_out_of_order_leave_the_newest_in_force() -> None:
    made, router = started()
    router.send(membership(prefill_member(P0), prefill_member(P1), version=5))
    router.send(membership(version=4))
    router.send(membership(prefill_member(P0), version=3))
    assert set(made.worker.members) == {P0, P1}
    (beat,) = made.worker.heartbeats()
    assert isinstance(beat.body, m.WorkerHeartbeat)
    assert beat.body.load.membership_version == 5
    router.send(membership(prefill_member(P1), version=6))
    assert set(made.worker.members) == {P1}


def test_a_member_of_an_older_life_is_ignored_and_a_newer_one_replaces_it() -> None:
    role = RecordingRole()
    made, router = started(role)
    newer, older = NodeRef(P0.node_id, P0.epoch + 1), NodeRef(P0.node_id, P0.epoch - 1)
    router.send(membership(prefill_member(P0), version=1))
    router.send(membership(prefill_member(P0), prefill_member(older), version=2))
    assert set(made.worker.members) == {P0}
    router.send(membership(prefill_member(P0), prefill_member(newer), version=3))
    assert set(made.worker.members) == {newer}
    assert role.dropped_peers == [P0]
    made.worker.deliver(Envelope(P0, OWN, 1, 0, m.PullRefused(R, ATTEMPT)), 0.0)
    assert made.worker.channels.refused == {"sender": 1}


def test_a_member_that_leaves_is_dropped_once_and_refused_from_then_on() -> None:
    role = RecordingRole(takes=(m.LeaseEnded,))
    made, router = started(role)
    peer = Sender(made.worker, P0)
    router.send(membership(prefill_member(P0), version=1))
    peer.send(m.LeaseEnded(R, ATTEMPT))
    assert len(role.handled) == 1
    router.send(membership(version=2))
    router.send(membership(version=3))
    assert role.dropped_peers == [P0]
    peer.send(m.LeaseEnded(R, ATTEMPT))
    assert len(role.handled) == 1
    assert made.worker.load().stale_refused == 1


def test_a_member_stays_while_any_router_lists_it() -> None:
    role = RecordingRole()
    made, router = started(role)
    second = Sender(made.worker, NodeRef("router-1", 9))
    router.send(membership(prefill_member(P0), version=3))
    second.send(membership(prefill_member(P0), prefill_member(P1), version=1))
    router.send(membership(version=4))
    assert set(made.worker.members) == {P0, P1}
    second.send(membership(version=2))
    assert made.worker.members == {}
    assert sorted(ref.node_id for ref in role.dropped_peers) == ["prefill-0", "prefill-1"]
    assert {e.receiver for e in made.worker.heartbeats()} == {ROUTER, second.ref}


# --- routers -----------------------------------------------------------------------------------


def test_a_router_that_is_heard_lives_and_a_silent_one_is_dropped_with_its_members() -> None:
    role = RecordingRole()
    made, router = started(role)
    router.send(membership(prefill_member(P0)), now=0.0)
    for second in range(1, 5):
        router.send(m.RouterHeartbeat(), now=float(second))
        made.worker.tick(second + 1.4)
    assert role.dropped_routers == []
    made.worker.tick(5.6)
    assert role.dropped_routers == [ROUTER]
    assert role.dropped_peers == [P0]
    assert made.worker.heartbeats() == []
    made.worker.tick(9.0)
    assert role.dropped_routers == [ROUTER]


def test_any_message_of_a_router_shows_that_it_lives_and_no_message_of_another_does() -> None:
    role = RecordingRole()
    made, router = started(role)
    other = Sender(made.worker, NodeRef("router-1", 3))
    router.send(membership(), now=0.0)
    other.send(membership(), now=0.0)
    router.send(m.AuditRequest(1), now=1.4)
    made.worker.tick(1.6)
    assert role.dropped_routers == [other.ref]


def test_a_router_that_was_dropped_is_refused_until_it_introduces_itself_again() -> None:
    made, router = started(RecordingRole())
    router.send(membership(prefill_member(P0), version=7), now=0.0)
    made.worker.tick(2.0)
    router.send(m.AuditRequest(1), now=2.0)
    assert made.sent(m.AuditReport) == []
    assert made.worker.channels.refused == {"sender": 1}
    router.send(membership(prefill_member(P0), version=7), now=2.1)
    router.send(m.AuditRequest(2), now=2.2)
    assert len(made.sent(m.AuditReport)) == 1
    assert set(made.worker.members) == {P0}


def test_a_new_life_of_a_router_replaces_the_old_one_whatever_its_version() -> None:
    role = RecordingRole(takes=(m.WantedList,))
    made, old = started(role)
    old.send(membership(prefill_member(P0), version=9))
    new = Sender(made.worker, NodeRef(ROUTER.node_id, ROUTER.epoch + 1))
    new.send(membership(prefill_member(P1), version=1, address="tcp://new"))
    assert role.dropped_routers == [ROUTER]
    assert set(made.worker.members) == {P1}
    assert made.worker.address_of(ROUTER) is None
    assert made.worker.address_of(new.ref) == "tcp://new"
    old.send(m.WantedList(()))
    old.send(membership(prefill_member(P0), version=10))
    assert role.handled == []
    assert set(made.worker.members) == {P1}
    assert role.dropped_routers == [ROUTER]


def test_messages_before_any_introduction_are_refused() -> None:
    role = RecordingRole(takes=BODIES)
    made, router = started(role)
    router.send(m.Reserve(stub_spec("r", [1], 1), ATTEMPT))
    assert role.handled == []
    assert made.worker.outbox == made.worker.outbox.__class__()
    assert made.worker.channels.refused == {"sender": 1}


# --- lists, load, refusals ---------------------------------------------------------------------


def test_every_wanted_list_is_answered_with_all_that_is_held_even_nothing() -> None:
    item = m.HeldItem(R, ATTEMPT, Leg.DECODE, m.LegState.RUNNING, 0, 3, 8)
    role = RecordingRole(takes=(m.WantedList,), items=[])
    made, router = started(role)
    router.send(membership())
    router.send(m.WantedList(()))
    role.items.append(item)
    router.send(m.WantedList(()))
    assert [e.body for e in made.sent()] == [m.HeldList(()), m.HeldList((item,))]


def test_what_is_held_is_told_every_period_and_silence_is_kept_when_nothing_is() -> None:
    item = m.HeldItem(R, ATTEMPT, Leg.DECODE, m.LegState.RUNNING)
    role = RecordingRole()
    made, router = started(role)
    router.send(membership(), now=10.0)
    made.worker.tick(10.0)
    assert made.sent() == []
    role.items.append(item)
    times = [10.5, 11.0, 11.4, 11.9, 12.0, 12.5]
    told = []
    for now in times:
        router.send(m.RouterHeartbeat(), now=now)
        made.worker.tick(now)
        told += [now for _ in made.sent(m.HeldList)]
    assert told == [11.0, 12.0]
    assert role.ticks == [10.0, *times], "roles are driven every time"


def test_a_message_that_no_role_takes_is_counted_by_its_name() -> None:
    made, router = started(RecordingRole(takes=(m.Replay,)), RecordingRole())
    router.send(membership())
    router.send(m.LeaseEnded(R, ATTEMPT))
    router.send(m.Replay(R, ATTEMPT, 0))
    assert made.worker.channels.refused == {"LeaseEnded": 1}
    assert made.worker.load().stale_refused == 1


def test_every_role_sees_each_message_and_adds_to_the_load() -> None:
    first, second = RecordingRole(takes=(m.Replay,)), RecordingRole(takes=(m.Replay,))
    made, router = started(first, second)
    router.send(membership())
    router.send(m.Replay(R, ATTEMPT, 0))
    assert len(first.handled) == len(second.handled) == 1
    load = made.worker.load()
    assert load.num_reserved == 2
    assert (load.num_blocks, load.num_free_blocks) == (16, 16)
    made.pool.allocate(3)
    assert made.worker.load().num_free_blocks == 13


def test_waiting_tokens_are_reported_as_queued() -> None:
    made, _ = started()
    made.worker.engine.new_sequence(stub_spec("r", range(30), 2), ATTEMPT, _Nobody())
    load = made.worker.load()
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 1, 30)
    assert made.worker.has_work
    assert made.worker.step()
    load = made.worker.load()
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (1, 0, 22)


class _Nobody:
    """Owner of a sequence that nobody listens to."""

    def on_progress(self, progress: object, now: float) -> None:
        pass

    def on_failure(self, failure: object, now: float) -> None:
        raise AssertionError(failure)


# --- peers -------------------------------------------------------------------------------------


def test_a_decode_worker_opens_the_prefill_workers_and_says_so() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.DECODE,), times=TIMES)
    attach(made, RecordingRole(Role.DECODE))
    source = make_worker(fabric, P0, (Role.PREFILL,))
    other = make_worker(fabric, NodeRef("decode-1", 8), (Role.DECODE,))
    Sender(made.worker).send(membership(made.member, source.member, other.member))
    assert list(made.worker.peers) == [P0]
    assert made.worker.load().peers == (m.PeerState(P0, "local", True, reason=ONLY_ONE),)


def test_a_prefill_worker_opens_nobody() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, P1, (Role.PREFILL,))
    attach(made, RecordingRole(Role.PREFILL))
    source = make_worker(fabric, P0, (Role.PREFILL,))
    Sender(made.worker).send(membership(made.member, source.member))
    assert made.worker.peers == {}
    assert made.worker.load().peers == ()


def test_a_source_that_is_not_there_yet_is_tried_again_every_period() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.DECODE,), times=TIMES)
    attach(made, RecordingRole(Role.DECODE))
    router = Sender(made.worker)
    planned = replace(
        prefill_member(P0), peer_info=replace(prefill_member(P0).peer_info, address="local:later")
    )
    router.send(membership(planned), now=0.0)
    (state,) = made.worker.load().peers
    assert not state.connected and "local:later" in state.error
    source = make_worker(fabric, P0, (Role.PREFILL,))
    fabric.register(replace(source.connector.local_info(), address="local:later"), source.memory)
    made.worker.tick(0.0)
    (state,) = made.worker.load().peers
    assert state == m.PeerState(P0, "local", True, reason=ONLY_ONE)


def test_an_incompatible_source_is_named_with_both_values_and_not_tried_again() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.DECODE,), times=TIMES)
    attach(made, RecordingRole(Role.DECODE))
    source = make_worker(fabric, P0, (Role.PREFILL,), model="other@2")
    router = Sender(made.worker)
    router.send(membership(source.member), now=0.0)
    for now in (1.0, 2.0):
        router.send(m.RouterHeartbeat(), now=now)
        made.worker.tick(now)
    (state,) = made.worker.load().peers
    assert not state.connected
    assert "other@2" in state.error and "stub@1" in state.error
    successor = make_worker(fabric, NodeRef(P0.node_id, P0.epoch + 1), (Role.PREFILL,))
    router.send(membership(successor.member, version=2), now=2.0)
    assert made.worker.load().peers == (
        m.PeerState(successor.member.ref, "local", True, reason=ONLY_ONE),
    )


def test_the_connection_to_a_member_that_leaves_is_closed() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.DECODE,), times=TIMES)
    attach(made, RecordingRole(Role.DECODE))
    source = make_worker(fabric, P0, (Role.PREFILL,))
    router = Sender(made.worker)
    router.send(membership(source.member))
    peer: Any = made.worker.peers[P0]
    router.send(membership(version=2))
    assert made.worker.peers == {} and not peer.is_open


# --- the audit ---------------------------------------------------------------------------------


def test_an_audit_counts_every_owner_and_goes_to_who_asked() -> None:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.DECODE,), times=TIMES)
    source = make_worker(fabric, P0, (Role.PREFILL,))
    role = RecordingRole()
    attach(made, role)
    router = Sender(made.worker)
    router.send(membership(source.member))
    held, target = made.pool.allocate(2)
    role.blocks = [
        Owner(OwnerKind.REQUEST, held, "r", 2),
        Owner(OwnerKind.REQUEST, target, "r", 2),
    ]
    (block,) = source.pool.allocate(1)
    move = Move(BlockRef(P0.epoch, block, 1), target, 4, None)
    made.worker.reads.start(made.worker.peers[P0], [move], "r", 2, lambda result, now: None)
    made.pool.release([target])
    role.blocks.pop()
    made.sent()

    router.send(m.AuditRequest(41))
    (answer,) = made.sent()
    assert answer.receiver == ROUTER
    report = answer.body
    assert isinstance(report, m.AuditReport)
    assert (report.query_id, report.block_size, report.block_bytes) == (41, 4, 32)
    counts = dict(report.counts)
    assert set(counts) == {c.value for c in BlockClass}
    assert counts["referenced"] == counts["in_transfer"] == 1
    assert sum(counts.values()) == 16
    assert report.problems == ()
    blocks = {b.block_id: b for b in report.blocks}
    assert blocks.keys() == {held, target}
    assert blocks[held].block_class == "referenced" and blocks[held].ref_count == 1
    assert blocks[target].owners == (m.OwnerReport("writer", "r", 2, "prefill-0", None),)
    assert blocks[target].generation == 1


def test_an_audit_names_a_block_that_no_role_answers_for() -> None:
    made, router = started(RecordingRole())
    router.send(membership())
    (leaked,) = made.pool.allocate(1)
    router.send(m.AuditRequest(1))
    (answer,) = made.sent()
    assert isinstance(answer.body, m.AuditReport)
    assert any(f"block {leaked} leaked" in problem for problem in answer.body.problems)


# --- the unknown -------------------------------------------------------------------------------


def with_both_roles() -> tuple[MadeWorker, PrefillRole, DecodeRole]:
    fabric = LocalFabric()
    made = make_worker(fabric, OWN, (Role.PREFILL, Role.DECODE), times=TIMES)
    prefill, decode = PrefillRole(made.worker), DecodeRole(made.worker)
    attach(made, prefill, decode)
    source = make_worker(fabric, P0, (Role.PREFILL,))
    Sender(made.worker).send(membership(made.member, source.member, prefill_member(P1)))
    made.sent()
    return made, prefill, decode


NO_BEGINNING = [b for b in BODIES if b not in (m.Membership, m.PrefillRequest, m.Reserve)]


@pytest.mark.parametrize("body", NO_BEGINNING, ids=lambda body: str(body.__name__))
@pytest.mark.parametrize("sender", [ROUTER, P0], ids=["router", "peer"])
def test_a_message_about_something_unknown_creates_no_state(
    body: type[Any], sender: NodeRef
) -> None:
    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(values(body), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
    def check(message: Any, seq: int, heard: int) -> None:
        made, prefill, decode = with_both_roles()
        made.worker.deliver(Envelope(sender, OWN, seq, heard, message), 0.1)
        made.worker.tick(0.2)
        made.worker.step()
        assert not prefill.jobs and not len(prefill.leases) and not decode.legs
        assert not made.worker.engine.scheduler.sequences
        assert not len(made.worker.reads)
        assert made.pool.num_free == made.pool.num_blocks
        answers = {type(e.body) for e in made.sent()}
        assert answers <= {m.PullRefused, m.HeldList, m.AuditReport}

    check()


def test_an_announcement_of_an_unknown_request_is_refused_to_its_sender() -> None:
    made, _, decode = with_both_roles()
    Sender(made.worker, P0).send(m.Announce(R, ATTEMPT, ()))
    (answer,) = made.sent()
    assert (answer.receiver, answer.body) == (P0, m.PullRefused(R, ATTEMPT))
    assert decode.legs == {}
