"""The router under any messages in any order: streams contiguous, one end each, load exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from kvferry.cluster.errors import Overloaded
from kvferry.cluster.routed_request import RequestState, RoutedRequest
from kvferry.cluster.router_config import RouterConfig
from kvferry.engine.request import Attempt
from kvferry.worker import messages as m
from kvferry.worker.codec import decode, encode
from kvferry.worker.messages import FailureCause, Leg, LegState, Role
from tests.cluster.routing import Bench, key
from tests.fakes import stub_spec

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "colocated-0")
ROLES = {
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE,),
    "colocated": (Role.PREFILL, Role.DECODE),
}
workers = st.sampled_from(WORKERS)


class RouterMachine(RuleBasedStateMachine):
    """The token of an output index is the index, so that a lost or repeated one shows.

    Messages are drawn about real and unreal requests, present and older attempts, from any
    worker, right or wrong; clients come and go, workers die and come back.
    """

    requests = Bundle("requests")

    @initialize(
        colocated=st.integers(0, 1), window=st.sampled_from([10, 30]), limit=st.integers(1, 5)
    )
    def begin(self, colocated: int, window: int, limit: int) -> None:
        config = RouterConfig(queue_limit=3, max_attempts=limit, worker_wait=3.0)
        self.bench = Bench(2, 2, colocated, config, window, num_blocks=8)
        self.submitted: list[RoutedRequest] = []
        self.newest: dict[str, Attempt] = {}

    # --- clients ----------------------------------------------------------------------------

    @rule(target=requests, length=st.integers(1, 20), limit=st.integers(1, 6))
    def submit(self, length: int, limit: int) -> Any:
        name = f"r{len(self.bench.listeners)}"
        try:
            request, _ = self.bench.submit(name, spec=stub_spec(name, range(length), limit))
        except Overloaded:
            request = RoutedRequest(
                stub_spec(name, [1], 1), self.bench.listeners[name], 0.0, 0, Attempt(1, 1), 0.0
            )
        self.submitted.append(request)
        return request

    @rule(request=requests)
    def cancel(self, request: RoutedRequest) -> None:
        live = request.request_id in self.bench.router.requests
        assert self.bench.router.cancel(request.request_id, self.bench.now) == live

    @rule(request=requests)
    def goes_on(self, request: RoutedRequest) -> None:
        """The next thing that happens when all is well."""
        bench = self.bench
        if request.state is RequestState.RESERVING:
            bench.grant(request)
        elif request.prefill is not None and not request.delivered[request.first_own_index(0) :]:
            bench.first_token(request, len(request.delivered))
        elif request.decode is not None:
            limit = request.spec.sampling.max_tokens
            finish = "length" if len(request.delivered) + 1 == limit else None
            bench.tokens(request, len(request.delivered), len(request.delivered), finish=finish)

    further = goes_on  # twice as often as anything that goes wrong

    # --- workers' words ---------------------------------------------------------------------

    @rule(
        request=requests, full=st.booleans(), missing=st.integers(0, 8), where=st.none() | workers
    )
    def reply(self, request: RoutedRequest, full: bool, missing: int, where: str | None) -> None:
        outcome = m.ReserveOutcome.FULL if full else m.ReserveOutcome.GRANTED
        self.say(request, Leg.DECODE, where, m.ReserveReply(*key(request), outcome, missing))

    @rule(request=requests, empty=st.booleans(), where=st.none() | workers)
    def first_token(self, request: RoutedRequest, empty: bool, where: str | None) -> None:
        stats = m.PrefillStats(0.0, 0.0, 1)
        done = m.PrefillDone(*key(request), () if empty else (request.first_own_index(0),), stats)
        self.say(request, Leg.PREFILL, where, done)

    @rule(
        request=requests,
        behind=st.integers(-2, 2),
        count=st.integers(0, 3),
        finish=st.sampled_from([None, None, "stop", "length"]),
        where=st.none() | workers,
    )
    def tokens(
        self,
        request: RoutedRequest,
        behind: int,
        count: int,
        finish: str | None,
        where: str | None,
    ) -> None:
        first = max(0, len(request.delivered) + behind)
        event = m.TokenEvent(*key(request), 0, first, tuple(range(first, first + count)), finish)
        self.say(request, Leg.DECODE, where, m.TokenEvents((event,)))

    @rule(
        request=requests,
        leg=st.sampled_from(Leg),
        cause=st.sampled_from(FailureCause),
        where=st.none() | workers,
    )
    def fail(
        self, request: RoutedRequest, leg: Leg, cause: FailureCause, where: str | None
    ) -> None:
        self.say(request, leg, where, m.LegFailed(*key(request), leg, cause, "why"))

    @rule(
        items=st.lists(st.tuples(requests, st.sampled_from(Leg), st.sampled_from(LegState))),
        older=st.booleans(),
        heard=st.sampled_from([0, 5, 1 << 60]),
        where=workers,
    )
    def held(
        self,
        items: list[tuple[RoutedRequest, Leg, LegState]],
        older: bool,
        heard: int,
        where: str,
    ) -> None:
        held = [
            m.HeldItem(r.request_id, Attempt(0, 1) if older else r.attempt, leg, state)
            for r, leg, state in items
        ]
        if where in self.bench.members:
            self.bench.say(where, m.HeldList(tuple(held)), heard)

    def say(self, request: RoutedRequest, leg: Leg, where: str | None, body: Any) -> None:
        """By the worker that holds the leg, or by whom the test says."""
        ticket = request.decode if leg is Leg.DECODE else request.prefill
        if where is None and ticket is not None:
            self.bench.say(ticket.worker, body)
        elif where in self.bench.members:
            self.bench.say(where, body)

    # --- time, deaths -----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0]), heard=st.sampled_from([True, True, False]))
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.bench.now += seconds
        if heard:
            self.bench.beat()
        self.bench.router.tick(self.bench.now)

    @rule(name=workers, really=st.sampled_from([True, False, False]))
    def die(self, name: str, really: bool) -> None:
        if really and name in self.bench.members:
            self.bench.router.worker_died(self.bench.ref(name), "killed", self.bench.now)

    @rule(name=workers, again=st.sampled_from([True, False, False]), beats=st.booleans())
    def join(self, name: str, again: bool, beats: bool) -> None:
        """A worker that is gone comes back, or one that is not has a successor."""
        alive = {record.ref.node_id for record in self.bench.router.workers}
        if again or name not in alive:
            self.bench.join(name, ROLES[name.partition("-")[0]])
        if beats:
            self.bench.beat()

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def every_request_ends_once_and_only_live_ones_are_known(self) -> None:
        for request in self._submitted():
            listener = self.bench.listeners[request.request_id]
            live = request.request_id in self.bench.router.requests
            accepted = request.arrival > 0
            assert len(listener.ends) == (0 if live or not accepted else 1)
            assert listener.tokens == request.delivered == list(range(len(listener.tokens)))
            assert len(request.token_times) == len(request.delivered)
            for end in listener.ends:
                assert (end.error is not None) == (end.finish.reason.value == "error")

    @invariant()
    def attempts_only_rise(self) -> None:
        for request in self._submitted():
            assert request.attempt >= self.newest.get(request.request_id, request.attempt)
            self.newest[request.request_id] = request.attempt

    @invariant()
    def load_is_that_of_the_placed_requests(self) -> None:
        if not hasattr(self, "bench"):
            return
        live = self.bench.router.requests
        for record in self.bench.router.workers:
            placed = {r for r, q in live.items() if q.decode and q.decode.worker == record.ref}
            assert record.decode.keys() == placed
            assert record.prefill.keys() <= live.keys()
            if record.waiting is not None:
                assert live[record.waiting].full
                assert record.waiting in placed
        for request in live.values():
            counted = [r for r in self.bench.router.workers if request.request_id in r.prefill]
            assert len(counted) <= 1
            if request.state in (RequestState.QUEUED, RequestState.DECODING) or request.full:
                assert not counted

    @invariant()
    def what_waits_is_what_is_queued(self) -> None:
        if not hasattr(self, "bench"):
            return
        router = self.bench.router
        queued = [r for r in router.requests.values() if r.state is RequestState.QUEUED]
        assert sorted(queued, key=lambda r: r.arrival) == list(router._line)
        for request in queued:
            assert request.decode is None and request.prefill is None

    @invariant()
    def what_is_sent_comes_from_this_life_and_can_be_encoded(self) -> None:
        if hasattr(self, "bench"):
            for envelope in self.bench.router.outbox:
                assert envelope.sender == self.bench.router.ref
                assert decode(encode(envelope)) == envelope
            self.bench.drain()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.router.shut_down(self.bench.now)
            self.every_request_ends_once_and_only_live_ones_are_known()
            assert self.bench.loads() == {}
            counters = self.bench.router.counters
            ends = sum(n for name, n in counters.items() if name.startswith("finished_"))
            assert ends == counters["accepted"]

    def _submitted(self) -> Iterator[RoutedRequest]:
        return iter(getattr(self, "submitted", []))


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
