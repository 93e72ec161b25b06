"""The router against loss: retries within a budget, lists, deaths, and load that goes to zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.cluster.routed_request import RequestState, RoutedRequest
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.request import Attempt, FinishReason, RequestId
from kvferry.engine.stopping import Finish
from kvferry.kv_cache.audit import BlockClass
from kvferry.worker import messages as m
from kvferry.worker.messages import Envelope, FailureCause, Leg, LegState, Role
from tests.cluster.routing import Bench, key, state
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster

BOTH = (Role.PREFILL, Role.DECODE)


def decoding(bench: Bench, name: str = "r", max_tokens: int = 8) -> RoutedRequest:
    """A request with two tokens delivered, decoding."""
    request, _ = bench.submit(name, max_tokens=max_tokens)
    bench.grant(request)
    bench.first_token(request)
    bench.tokens(request, 0, 100, 101)
    bench.drain()
    return request


# --- retries -----------------------------------------------------------------------------------


def test_a_retry_continues_behind_the_delivered_tokens() -> None:
    bench = Bench()
    request = decoding(bench)
    first = request.attempt
    bench.fail(request, FailureCause.STEP)
    (cancelled,) = [body for _, body in bench.drain() if isinstance(body, m.Reserve | m.CancelLeg)][
        :1
    ]
    assert cancelled == m.CancelLeg(request.request_id, first, Leg.DECODE)
    assert request.attempt > first
    assert request.decode is not None
    assert request.decode.body.spec.suffixes == ((100, 101),)
    assert request.spec.suffixes == ((),)
    bench.grant(request)
    bench.first_token(request, 102)
    bench.tokens(request, 2, 102, 103)
    assert bench.listeners["r"].tokens == [100, 101, 102, 103]
    assert bench.router.counters["recovered"] == 1


@pytest.mark.parametrize(
    ("cause", "leg", "error"),
    [
        (FailureCause.TRANSFER, Leg.DECODE, "TransferFailed"),
        (FailureCause.STEP, Leg.DECODE, "RequestPoisoned"),
        (FailureCause.STEP, Leg.PREFILL, "RequestPoisoned"),
        (FailureCause.STALLED, Leg.PREFILL, "WorkerLost"),
        (FailureCause.READER_GONE, Leg.PREFILL, "WorkerLost"),
        (FailureCause.SOURCE_LOST, Leg.DECODE, "WorkerLost"),
    ],
)
def test_the_last_allowed_attempt_that_fails_ends_the_request_with_a_typed_error(
    cause: FailureCause, leg: Leg, error: str
) -> None:
    bench = Bench(config=RouterConfig(max_attempts=3))
    request, listener = bench.submit()
    for number in (1, 2, 3):
        assert request.num_attempts == number and not listener.ends
        bench.grant(request)
        bench.fail(request, cause, leg, f"because {number}")
    (end,) = listener.ends
    assert end.finish.reason is FinishReason.ERROR
    assert type(end.error).__name__ == error
    assert "because 3 (attempt 3, the last allowed)" in str(end.error)
    assert bench.loads() == {}
    assert bench.router.counters["recovered"] == 2


def test_a_request_that_fits_no_worker_is_refused_without_another_try() -> None:
    bench = Bench()
    request, listener = bench.submit()
    bench.fail(request, FailureCause.SHAPE, why="38 positions need 10 blocks")
    (end,) = listener.ends
    assert type(end.error).__name__ == "InvalidRequest"
    assert "decode-0: 38 positions need 10 blocks" in str(end.error)
    assert request.num_attempts == 1


@pytest.mark.parametrize("how", ["limit", "eos", "stop id"])
def test_a_request_of_which_only_the_terminal_event_was_lost_has_finished(how: str) -> None:
    bench = Bench()
    spec = stub_spec("r", range(5), 3 if how == "limit" else 9)
    sampling = replace(
        spec.sampling,
        ignore_eos=how != "eos",
        stop_token_ids=(102,) if how == "stop id" else (),
    )
    spec = replace(spec, sampling=sampling, eos_token_ids=(102,))
    request, listener = bench.submit(spec=spec)
    bench.grant(request)
    bench.first_token(request)
    bench.tokens(request, 0, 100, 101, 102)
    bench.router.worker_died(bench.ref("decode-0"), "killed", bench.now)
    expected = {
        "limit": Finish(FinishReason.LENGTH),
        "eos": Finish(FinishReason.STOP),
        "stop id": Finish(FinishReason.STOP, 102),
    }
    assert [(end.finish, end.error) for end in listener.ends] == [(expected[how], None)]
    assert bench.router.counters["recovered"] == 0


# --- deaths ------------------------------------------------------------------------------------


def test_the_death_of_prefill_before_token_one_is_a_new_attempt_elsewhere() -> None:
    bench = Bench(num_prefill=2)
    request, _ = bench.submit()
    bench.grant(request)
    assert request.prefill is not None
    victim = request.prefill.worker
    bench.drain()
    bench.router.worker_died(victim, "killed", bench.now)
    assert request.num_attempts == 2
    bench.grant(request)
    assert bench.prefill_of(request) != victim
    assert not any(name == victim.node_id for name, _ in bench.drain())


def test_the_death_of_prefill_after_token_one_leaves_the_attempt_and_hands_off() -> None:
    bench = Bench()
    request, _ = bench.submit(length=9)
    bench.grant(request)
    bench.first_token(request)
    bench.drain()
    bench.router.worker_died(bench.ref("prefill-0"), "killed", bench.now)
    record = m.HandOffRecord(*key(request), m.HandOff((100,), 9))
    assert ("decode-0", record) in bench.drain()
    assert request.num_attempts == 1
    bench.tokens(request, 0, 100, 101)
    assert bench.listeners["r"].tokens == [100, 101]
    assert bench.loads() == {"decode-0": (0, 9, None)}


def test_the_router_s_hand_off_carries_token_one_s_log_probabilities() -> None:
    bench = Bench()
    request, _ = bench.submit(length=9)
    bench.grant(request)
    logprobs = (TokenLogprobs(100, -0.5, (100, 7), (-0.5, -1.0)),)
    done = m.PrefillDone(*key(request), (100,), m.PrefillStats(0.0, 0.0, 1), logprobs)
    bench.say("prefill-0", done)
    bench.drain()
    bench.router.worker_died(bench.ref("prefill-0"), "killed", bench.now)
    record = m.HandOffRecord(*key(request), m.HandOff((100,), 9, logprobs))
    assert ("decode-0", record) in bench.drain()


def test_a_hand_off_record_that_was_lost_is_sent_again_when_the_lists_show_it() -> None:
    bench = Bench()
    request, _ = bench.submit(length=9)
    bench.grant(request)
    bench.first_token(request)
    bench.router.worker_died(bench.ref("prefill-0"), "killed", bench.now)
    record = m.HandOffRecord(*key(request), m.HandOff((100,), 9))
    bench.drain()

    def told(seen: LegState) -> bool:
        bench.say("decode-0", m.HeldList((m.HeldItem(*key(request), Leg.DECODE, seen),)))
        return ("decode-0", record) in bench.drain()

    assert told(LegState.RESERVED)
    assert told(LegState.RESERVED), "as often as it is lost"
    assert not told(LegState.RUNNING), "it has arrived"
    bench.tokens(request, 0, 100)
    assert not told(LegState.RESERVED), "an old list"


def test_no_hand_off_is_sent_while_the_prefill_worker_lives() -> None:
    bench = Bench()
    request, _ = bench.submit()
    bench.grant(request)
    bench.first_token(request)
    item = m.HeldItem(*key(request), Leg.DECODE, LegState.RESERVED)
    bench.say("decode-0", m.HeldList((item,)))
    assert bench.sent(m.HandOffRecord) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_successor_that_registers_ends_the_life_before_it(role: str) -> None:
    """Else a request could be placed on the dead life for as long as its silence is excused."""
    bench = Bench()
    request, _ = bench.submit()
    bench.grant(request)
    old = bench.ref(f"{role}-0")
    bench.join(f"{role}-0", (Role(role),))
    assert bench.router.workers.get(old) is None
    assert request.num_attempts == 2
    assert bench.router.counters["worker_deaths"] == 1
    assert state(request) is RequestState.QUEUED, "the new life has not told its load"
    bench.beat()
    bench.grant(request)
    assert request.prefill is not None and request.decode is not None
    assert bench.ref(f"{role}-0") in (request.prefill.worker, request.decode.worker)


def test_a_worker_of_another_name_or_an_older_life_ends_nobody() -> None:
    bench = Bench()
    bench.join("decode-1", (Role.DECODE,))
    assert bench.router.counters["worker_deaths"] == 0
    assert {r.ref.node_id for r in bench.router.workers} == {"prefill-0", "decode-0", "decode-1"}


# --- time --------------------------------------------------------------------------------------


def test_a_silent_worker_is_lost_and_one_that_is_heard_is_not() -> None:
    bench = Bench(num_decode=2)
    for _ in range(4):
        bench.now += 0.6
        bench.beat("prefill-0", "decode-0")
        bench.router.tick(bench.now)
    assert {r.ref.node_id for r in bench.router.workers} == {"prefill-0", "decode-0"}
    assert bench.router.counters["worker_deaths"] == 1


def test_a_worker_lost_as_silent_is_refused_from_then_on() -> None:
    bench = Bench()
    for _ in range(4):
        bench.now += 0.5
        bench.router.tick(bench.now)
    assert list(bench.router.workers) == []
    bench.beat()
    assert bench.router.channels.refused == {"sender": 2}
    assert bench.router.workers.not_ready_reasons()


def test_the_time_in_which_the_router_itself_stood_still_is_no_worker_s_silence() -> None:
    bench = Bench()
    bench.router.tick(bench.now)
    bench.drain()
    bench.now += 60.0
    bench.router.tick(bench.now)
    assert bench.router.counters["worker_deaths"] == 0
    told = {name for name, _ in bench.sent(m.Membership)}
    assert told == {"prefill-0", "decode-0"}, "they may have taken it for dead"
    for _ in range(4):
        bench.now += 0.5
        bench.router.tick(bench.now)
    assert bench.router.counters["worker_deaths"] == 2, "silence after that counts"


@pytest.mark.parametrize("seconds", [1.0, 2.0, 10.0])
def test_a_router_that_stood_still_serves_on_with_the_workers_that_dropped_it(
    seconds: float,
) -> None:
    cluster = SimCluster()
    cluster.run(1.5)
    router, deliver = cluster.router, cluster._arrive
    assert router is not None
    cluster.submit(stub_spec("a", range(9), 30))
    cluster.run(0.5)
    late: list[Envelope] = []

    def keep(envelope: Envelope, now: float) -> None:
        if envelope.receiver == router.ref:
            late.append(envelope)
        else:
            deliver(envelope, now)

    cluster.router, cluster._arrive = None, keep  # type: ignore[method-assign]
    cluster.run(seconds)
    cluster.router, cluster._arrive = router, deliver  # type: ignore[method-assign]
    for envelope in late:
        router.deliver(envelope, cluster.clock.now)
    cluster.submit(stub_spec("b", range(40, 60), 6))
    cluster.run_until_ended(30)
    cluster.assert_exact()
    assert router.counters["worker_deaths"] == 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


def wait(bench: Bench, seconds: float) -> None:
    """Time passes, nobody is heard."""
    for _ in range(round(seconds / 0.25)):
        bench.now += 0.25
        bench.router.tick(bench.now)


def test_requests_wait_for_a_worker_and_end_in_one_clear_error_if_none_comes() -> None:
    bench = Bench(num_decode=0, config=RouterConfig(worker_wait=5.0, heartbeat_timeout=1e9))
    _, listener = bench.submit()
    wait(bench, 4.5)
    assert not listener.ends
    wait(bench, 1.0)
    (end,) = listener.ends
    assert type(end.error).__name__ == "WorkerLost"
    assert "no live decode worker for 5 s" in str(end.error)


def test_a_request_that_has_run_for_long_waits_as_long_as_any_for_a_successor() -> None:
    bench = Bench(config=RouterConfig(worker_wait=5.0, heartbeat_timeout=1e9))
    request = decoding(bench, max_tokens=50)
    wait(bench, 60.0)
    bench.router.worker_died(bench.ref("decode-0"), "killed", bench.now)
    wait(bench, 4.5)
    assert state(request) is RequestState.QUEUED
    bench.join("decode-0", (Role.DECODE,))
    bench.beat()
    assert state(request) is RequestState.RESERVING


def test_a_request_waits_without_limit_while_the_cluster_is_ready_but_busy() -> None:
    bench = Bench(window=10, config=RouterConfig(worker_wait=5.0, heartbeat_timeout=1e9))
    bench.submit("a", length=10)
    request, _ = bench.submit("b", length=10)
    wait(bench, 60.0)
    assert state(request) is RequestState.QUEUED and not bench.listeners["b"].ends


# --- lists -------------------------------------------------------------------------------------


def test_every_period_each_worker_is_told_what_is_wanted_of_it_and_how_far_it_has_come() -> None:
    bench = Bench(config=RouterConfig(heartbeat_timeout=1e9))
    a = decoding(bench, "a")
    b, _ = bench.submit("b")
    bench.grant(b)
    wait(bench, 0.25)
    bench.drain()
    wait(bench, 1.0)
    lists = bench.sent(m.WantedList)
    assert dict(lists) == {
        "decode-0": m.WantedList(
            (
                m.WantedItem(*key(a), Leg.DECODE, (m.Received(0, 2),)),
                m.WantedItem(*key(b), Leg.DECODE, (m.Received(0, 0),)),
            )
        ),
        "prefill-0": m.WantedList((m.WantedItem(*key(b), Leg.PREFILL, (m.Received(0, 0),)),)),
    }
    assert len(lists) == 2, "once per period"


def test_nobody_is_sent_a_list_of_nothing() -> None:
    bench = Bench(config=RouterConfig(heartbeat_timeout=1e9))
    wait(bench, 3.0)
    assert bench.sent(m.WantedList) == []


def test_a_leg_that_its_worker_does_not_name_is_asked_for_again() -> None:
    bench = Bench()
    request, _ = bench.submit()
    bench.grant(request)
    assert request.decode is not None and request.prefill is not None
    reserve, prefill = request.decode.body, request.prefill.body
    bench.drain()
    before = request.decode.seq
    bench.say("decode-0", m.HeldList(()))
    bench.say("prefill-0", m.HeldList(()))
    assert bench.drain() == [("decode-0", reserve), ("prefill-0", prefill)]
    assert request.decode.seq > before
    assert request.num_attempts == 1


def test_a_list_older_than_the_leg_does_not_judge_it() -> None:
    bench = Bench()
    request, _ = bench.submit()
    assert request.decode is not None
    bench.drain()
    bench.say("decode-0", m.HeldList(()), heard=request.decode.seq - 1)
    assert bench.drain() == []
    bench.say("decode-0", m.HeldList(()), heard=request.decode.seq)
    assert len(bench.sent(m.Reserve)) == 1


@pytest.mark.parametrize("what", ["unknown", "older attempt", "other worker's"])
def test_a_leg_that_is_not_wanted_where_it_is_held_is_cancelled(what: str) -> None:
    bench = Bench(num_decode=2)
    request, _ = bench.submit()
    bench.drain()
    request_id, attempt = key(request)
    if what == "unknown":
        request_id = RequestId("nobody")
    elif what == "older attempt":
        attempt = Attempt(0, 1)
    holder = "decode-1" if what == "other worker's" else "decode-0"
    item = m.HeldItem(request_id, attempt, Leg.DECODE, LegState.RUNNING)
    own = m.HeldItem(*key(request), Leg.DECODE, LegState.RESERVED)
    bench.say(holder, m.HeldList((item,) if holder == "decode-1" else (item, own)))
    assert bench.sent(m.CancelLeg) == [(holder, m.CancelLeg(request_id, attempt, Leg.DECODE))]


@pytest.mark.parametrize("told", [LegState.RESERVED, LegState.RUNNING])
def test_a_grant_that_was_lost_is_learned_from_the_list(told: LegState) -> None:
    bench = Bench()
    request, _ = bench.submit()
    bench.drain()
    item = m.HeldItem(*key(request), Leg.DECODE, told, missing_from=4)
    bench.say("decode-0", m.HeldList((item,)))
    assert state(request) is RequestState.PREFILLING
    ((_, body),) = bench.sent(m.PrefillRequest)
    assert body.missing_from == 4


def test_the_membership_is_repeated_until_the_worker_has_it() -> None:
    bench = Bench(config=RouterConfig(heartbeat_timeout=1e9))
    bench.join("decode-1", (Role.DECODE,))
    bench.drain()
    bench.beat("prefill-0")
    wait(bench, 1.25)
    told = {name for name, _ in bench.sent(m.Membership)}
    assert told == {"decode-0", "decode-1"}
    bench.beat()
    wait(bench, 1.0)
    assert bench.sent(m.Membership) == []


def test_an_audit_goes_to_the_worker_and_its_answer_is_kept() -> None:
    bench = Bench()
    bench.router.ask_audit(bench.ref("decode-0"), 7)
    assert bench.drain() == [("decode-0", m.AuditRequest(7))]
    counts = tuple((name.value, 64 if name is BlockClass.FREE else 0) for name in BlockClass)
    report = m.AuditReport(7, 4, 32, counts, (), ())
    bench.say("decode-0", report)
    assert list(bench.router.audits) == [(bench.ref("decode-0"), report)]


# --- load --------------------------------------------------------------------------------------


def test_a_request_counts_where_it_is_placed_and_not_for_prefill_once_that_is_done() -> None:
    bench = Bench()
    request, _ = bench.submit(length=9)
    assert bench.loads() == {"prefill-0": (9, 0, None), "decode-0": (0, 9, None)}
    bench.refuse(request)
    assert bench.loads() == {"decode-0": (0, 9, "r")}
    bench.grant(request)
    assert bench.loads() == {"prefill-0": (9, 0, None), "decode-0": (0, 9, None)}
    bench.first_token(request)
    assert bench.loads() == {"decode-0": (0, 9, None)}
    bench.tokens(request, 0, 100, 101, 102, 103, finish="length")
    assert bench.loads() == {}


def test_a_worker_where_a_request_waits_for_blocks_gets_no_other() -> None:
    bench = Bench(num_decode=2)
    bench.report_free_blocks(0)
    a, _ = bench.submit("a", length=4)
    assert a.decode is not None
    bench.refuse(a)
    b, _ = bench.submit("b", length=4)
    c, _ = bench.submit("c", length=4)
    assert b.decode is not None and c.decode is not None
    assert b.decode.worker == c.decode.worker != a.decode.worker
    bench.refuse(b)
    d, _ = bench.submit("d", length=4)
    assert state(d) is RequestState.QUEUED
    bench.grant(a)
    assert d.decode is not None and d.decode.worker == a.decode.worker


def test_a_request_that_waits_for_blocks_moves_to_a_worker_that_has_some() -> None:
    bench = Bench(num_decode=2)
    bench.report_free_blocks(0)
    a, _ = bench.submit("a", length=4)
    assert a.decode is not None
    first, attempt = a.decode.worker, a.attempt
    bench.refuse(a)
    assert a.decode.worker == first, "there is no room anywhere"
    bench.report_free_blocks(2, "decode-1")
    assert a.decode.worker == bench.ref("decode-1")
    assert a.attempt > attempt and a.num_attempts == 1, "a move is no failed attempt"
    cancelled = [body for worker, body in bench.sent(m.CancelLeg) if worker == "decode-0"]
    assert m.CancelLeg(a.request_id, attempt, Leg.DECODE) in cancelled


def test_what_a_worker_let_go_of_by_itself_costs_no_attempt() -> None:
    bench = Bench(config=RouterConfig(max_attempts=2))
    request, listener = bench.submit()
    for _ in range(5):
        bench.grant(request)
        bench.fail(request, FailureCause.ENDED, Leg.DECODE, "it had ended here")
    assert not listener.ends


def test_attempts_are_counted_since_decode_last_delivered_a_token() -> None:
    bench = Bench(config=RouterConfig(max_attempts=3))
    request, listener = bench.submit(max_tokens=20)
    for number in range(4):
        bench.grant(request)
        start = len(request.delivered)
        bench.first_token(request, 100 + start)
        bench.tokens(request, start, 100 + start, 101 + start)
        bench.fail(request, FailureCause.SOURCE_LOST, Leg.DECODE, f"death {number}")
    assert not listener.ends and len(listener.tokens) == 8
    for number in range(2):  # token 1 of each attempt comes from prefill: that is no progress
        bench.grant(request)
        bench.first_token(request, 108 + number)
        bench.fail(request, FailureCause.TRANSFER, Leg.DECODE, f"corrupt {number}")
    (end,) = listener.ends
    assert type(end.error).__name__ == "TransferFailed"


def test_a_worker_that_hangs_in_one_step_counts_as_dead_however_lively_it_beats() -> None:
    bench = Bench(num_decode=2, config=RouterConfig(stall_limit=30.0))
    request, _ = bench.submit()
    bench.grant(request)
    bench.beat("decode-0", step_age_s=29.0)
    bench.router.tick(bench.now)
    assert request.decode is not None and request.decode.worker == bench.ref("decode-0")
    bench.beat("decode-0", step_age_s=31.0)
    bench.router.tick(bench.now)
    assert request.decode.worker == bench.ref("decode-1")


@pytest.mark.parametrize("stage", ["reserving", "full", "prefilling", "token one", "decoding"])
@pytest.mark.parametrize("end", ["cancel", "decode dies", "prefill dies", "fails"])
def test_load_returns_to_zero_from_every_stage(stage: str, end: str) -> None:
    bench = Bench(config=RouterConfig(max_attempts=1))
    request, listener = bench.submit()
    if stage == "full":
        bench.refuse(request)
    if stage in ("prefilling", "token one", "decoding"):
        bench.grant(request)
    if stage in ("token one", "decoding"):
        bench.first_token(request)
    if stage == "decoding":
        bench.tokens(request, 0, 100, 101)
    assert bench.loads()
    if end == "cancel":
        bench.router.cancel(request.request_id, bench.now)
    elif end == "fails":
        bench.fail(request, FailureCause.STEP)
    else:
        bench.router.worker_died(bench.ref(f"{end.split()[0]}-0"), "killed", bench.now)
        bench.router.shut_down(bench.now)
    assert len(listener.ends) == 1
    assert bench.loads() == {}
    assert bench.router.requests == {}
