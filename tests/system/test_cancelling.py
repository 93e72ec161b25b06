"""A request that is no longer wanted ends in whatever state it is, and leaves nothing.

Over real sockets: steps and reads are held until the request is where the test wants it, and are
let go only after it has been cancelled, so that no race decides what is tested.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster.client import Client, GenerateStream
from kvferry.cluster.errors import DeadlineExceeded, KVFerryError
from kvferry.cluster.routed_request import RequestState, RoutedRequest
from kvferry.decode_worker.role import DecodeRole
from kvferry.protos import kvferry_pb2 as pb
from kvferry.worker.messages import CancelLeg, Envelope, Leg, LegState
from tests.stack import Stack, StackWorker, eventually

PROMPT = [5] * 24  # three chunks, six blocks
OTHER = [7] * 24
ENDLESS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
DEADLINE_S = 1.0  # by then a request is where it is to be, on the slowest machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


class Case:
    """A stack and its client; ``victim`` is the request that is to be cancelled."""

    def __init__(self, stack: Stack, client: Client, streams: ExitStack) -> None:
        self.stack = stack
        self.client = client
        self._streams = streams
        self.timeout_s: float | None = None
        self.num_tokens = 0

    def begin(
        self, prompt: list[int], timeout_s: float | None = None, max_tokens: int = 60
    ) -> GenerateStream:
        """Start a request; returns once it is accepted."""
        sampling = pb.SamplingParams(**{**ENDLESS, "max_tokens": max_tokens})
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        stream = self.client.stream(request, timeout_s=timeout_s)
        self._streams.enter_context(stream)
        assert isinstance(next(stream), pb.Accepted)
        return stream

    def victim(self) -> GenerateStream:
        """Start the request that is to be cancelled."""
        return self.begin(PROMPT, self.timeout_s)

    def wait_for(self, stream: GenerateStream, state: RequestState, full: bool = False) -> None:
        """Return when the router has a request in a state."""

        def there() -> bool:
            request = self.request(stream)
            return request is not None and (request.state, request.full) == (state, full)

        eventually(f"it is {state.value}", there)

    def request(self, stream: GenerateStream) -> RoutedRequest | None:
        """The router's request behind a stream."""
        requests = self.stack.router.requests
        return self.stack.on_loop(lambda: {str(k): r for k, r in requests.items()}).get(
            stream.request_id
        )


def queued(case: Case) -> GenerateStream:
    """Nobody has room for its prefill: it waits at the router."""
    case.stack.prefill.runner.allow(0)
    case.begin(OTHER)
    case.stack.prefill.runner.wait_held()
    stream = case.victim()
    case.wait_for(stream, RequestState.QUEUED)
    return stream


def full(case: Case) -> GenerateStream:
    """The decode worker has no blocks for it: it waits in its line."""
    case.stack.decode.connector.held = True
    other = case.begin(OTHER * 2 + OTHER[:16], max_tokens=10)  # sixteen blocks
    case.wait_for(other, RequestState.PREFILLING)
    stream = case.victim()
    case.wait_for(stream, RequestState.RESERVING, full=True)
    return stream


def waiting_at_prefill(case: Case) -> GenerateStream:
    """Its prefill has been asked for and has not begun."""
    case.stack.prefill.runner.allow(0)
    stream = case.victim()
    case.stack.prefill.runner.wait_held()
    case.wait_for(stream, RequestState.PREFILLING)
    return stream


def in_mid_prefill(case: Case) -> GenerateStream:
    """One chunk is computed, announced and pulled; the second is held."""
    case.stack.prefill.runner.allow(1)
    stream = case.victim()
    case.stack.prefill.runner.wait_held()
    (role,) = case.stack.decode.worker.roles
    assert isinstance(role, DecodeRole)
    eventually("two blocks are pulled", lambda: role.puller.blocks_moved == 2)
    return stream


def transferring(case: Case) -> GenerateStream:
    """All is computed and announced, token 1 delivered; the reads make no progress."""
    case.stack.decode.connector.held = True
    stream = case.victim()
    assert isinstance(next(stream), pb.Delta)
    eventually("it is being read", lambda: len(case.stack.decode.worker.reads))
    return stream


def handed_off(case: Case) -> GenerateStream:
    """Every block is there and the first decode step is held."""
    case.stack.decode.runner.allow(0)
    stream = case.victim()
    case.stack.decode.runner.wait_held()
    return stream


def decoding(case: Case) -> GenerateStream:
    """Some tokens are delivered, the next step is held."""
    case.stack.decode.runner.allow(3)
    stream = case.victim()
    tokens = 0
    while tokens < 4:
        event = next(stream)
        assert isinstance(event, pb.Delta)
        tokens += len(event.token_ids)
    case.stack.decode.runner.wait_held()
    return stream


def preempted(case: Case) -> GenerateStream:
    """Both have grown until the pool was full: the newer one has lost its blocks."""
    decode = case.stack.decode
    case.stack.prefill.runner.allow(0)
    case.begin(OTHER[:8])
    stream = case.begin(PROMPT[:8], case.timeout_s)
    eventually(
        "both are reserved", lambda: len(decode.worker.roles[0].held(case.stack.router.ref)) == 2
    )
    decode.runner.allow(0)
    case.stack.prefill.runner.allow(None)
    decode.runner.wait_held()
    while not decode.worker.engine.scheduler.has_preempted:
        decode.runner.allow(1)
        decode.runner.wait_held()
    return stream


def finished_but_unread(case: Case) -> GenerateStream:
    """Every token is delivered; the client has not taken the end yet."""
    stream = case.client.generate(token_ids=PROMPT, max_tokens=2)
    assert isinstance(next(stream), pb.Accepted)
    eventually("it has ended", lambda: case.request(stream) is None)
    return stream


