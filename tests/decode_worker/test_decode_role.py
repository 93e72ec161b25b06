"""The decode role: all or nothing, nobody overtakes, exactly once, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.request import Attempt, RequestId
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.worker import messages as m
from kvferry.worker.messages import FailureCause, Leg, LegState, NodeRef, ReserveOutcome
from tests.decode_worker.bench import OTHER, SOURCE, DecodeBench
from tests.fakes import ATTEMPT, stub_output, stub_spec
from tests.worker.making import ROUTER, Sender, membership

R = RequestId("r")
GRANTED, FULL = ReserveOutcome.GRANTED, ReserveOutcome.FULL
LATER = Attempt(1, 2)


def replies(bench: DecodeBench) -> list[tuple[str, ReserveOutcome]]:
    """Answers to reservations since the last call."""
    return [
        (body.request_id, body.outcome)
        for body in bench.sent(m.ReserveReply)
        if isinstance(body, m.ReserveReply)
    ]


def failures(bench: DecodeBench) -> list[tuple[str, int, FailureCause]]:
    """Failures told since the last call: (request, attempt, cause)."""
    return [
        (body.request_id, body.attempt.number, body.cause)
        for body in bench.sent(m.LegFailed)
        if isinstance(body, m.LegFailed)
    ]


# --- reserving ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (16, 4)])
def test_a_grant_holds_every_block_of_the_prompt_and_no_more(length: int, blocks: int) -> None:
    bench = DecodeBench()
    bench.reserve(length=length, max_tokens=40)
    assert replies(bench) == [("r", GRANTED)]
    table = bench.leg().table
    assert table is not None and len(table.block_ids) == blocks
    assert bench.made.pool.num_free == 16 - blocks
    assert bench.made.worker.load().num_reserved == 1


def test_a_full_pool_keeps_a_place_and_no_block() -> None:
    bench = DecodeBench(num_blocks=4)
    bench.reserve("a", 12)
    bench.reserve("b", 8)
    assert replies(bench) == [("a", GRANTED), ("b", FULL)]
    assert bench.made.pool.num_free == 1, "all or nothing"
    assert bench.leg("b").table is None
    assert bench.made.worker.load().num_full == 1


def test_the_same_reservation_twice_is_one_and_is_answered_twice() -> None:
    bench = DecodeBench()
    for _ in range(2):
        bench.reserve()
    assert replies(bench) == [("r", GRANTED), ("r", GRANTED)]
    assert len(bench.role.legs) == 1
    assert bench.made.pool.num_free == 13


def test_nobody_overtakes_a_large_request_that_waits_for_blocks() -> None:
    bench = DecodeBench(num_blocks=6)
    bench.reserve("a", 12)
    bench.reserve("large", 16)
    bench.reserve("small", 4)
    bench.step()
    assert replies(bench) == [("a", GRANTED), ("large", FULL), ("small", FULL)]
    bench.tell(m.CancelLeg(RequestId("a"), ATTEMPT, Leg.DECODE))
    bench.step()
    assert replies(bench) == [("large", GRANTED), ("small", GRANTED)]


def test_a_place_that_is_given_up_lets_the_next_one_in() -> None:
    bench = DecodeBench(num_blocks=6)
    bench.reserve("a", 12)
    bench.reserve("large", 16)
    bench.reserve("small", 4)
    bench.made.sent()
    bench.tell(m.CancelLeg(RequestId("large"), ATTEMPT, Leg.DECODE))
    bench.step()
    assert replies(bench) == [("small", GRANTED)]


def test_freed_blocks_go_first_to_what_was_preempted_here() -> None:
    bench = DecodeBench(num_blocks=5)
    bench.reserve("a", 4, 12, here=True)
    bench.reserve("b", 4, 12, here=True)
    preempted = False
    for _ in range(40):
        if bench.made.worker.engine.scheduler.has_preempted and not preempted:
            preempted = True
            bench.reserve("c", 4)
        bench.step()
        if bench.made.worker.engine.scheduler.has_preempted:
            assert ("c", GRANTED) not in replies(bench)
    assert preempted
    for name in ("a", "b"):
        assert bench.leg(name).branches[0].output == stub_output(range(4), 12)


def test_the_watermark_stays_free_unless_the_pool_is_idle() -> None:
    bench = DecodeBench(num_blocks=10, scheduler=SchedulerConfig(8, 32, 8, 0.3))
    bench.reserve("a", 24)
    bench.reserve("b", 8)
    assert replies(bench) == [("a", GRANTED), ("b", FULL)]
    bench.tell(m.CancelLeg(RequestId("b"), ATTEMPT, Leg.DECODE))
    bench.tell(m.CancelLeg(RequestId("a"), ATTEMPT, Leg.DECODE))
    bench.reserve("c", 40, 1)
    assert replies(bench) == [("c", GRANTED)], "one that needs all of an idle pool gets it"


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    bench = DecodeBench(num_blocks=4)
    bench.reserve(length=10, max_tokens=8)  # 17 positions
    (body,) = bench.sent()
    assert isinstance(body, m.LegFailed) and body.cause is FailureCause.SHAPE
    assert "17 positions need 5 blocks, this worker has 4" in body.message
    assert bench.is_empty()
    bench.reserve("fits", 10, 7)  # the last token has no KV
    assert replies(bench) == [("fits", GRANTED)]


# --- attempts ----------------------------------------------------------------------------------


def test_a_newer_attempt_replaces_the_older_one_and_not_the_reverse() -> None:
    bench = DecodeBench()
    bench.reserve(attempt=ATTEMPT)
    bench.reserve(attempt=LATER)
    assert [key[1] for key in bench.role.legs] == [LATER]
    bench.made.sent()
    bench.reserve(attempt=ATTEMPT)
    assert failures(bench) == [("r", 1, FailureCause.ENDED)]
    assert [key[1] for key in bench.role.legs] == [LATER]
    assert bench.made.pool.num_free == 13


def test_an_older_attempt_that_was_never_here_does_not_replace_a_newer_one() -> None:
    bench = DecodeBench()
    bench.reserve(attempt=LATER)
    bench.reserve(attempt=ATTEMPT)
    assert failures(bench) == [("r", 1, FailureCause.ENDED)]
    assert [key[1] for key in bench.role.legs] == [LATER]


def test_an_attempt_that_has_ended_does_not_begin_again() -> None:
    bench = DecodeBench()
    bench.reserve()
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    bench.made.sent()
    bench.reserve()
    assert failures(bench) == [("r", 1, FailureCause.ENDED)]
    assert bench.is_empty()
    bench.reserve(attempt=LATER)
    assert replies(bench) == [("r", GRANTED)]


def test_a_cancel_that_comes_before_its_reservation_wins() -> None:
    """The two may be repeated by lists in any order."""
    bench = DecodeBench()
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    bench.reserve()
    assert failures(bench) == [("r", 1, FailureCause.ENDED)]
    assert bench.is_empty()


def test_a_retry_continues_behind_the_suffix_and_reports_only_its_own_tokens() -> None:
    bench = DecodeBench()
    whole = stub_output(range(6), 7)
    spec = stub_spec("r", range(6), 7, whole[:3])
    bench.tell(m.Reserve(spec, LATER))
    table = bench.leg().table
    assert table is not None and len(table.block_ids) == 3, "prompt and suffix are KV"
    bench.announce(spec, 0, 1, 2, hand_off=True, attempt=LATER)
    bench.step(12)
    events = bench.tokens()
    assert events[0].first_index == 3
    assert [t for event in events for t in event.token_ids] == whole[3:]
    assert events[-1].finish_reason == "length"
    bench.tell(m.Replay(R, LATER, 0))
    (again,) = bench.tokens()
    assert (again.first_index, list(again.token_ids)) == (3, whole[3:])


# --- refusing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["unknown", "full", "other attempt", "computed here", "cancelled"]
)
def test_an_announcement_that_nobody_waits_for_is_refused_and_starts_nothing(state: str) -> None:
    bench = DecodeBench(num_blocks=8)
    spec = stub_spec("r", range(10), 5)
    if state == "full":
        bench.reserve("a", 24)
        bench.reserve()
    elif state == "other attempt":
        bench.reserve(attempt=LATER)
    elif state == "computed here":
        bench.reserve(here=True)
    elif state == "cancelled":
        bench.reserve()
        bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    bench.made.sent()
    legs = list(bench.role.legs)
    bench.announce(spec, 0, hand_off=True)
    (answer,) = bench.made.sent()
    assert (answer.receiver, answer.body) == (SOURCE, m.PullRefused(R, ATTEMPT))
    assert not len(bench.made.worker.reads)
    assert list(bench.role.legs) == legs


# --- starting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["blocks", "hand-off"])
def test_decoding_begins_when_all_blocks_and_the_hand_off_are_there_in_either_order(
    first: str,
) -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=10)
    if first == "blocks":
        bench.announce(spec, 0, 1, 2)
        bench.step(6)
        assert bench.leg().state is LegState.RESERVED and bench.made.runner.num_steps == 0
        bench.announce(spec, hand_off=True)
    else:
        bench.announce(spec, 0, hand_off=True)
        bench.step(6)
        assert bench.leg().state is LegState.RESERVED and bench.made.runner.num_steps == 0
        bench.announce(spec, 1, 2)
        bench.step(2)
    bench.step()
    assert bench.leg().state is LegState.RUNNING


def test_decode_computes_no_position_of_the_prompt() -> None:
    bench = DecodeBench()
    bench.made.runner.forbid_prompt = True
    bench.pulled(length=10, max_tokens=5)
    bench.step(6)
    assert set(bench.made.runner.batches) == {1}
    (last,) = [e for e in bench.tokens() if e.finish_reason]
    assert last.stats is not None and last.stats.recomputed_prompt_tokens == 0


def test_the_first_event_repeats_token_one_and_carries_how_it_went() -> None:
    bench = DecodeBench()
    bench.pulled(length=10, max_tokens=5)
    bench.step(6)
    events = bench.tokens()
    expected = stub_output(range(10), 5)
    assert events[0].first_index == 0 and list(events[0].token_ids) == expected[:2]
    assert [t for e in events for t in e.token_ids] == expected
    assert events[0].stats is not None and events[0].stats.transfer is not None
    assert events[0].stats.transfer.blocks_moved == 3
    assert events[-1].finish_reason == "length" and events[-1].stats is not None


def test_all_tokens_of_one_step_leave_in_one_message() -> None:
    bench = DecodeBench(blocks_per_poll=None)
    for name in ("a", "b", "c"):
        bench.pulled(name, 4, 6)
    bench.made.sent()
    bench.step()
    (body,) = bench.sent(m.TokenEvents)
    assert isinstance(body, m.TokenEvents)
    assert sorted(event.request_id for event in body.events) == ["a", "b", "c"]


def test_a_stop_id_is_told_and_a_stop_string_is_left_to_the_front_door() -> None:
    bench = DecodeBench()
    stop = stub_output(range(6), 4)[3]
    spec = stub_spec("r", range(6), 20)
    spec = replace(spec, sampling=replace(spec.sampling, stop_token_ids=(stop,), stop=("x",)))
    bench.tell(m.Reserve(spec, ATTEMPT, prefill_here=True))
    bench.step(8)
    last = bench.tokens()[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_a_prompt_computed_here_reports_how_its_prefill_went() -> None:
    bench = DecodeBench()
    bench.clock.now = 3.0
    bench.reserve(length=20, max_tokens=3, here=True)
    bench.clock.now = 3.5
    bench.step(6)
    events = bench.tokens()
    assert [t for e in events for t in e.token_ids] == stub_output(range(20), 3)
    stats = events[0].stats
    assert stats is not None and stats.transfer is None
    assert stats.prefill == m.PrefillStats(0.5, 0.0, 3)


def test_a_hand_off_record_of_the_router_starts_what_is_complete() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8, max_tokens=3)
    bench.announce(spec, 0, 1)
    bench.step(3)
    record = m.HandOffRecord(R, ATTEMPT, bench.hand_off(spec))
    stranger = Sender(bench.made.worker, NodeRef("router-1", 9))
    stranger.send(membership())
    stranger.send(record)
    assert bench.leg().hand_off is None, "not its request"
    bench.tell(record)
    bench.tell(record)
    bench.step(4)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(8), 3)


def test_a_hand_off_record_alone_starts_nothing() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    bench.step(2)
    bench.tell(m.HandOffRecord(R, ATTEMPT, bench.hand_off(spec)))
    bench.step(3)
    assert bench.leg().state is LegState.RESERVED
    assert bench.made.runner.num_steps == 0


# --- the source goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("how", ["lease ends", "source dies"])
def test_a_source_that_goes_fails_what_is_incomplete_and_nothing_else(
    how: str, complete: bool
) -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8, max_tokens=3)
    bench.announce(spec, *(range(2) if complete else range(1)))
    bench.step(3)
    bench.made.sent()
    if how == "lease ends":
        bench.prefill.send(m.LeaseEnded(R, ATTEMPT))
        cause = FailureCause.STALLED
    else:
        bench.tell(membership(bench.made.member, bench.other.member, version=2))
        cause = FailureCause.SOURCE_LOST
    if complete:
        assert failures(bench) == []
        bench.tell(m.HandOffRecord(R, ATTEMPT, bench.hand_off(spec)))
        bench.step(4)
        assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(8), 3)
    else:
        assert failures(bench) == [("r", 1, cause)]
        assert bench.is_empty()


def test_the_end_of_a_lease_at_another_worker_is_nothing_to_it() -> None:
    bench = DecodeBench()
    spec = bench.reserve(length=8)
    bench.announce(spec, 0)
    Sender(bench.made.worker, OTHER).send(m.LeaseEnded(R, ATTEMPT))
    bench.tell(membership(bench.made.member, bench.source.member, version=2))
    assert failures(bench) == []
    assert bench.leg().state is LegState.RESERVED


# --- lists -------------------------------------------------------------------------------------


def wanted(received: int = 0, attempt: Attempt = ATTEMPT, leg: Leg = Leg.DECODE) -> m.WantedList:
    return m.WantedList((m.WantedItem(R, attempt, leg, (m.Received(0, received),)),))


@pytest.mark.parametrize(
    "other",
    [m.WantedList(()), wanted(attempt=LATER), wanted(leg=Leg.PREFILL)],
    ids=["empty", "other attempt", "other leg"],
)
def test_two_lists_in_a_row_that_do_not_name_a_leg_release_it(other: m.WantedList) -> None:
    bench = DecodeBench()
    bench.reserve()
    for body, held in ((other, True), (wanted(), True), (other, True), (other, False)):
        bench.tell(body)
        assert bool(bench.role.legs) == held
    assert bench.is_empty()


def test_lists_of_another_router_do_not_judge() -> None:
    bench = DecodeBench()
    bench.reserve()
    other = Sender(bench.made.worker, NodeRef("router-1", 9))
    other.send(membership(bench.source.member))
    for _ in range(4):
        other.send(m.WantedList(()))
        other.send(m.CancelLeg(R, LATER, Leg.DECODE))
    assert len(bench.role.legs) == 1


def test_lost_tokens_are_sent_again_from_where_the_router_is() -> None:
    bench = DecodeBench()
    bench.pulled(max_tokens=9)
    bench.step(3)
    expected = stub_output(range(10), 9)
    produced = len(bench.leg().branches[0].output)
    bench.made.sent()
    bench.tell(wanted(received=1))
    (event,) = bench.tokens()
    assert (event.first_index, list(event.token_ids)) == (1, expected[1:produced])
    bench.tell(wanted(received=produced))
    assert bench.tokens() == [], "it has them all"


def test_tokens_newer_than_the_list_are_not_sent_again() -> None:
    bench = DecodeBench()
    bench.pulled(max_tokens=9)
    bench.step(2)
    last = bench.leg().last_event_seq
    bench.made.sent()
    bench.tell(wanted(received=0), heard=last - 1)
    assert bench.tokens() == []
    bench.tell(wanted(received=0), heard=last)
    assert len(bench.tokens()) == 1


def test_a_lost_finish_is_sent_again_until_the_router_lets_go() -> None:
    bench = DecodeBench()
    bench.pulled(max_tokens=4)
    bench.step(4)
    assert bench.leg().state is LegState.FINISHED
    assert bench.made.pool.num_free == 16, "a finished leg keeps its output, not its blocks"
    bench.made.sent()
    for _ in range(2):
        bench.tell(wanted(received=4))
        (event,) = bench.tokens()
        assert (event.first_index, event.token_ids, event.finish_reason) == (4, (), "length")
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    assert bench.is_empty()


def test_a_replay_starts_where_it_is_asked_to() -> None:
    bench = DecodeBench()
    bench.pulled(max_tokens=6)
    bench.step(3)
    expected = stub_output(range(10), 6)
    bench.made.sent()
    bench.tell(m.Replay(R, ATTEMPT, 2))
    (event,) = bench.tokens()
    assert (
        event.first_index == 2
        and list(event.token_ids) == expected[2 : len(bench.leg().branches[0].output)]
    )
    bench.tell(m.Replay(R, ATTEMPT, 99))
    (event,) = bench.tokens()
    assert event.token_ids == ()
    bench.tell(m.Replay(R, LATER, 0))
    assert bench.tokens() == []


def test_what_is_held_is_told_with_its_state_and_progress() -> None:
    bench = DecodeBench(num_blocks=8)
    bench.pulled(max_tokens=9)
    bench.step(2)
    bench.reserve("waits", 20)
    produced = len(bench.leg().branches[0].output)
    items = {item.request_id: item for item in bench.role.held(ROUTER)}
    assert items[R] == m.HeldItem(R, ATTEMPT, Leg.DECODE, LegState.RUNNING, 0, produced, 10)
    assert items[RequestId("waits")].state is LegState.FULL
    assert bench.role.held(NodeRef("router-1", 9)) == []


# --- ending ------------------------------------------------------------------------------------

STAGES = ["full", "reserved", "reading", "verified", "running", "finished", "computed here"]


def at(stage: str) -> DecodeBench:
    """A bench whose request ``r`` is at a stage."""
    bench = DecodeBench(num_blocks=8)
    if stage == "full":
        bench.reserve("a", 24)
        bench.reserve()
        bench.tell(m.CancelLeg(RequestId("a"), ATTEMPT, Leg.DECODE))
        bench.made.sent()
        return bench
    if stage == "computed here":
        bench.reserve(here=True)
        bench.step()
    elif stage in ("running", "finished"):
        bench.pulled(max_tokens=3)
        bench.step(5 if stage == "finished" else 1)
    else:
        spec = bench.reserve()
        if stage != "reserved":
            bench.announce(spec, 0, 1, 2)
            bench.step(1 if stage == "reading" else 5)
    bench.made.sent()
    return bench


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "router dies", "two lists", "newer attempt"])
def test_a_leg_that_ends_at_any_stage_leaves_nothing(stage: str, how: str) -> None:
    bench = at(stage)
    assert bench.role.legs
    if how == "cancel":
        bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    elif how == "router dies":
        bench.clock.now += 5.0
        bench.made.worker.tick(bench.clock.now)
    elif how == "two lists":
        for _ in range(2):
            bench.tell(m.WantedList(()))
    else:
        bench.reserve(attempt=LATER)
        bench.tell(m.CancelLeg(R, LATER, Leg.DECODE))
    assert bench.is_empty()
    assert failures(bench) == [], "its end was asked for"


@pytest.mark.parametrize("stage", ["reading", "verified"])
def test_the_source_hears_at_once_that_a_pull_has_ended(stage: str) -> None:
    bench = at(stage)
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    told = [(e.receiver, e.body) for e in bench.made.sent(m.PullRefused)]
    assert told == [(SOURCE, m.PullRefused(R, ATTEMPT))]


def test_a_cancelled_read_writes_nothing_into_blocks_that_have_changed_hands() -> None:
    bench = at("reading")
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.DECODE))
    spec = bench.reserve("s", 20, 5, here=True)
    bench.step(10)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(20), 5)
    assert spec.request_id == "s"


@pytest.mark.parametrize("stage", ["running", "computed here"])
def test_a_step_that_fails_fails_the_leg_and_the_worker_serves_on(stage: str) -> None:
    bench = DecodeBench()
    if stage == "running":
        bench.pulled()
    else:
        bench.reserve(here=True)
    bench.made.runner.fail_next = True
    bench.made.sent()
    bench.step()
    (body,) = bench.sent(m.LegFailed)
    assert isinstance(body, m.LegFailed)
    assert (body.cause, body.leg) == (FailureCause.STEP, Leg.DECODE)
    assert "ArithmeticError" in body.message
    assert bench.is_empty()
    bench.reserve("s", 5, 3, here=True)
    bench.step(5)
    assert [t for e in bench.tokens() for t in e.token_ids] == stub_output(range(5), 3)


class _SlowRunner:
    """A stub model whose steps take a quarter of a second."""

    def __init__(self, bench: DecodeBench) -> None:
        self._bench = bench

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute, and let the time pass."""
        self._bench.clock.now += 0.25
        return self._bench.made.runner.execute(output)


def test_the_wait_and_the_first_step_are_measured_once_on_this_worker_s_clock() -> None:
    bench = DecodeBench()
    bench.made.worker.engine._runner = _SlowRunner(bench)
    spec = bench.reserve(length=8, max_tokens=6)
    bench.announce(spec, 0, 1)
    bench.step(3)
    bench.clock.now = 10.0
    bench.announce(spec, hand_off=True)
    assert (bench.leg().stats().decode_wait_s, bench.leg().stats().first_step_s) == (None, None)
    bench.clock.now = 12.0
    bench.tell(m.RouterHeartbeat())
    bench.step(3)
    stats = bench.leg().stats()
    assert (stats.decode_wait_s, stats.first_step_s) == (2.0, 0.25)
    assert bench.made.worker.load().decode_step_s == pytest.approx(0.25)


def test_a_cancel_of_the_prefill_leg_is_nothing_to_decode() -> None:
    bench = DecodeBench()
    bench.reserve()
    bench.tell(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    assert len(bench.role.legs) == 1
    assert bench.made.worker.channels.refused == {"CancelLeg": 1}
