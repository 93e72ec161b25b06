"""The router's automaton: one terminal event, delivered is final, late words change nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from kvferry.cluster.errors import Overloaded
from kvferry.cluster.routed_request import RequestState, RoutedRequest, StopMatch
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.request import Attempt, FinishReason, InvalidRequest, RequestId
from kvferry.engine.stopping import Finish
from kvferry.worker import messages as m
from kvferry.worker.messages import Body, FailureCause, Leg
from tests.cluster.routing import Bench, key, state
from tests.fakes import RecordingListener, stub_spec


def decoding(bench: Bench, max_tokens: int = 8) -> RoutedRequest:
    """A request whose first token has come from both sides."""
    request, _ = bench.submit(max_tokens=max_tokens)
    bench.grant(request)
    bench.first_token(request)
    bench.tokens(request, 0, 100, 101)
    bench.drain()
    return request


def test_a_request_is_reserved_then_prefilled_then_decoded_then_let_go() -> None:
    bench = Bench()
    request, listener = bench.submit(length=9, max_tokens=4)
    spec = replace(request.spec, suffixes=((),))
    assert bench.drain() == [("decode-0", m.Reserve(spec, request.attempt, False))]
    assert state(request) is RequestState.RESERVING
    bench.grant(request, missing_from=4)
    assert bench.drain() == [
        ("prefill-0", m.PrefillRequest(spec, request.attempt, bench.ref("decode-0"), 4))
    ]
    assert state(request) is RequestState.PREFILLING
    bench.first_token(request, 100)
    assert listener.tokens == [100]
    bench.tokens(request, 0, 100)
    assert state(request) is RequestState.DECODING
    assert bench.drain() == [("prefill-0", m.CancelLeg(*key(request), Leg.PREFILL))]
    bench.tokens(request, 1, 101, 102)
    bench.tokens(request, 3, 103, finish="length")
    assert listener.tokens == [100, 101, 102, 103]
    assert [end.finish for end in listener.ends] == [Finish(FinishReason.LENGTH)]
    assert bench.drain() == [("decode-0", m.CancelLeg(*key(request), Leg.DECODE))]
    assert state(request) is RequestState.ENDED
    assert bench.loads() == {} and bench.router.requests == {}
    assert bench.router.counters["finished_length"] == 1


def test_a_colocated_worker_gets_one_leg_that_prefills_where_it_decodes() -> None:
    bench = Bench(num_prefill=0, num_decode=0, num_colocated=1)
    request, listener = bench.submit(max_tokens=2)
    ((_, body),) = bench.sent(m.Reserve)
    assert body.prefill_here
    bench.grant(request)
    assert bench.drain() == []
    bench.tokens(request, 0, 100, 101, finish="length")
    assert listener.tokens == [100, 101] and len(listener.ends) == 1
    assert (request.prefill_worker, request.decode_worker) == ("colocated-0", "colocated-0")
    assert bench.loads() == {}


def test_token_one_that_ends_the_request_ends_it_at_once_and_cancels_the_reservation() -> None:
    bench = Bench()
    request, listener = bench.submit(max_tokens=1)
    bench.grant(request)
    decode = request.attempt
    bench.drain()
    bench.first_token(request)
    assert listener.tokens == [100]
    assert [end.finish.reason for end in listener.ends] == [FinishReason.LENGTH]
    assert set(bench.drain()) == {
        ("prefill-0", m.CancelLeg(request.request_id, decode, Leg.PREFILL)),
        ("decode-0", m.CancelLeg(request.request_id, decode, Leg.DECODE)),
    }


def test_an_end_of_sequence_as_token_one_is_a_stop() -> None:
    bench = Bench()
    spec = stub_spec("r", range(5), 9)
    spec = replace(spec, eos_token_ids=(100,), sampling=replace(spec.sampling, ignore_eos=False))
    request, listener = bench.submit(spec=spec)
    bench.grant(request)
    bench.first_token(request, 100)
    assert [end.finish for end in listener.ends] == [Finish(FinishReason.STOP)]


# --- one terminal event ------------------------------------------------------------------------

STATS = m.PrefillStats(0.0, 0.0, 1)
GRANTED, FULL = m.ReserveOutcome.GRANTED, m.ReserveOutcome.FULL

# by name: which leg's worker says it, and what
LATE: dict[str, tuple[str, Callable[[RequestId, Attempt], Body]]] = {
    "tokens": ("decode", lambda r, a: _event(r, a, 2, 102, "length")),
    "the same finish": ("decode", lambda r, a: _event(r, a, 1, 101, "stop")),
    "token one": ("prefill", lambda r, a: m.PrefillDone(r, a, (100,), STATS)),
    "a grant": ("decode", lambda r, a: m.ReserveReply(r, a, GRANTED)),
    "full": ("decode", lambda r, a: m.ReserveReply(r, a, FULL)),
    "decode failed": (
        "decode",
        lambda r, a: m.LegFailed(r, a, Leg.DECODE, FailureCause.STEP, "late"),
    ),
    "prefill failed": (
        "prefill",
        lambda r, a: m.LegFailed(r, a, Leg.PREFILL, FailureCause.STALLED, "late"),
    ),
}


def _event(request_id: RequestId, attempt: Attempt, first: int, token: int, finish: str) -> Body:
    return m.TokenEvents((m.TokenEvent(request_id, attempt, 0, first, (token,), finish),))


def say_late(bench: Bench, late: str, request: RoutedRequest, index: int = 0) -> None:
    """A worker of the right role says it of this request and attempt."""
    role, make = LATE[late]
    bench.say(f"{role}-{index}", make(*key(request)))


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_after_the_end_nothing_more_is_told_and_what_comes_late_is_counted(
    late: str, how: str
) -> None:
    bench = Bench()
    request = decoding(bench, max_tokens=8)
    listener = bench.listeners["r"]
    if how == "finished":
        bench.tokens(request, 2, 102, finish="stop")
    else:
        assert bench.router.cancel(request.request_id, bench.now)
    tokens, counted = list(listener.tokens), bench.router.counters["stale_refused"]
    bench.drain()
    say_late(bench, late, request)
    assert not bench.router.cancel(request.request_id, bench.now)
    bench.router.shut_down(bench.now)
    assert listener.tokens == tokens
    assert len(listener.ends) == 1
    assert bench.router.counters["stale_refused"] == counted + 1
    assert bench.drain() == [] and bench.loads() == {}


@pytest.mark.parametrize("late", LATE)
def test_words_of_an_older_attempt_are_dropped_and_counted(late: str) -> None:
    bench = Bench()
    request = decoding(bench)
    older = replace(request, attempt=request.attempt)
    bench.fail(request, FailureCause.STEP)
    assert request.attempt > older.attempt
    before = replace(request, branches=deepcopy(request.branches))
    counted = bench.router.counters["stale_refused"]
    bench.drain()
    say_late(bench, late, older)
    assert request == before, "nothing has changed"
    assert bench.router.counters["stale_refused"] == counted + 1
    assert bench.drain() == []


@pytest.mark.parametrize("late", LATE)
def test_words_of_a_worker_that_does_not_hold_the_leg_are_dropped_and_counted(late: str) -> None:
    bench = Bench(num_prefill=2, num_decode=2)
    request, _ = bench.submit()
    bench.grant(request)
    bench.drain()
    before = replace(request, branches=deepcopy(request.branches))
    say_late(bench, late, request, index=1)
    assert request == before
    assert bench.router.counters["stale_refused"] == 1
    assert bench.drain() == []


def test_an_unknown_request_is_counted_and_creates_nothing() -> None:
    bench = Bench()
    request, _ = bench.submit()
    stranger = replace(request, spec=stub_spec("nobody", [1], 1))
    for late in LATE:
        say_late(bench, late, stranger)
    assert bench.router.counters["stale_refused"] == len(LATE)
    assert list(bench.router.requests) == ["r"]


def test_a_message_that_workers_do_not_send_is_counted() -> None:
    bench = Bench()
    bench.say("decode-0", m.Replay(RequestId("r"), Attempt(1, 1), 0))
    assert bench.router.counters["unexpected_messages"] == 1


# --- delivery ----------------------------------------------------------------------------------


def test_what_was_delivered_before_is_dropped_and_only_the_rest_is_told() -> None:
    bench = Bench()
    request = decoding(bench)
    listener = bench.listeners["r"]
    bench.tokens(request, 0, 7, 8)  # another word about delivered indexes: the first one stands
    bench.tokens(request, 1, 9, 102)
    bench.tokens(request, 1, 9, 9, 103)
    assert listener.tokens == [100, 101, 102, 103]


@pytest.mark.parametrize("first", [3, 4])
def test_a_gap_asks_for_a_replay_and_delivers_nothing_until_it_is_closed(first: int) -> None:
    bench = Bench()
    request = decoding(bench)
    listener = bench.listeners["r"]
    bench.tokens(request, first, *range(100 + first, 105), finish="length")
    assert listener.tokens == [100, 101] and not listener.ends
    assert bench.drain() == [("decode-0", m.Replay(*key(request), 2))]
    bench.tokens(request, 2, 102, 103, 104, finish="length")
    assert listener.tokens == [100, 101, 102, 103, 104]
    assert len(listener.ends) == 1


def test_a_finish_counts_only_with_all_tokens_before_it() -> None:
    """A doubled older report may carry the finish of the newest."""
    bench = Bench()
    request = decoding(bench)
    bench.tokens(request, 2, 102, 103)
    bench.tokens(request, 0, 100, 101, finish="length")
    assert not bench.listeners["r"].ends
    bench.tokens(request, 4, finish="length")
    assert len(bench.listeners["r"].ends) == 1


def test_what_every_worker_would_refuse_is_refused_at_once() -> None:
    """Else it would be asked for again with every list, for ever."""
    bench = Bench()
    spec = stub_spec("r", range(5), 3)
    impossible = replace(spec, sampling=replace(spec.sampling, bad_words=((),)))
    with pytest.raises(InvalidRequest, match="bad_words"):
        bench.router.submit(impossible, RecordingListener(), bench.now)
    assert not bench.router.requests and bench.loads() == {}


def test_tokens_behind_a_stop_string_are_not_delivered() -> None:
    bench = Bench()
    request, listener = bench.submit(max_tokens=20)
    bench.grant(request)
    bench.first_token(request)
    stop = Finish(FinishReason.STOP, "END")
    listener.on_tokens = lambda run, now: StopMatch(2, stop)  # type: ignore[method-assign]
    bench.now = 7.0
    bench.tokens(request, 0, 100, 101, 102, 103, 104, finish="length")
    assert request.delivered == [100, 101, 102]
    assert request.token_times == [0.0, 7.0, 7.0]
    assert [end.finish for end in listener.ends] == [stop]


def test_token_times_are_those_of_delivery() -> None:
    bench = Bench()
    request, _ = bench.submit()
    bench.grant(request)
    for now, (first, *ids) in {1.0: (0, 100), 2.5: (1, 101, 102)}.items():
        bench.now = now
        bench.tokens(request, first, *ids)
    assert request.token_times == [1.0, 2.5, 2.5]


def test_an_empty_first_token_changes_nothing() -> None:
    bench = Bench()
    request, listener = bench.submit()
    bench.grant(request)
    assert request.prefill is not None
    bench.say(request.prefill.worker, m.PrefillDone(*key(request), (), STATS))
    assert listener.tokens == [] and not listener.ends


# --- admission ---------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_a_time_to_come_back_and_serves_the_others() -> None:
    bench = Bench(ready=False, config=RouterConfig(queue_limit=2))
    first, _ = bench.submit("a")
    bench.submit("b")
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
        bench.submit("c")
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    assert bench.router.counters["rejected"] == 1
    assert bench.router.counters["accepted"] == 2
    assert list(bench.router.requests) == ["a", "b"]
    bench.beat()
    assert state(first) is RequestState.RESERVING
    bench.submit("c")


def test_requests_are_placed_in_order_of_arrival_and_nobody_overtakes() -> None:
    bench = Bench(window=20)
    a, _ = bench.submit("a", length=20)
    b, _ = bench.submit("b", length=15)
    c, _ = bench.submit("c", length=1)  # would fit, but b came first
    assert [r.state for r in (a, b, c)] == [
        RequestState.RESERVING,
        RequestState.QUEUED,
        RequestState.QUEUED,
    ]
    bench.grant(a)
    bench.first_token(a)
    assert [r.state for r in (b, c)] == [RequestState.RESERVING, RequestState.RESERVING]


def test_a_retried_request_takes_its_old_place_in_the_queue() -> None:
    bench = Bench(window=20)
    a, _ = bench.submit("a", length=20, max_tokens=3)
    bench.grant(a)
    bench.submit("b", length=20)
    bench.submit("c", length=20)
    bench.drain()
    bench.fail(a, FailureCause.STEP, Leg.PREFILL)
    assert [body.spec.request_id for _, body in bench.sent(m.Reserve)] == ["a"]


def test_every_placement_is_kept_as_a_decision() -> None:
    bench = Bench()
    request, _ = bench.submit()
    (entry,) = bench.router.decisions
    assert (entry.request_id, entry.policy) == (request.request_id, "least_loaded")
    assert (entry.prefill_worker, entry.decode_worker) == ("prefill-0", "decode-0")


def test_shutting_down_ends_every_request_with_an_error_once() -> None:
    bench = Bench(window=10)
    for name in ("a", "b", "c"):
        bench.submit(name)
    bench.router.shut_down(1.0)
    bench.router.shut_down(2.0)
    for listener in bench.listeners.values():
        (end,) = listener.ends
        assert type(end.error).__name__ == "WorkerLost"
        assert end.finish.reason is FinishReason.ERROR
    assert bench.loads() == {}