STATES: dict[str, tuple[Callable[[Case], GenerateStream], dict[str, Any]]] = {
    "queued": (queued, {"prefill_window": 24}),
    "full": (full, {"decode_blocks": 21}),
    "waiting_at_prefill": (waiting_at_prefill, {}),
    "in_mid_prefill": (in_mid_prefill, {}),
    "transferring": (transferring, {}),
    "handed_off": (handed_off, {}),
    "decoding": (decoding, {}),
    "preempted": (preempted, {"decode_blocks": 17, "max_model_len": 68}),
}


@contextmanager
def case_of(folder: Path, settings: dict[str, Any]) -> Iterator[Case]:
    with (
        Stack(folder, audit_every_step=True, **settings) as stack,
        Client(stack.endpoint) as client,
        ExitStack() as streams,
    ):
        yield Case(stack, client, streams)


def by_call(case: Case, stream: GenerateStream) -> None:
    """Another call names it; its own stream ends with reason abort."""
    assert case.client.cancel(stream.request_id)
    *_, last = stream
    assert isinstance(last, pb.Finished)
    assert (last.finish_reason, last.is_last) == ("abort", True)
    assert not case.client.cancel(stream.request_id)


def by_deadline(case: Case, stream: GenerateStream) -> None:
    """Its deadline passes."""
    with pytest.raises(DeadlineExceeded):
        list(stream)


def by_leaving(case: Case, stream: GenerateStream) -> None:
    """Its client goes away."""
    stream.close()


@pytest.mark.parametrize("how", [by_call, by_deadline, by_leaving], ids=lambda how: how.__name__)
@pytest.mark.parametrize("state", STATES)
def test_a_request_is_cancelled_in_every_state_and_leaves_nothing(
    folder: Path, state: str, how: Callable[[Case, GenerateStream], None]
) -> None:
    reach, settings = STATES[state]
    with case_of(folder, settings) as case:
        stack = case.stack
        case.timeout_s = DEADLINE_S if how is by_deadline else None
        stream = reach(case)
        how(case, stream)
        eventually("the router has ended it", lambda: case.request(stream) is None)
        assert stack.counters()["finished_abort"] == 1
        stack.release()
        eventually("the others finish", lambda: not stack.on_loop(lambda: stack.router.requests))
        stack.assert_quiet()
        counters = stack.counters()
        assert counters["finished_abort"] == 1
        assert counters["accepted"] - 1 == counters.get("finished_length", 0)
        for worker in stack.workers.values():
            assert worker.worker.engine.num_failed_steps == 0
        completed = case.client.generate_text(token_ids=PROMPT, max_tokens=3, temperature=0.0)
        assert completed.usage.completion_tokens == 3


def test_a_cancel_after_the_end_changes_nothing(folder: Path) -> None:
    with case_of(folder, {}) as case:
        stream = finished_but_unread(case)
        assert not case.client.cancel(stream.request_id)
        *_, last = stream
        assert isinstance(last, pb.Finished) and last.finish_reason == "length"
        case.stack.assert_quiet()
        assert "finished_abort" not in case.stack.counters()


def test_a_client_that_loses_its_channel_has_all_its_requests_cancelled(folder: Path) -> None:
    with case_of(folder, {}) as case:
        case.stack.prefill.runner.allow(1)
        with Client(case.stack.endpoint) as doomed:
            for _ in range(3):
                assert isinstance(next(doomed.generate(token_ids=PROMPT, **ENDLESS)), pb.Accepted)
        eventually("all are ended", lambda: case.stack.counters().get("finished_abort") == 3)
        case.stack.release()
        case.stack.assert_quiet()


@pytest.mark.parametrize("how", [by_call, by_leaving], ids=lambda how: how.__name__)
def test_a_long_prefill_stops_within_the_chunk_that_is_being_computed(
    folder: Path, how: Callable[[Case, GenerateStream], None]
) -> None:
    with case_of(folder, {}) as case:
        prefill = case.stack.prefill
        told = arrival_of_cancel(prefill)
        prefill.runner.allow(2)
        stream = case.begin([5] * 160)  # twenty chunks
        eventually("two chunks are computed", lambda: prefill.runner.num_steps == 2)
        prefill.runner.wait_held()
        with suppress(KVFerryError):
            how(case, stream)
        assert told.wait(60), "the cancel did not come"
        prefill.runner.allow(None)
        case.stack.assert_quiet()
        assert prefill.runner.num_steps == 3  # the one that was running, and no more
        assert prefill.runner.batches == [8, 8, 8]


def arrival_of_cancel(worker: StackWorker) -> threading.Event:
    """Set when a cancel of a prefill leg has reached the worker's inbox."""
    arrived = threading.Event()
    network = worker.process._network
    pass_on = network._on_envelope

    def watch(envelope: Envelope) -> None:
        pass_on(envelope)
        if isinstance(envelope.body, CancelLeg) and envelope.body.leg is Leg.PREFILL:
            arrived.set()

    network._on_envelope = watch
    return arrived


def test_the_states_are_what_they_are_called(folder: Path) -> None:
    """The worker's own word on two of them, for the router does not see so far."""
    reach, settings = STATES["transferring"]
    with case_of(folder, settings) as case:
        reach(case)
        ref = case.stack.router.ref
        (item,) = case.stack.decode.worker.roles[0].held(ref)
        assert item.state is LegState.RESERVED
        assert "pinned" in {name for r in case.stack.audits() for name, n in r.counts if n}
        assert len(list(case.stack.decode.worker.reads.owners())) == 6
    reach, settings = STATES["preempted"]
    with case_of(folder, settings) as case:
        reach(case)
        scheduler = case.stack.decode.worker.engine.scheduler
        assert [s.num_preemptions for s in scheduler.waiting] == [1]
