"""The supervisor starts again what is lost, at a pace that a broken worker cannot exhaust."""

from __future__ import annotations

from kvferry.cluster.supervisor import RestartPolicy, Supervisor
from kvferry.worker.messages import NodeRef

POLICY = RestartPolicy(first_pause_s=1.0, longest_pause_s=8.0, settled_s=60.0)


def test_a_lost_worker_is_due_once_after_a_pause() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.started("decode-0", NodeRef("decode-0", 3), 0.0)
    assert supervisor.lost(NodeRef("decode-0", 3), 100.0)
    assert supervisor.due(100.9) == []
    assert supervisor.due(101.0) == ["decode-0"]
    assert supervisor.due(200.0) == []
    assert supervisor.num_restarts("decode-0") == 1


def test_a_drained_worker_has_no_successor_and_one_of_an_earlier_life_is_not_retired() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.started("decode-0", NodeRef("decode-0", 3), 0.0)
    assert not supervisor.retired(NodeRef("decode-0", 2))
    assert supervisor.retired(NodeRef("decode-0", 3))
    assert not supervisor.retired(NodeRef("decode-0", 3))
    assert not supervisor.lost(NodeRef("decode-0", 3), 1.0)
    assert supervisor.due(1000.0) == []
    assert supervisor.alive() == []


def test_a_loss_reported_twice_or_of_an_earlier_life_changes_nothing() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.started("decode-0", NodeRef("decode-0", 3), 0.0)
    assert supervisor.lost(NodeRef("decode-0", 3), 1.0)
    assert not supervisor.lost(NodeRef("decode-0", 3), 1.5)
    supervisor.due(10.0)
    supervisor.started("decode-0", NodeRef("decode-0", 4), 11.0)
    assert not supervisor.lost(NodeRef("decode-0", 3), 12.0)
    assert supervisor.alive() == [NodeRef("decode-0", 4)]
    assert not supervisor.lost(NodeRef("nobody", 1), 12.0)


def test_pauses_double_up_to_the_longest_and_a_settled_life_begins_afresh() -> None:
    supervisor = Supervisor(POLICY)
    now, epoch, pauses = 0.0, 1, []
    for _ in range(6):
        supervisor.started("p", NodeRef("p", epoch), now)
        supervisor.lost(NodeRef("p", epoch), now + 1.0)
        now += 1.0
        pause = 0.0
        while not supervisor.due(now + pause):
            pause += 0.5
        pauses.append(pause)
        now += pause
        epoch += 1
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    supervisor.started("p", NodeRef("p", epoch), now)
    supervisor.lost(NodeRef("p", epoch), now + 61.0)
    assert supervisor.due(now + 62.0) == ["p"]


def test_a_failed_start_is_tried_again_later() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.started("p", NodeRef("p", 1), 0.0)
    supervisor.lost(NodeRef("p", 1), 1.0)
    assert supervisor.due(2.0) == ["p"]
    supervisor.failed_to_start("p", 3.0)
    assert supervisor.due(4.0) == []
    assert supervisor.due(5.0) == ["p"]


def test_a_worker_that_is_expected_is_due_at_once_and_its_first_start_is_no_restart() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.expect("decode-1", 5.0)
    assert supervisor.due(5.0) == ["decode-1"]
    supervisor.expect("decode-1", 6.0)  # known already
    assert supervisor.due(6.0) == []
    supervisor.started("decode-1", NodeRef("decode-1", 4), 7.0)
    assert supervisor.num_restarts("decode-1") == 0
    supervisor.lost(NodeRef("decode-1", 4), 8.0)
    assert supervisor.due(9.0) == ["decode-1"]
    assert supervisor.num_restarts("decode-1") == 1


def test_a_worker_that_is_forgotten_does_not_come_and_one_that_lives_is_not_forgotten() -> None:
    supervisor = Supervisor(POLICY)
    supervisor.expect("decode-1", 5.0)
    assert supervisor.forget("decode-1")
    assert supervisor.due(100.0) == []
    supervisor.failed_to_start("decode-1", 6.0)  # its start was on its way
    assert supervisor.due(100.0) == []
    supervisor.started("decode-0", NodeRef("decode-0", 3), 0.0)
    assert not supervisor.forget("decode-0")
    assert supervisor.alive() == [NodeRef("decode-0", 3)]
