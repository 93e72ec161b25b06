"""The clients give typed errors, and never take a broken stream for a finished one."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.client import AsyncClient, Client, Completion
from kvferry.cluster.client_stream import StreamChecker, build_request
from kvferry.cluster.errors import (
    Cancelled,
    ClusterUnreachable,
    DeadlineExceeded,
    KVFerryError,
    Overloaded,
    StreamError,
    WorkerLost,
)
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.fake_server import (
    HOLD,
    REQUEST_ID,
    FakeServer,
    Step,
    accepted,
    delta,
    finished,
)


def with_logprobs(event: pb.Delta, *token_ids: int) -> pb.Delta:
    event.logprobs.extend(pb.TokenLogprobs(token_id=i, logprob=-float(i)) for i in token_ids)
    return event


BROKEN: dict[str, Sequence[Step]] = {
    "repeats tokens": [accepted(), delta(0, 7, 8), delta(1, 8), finished(3)],
    "leaves out tokens": [accepted(), delta(0, 7), delta(2, 9), finished(2)],
    "does not start at 0": [accepted(), delta(1, 7), finished(1)],
    "without its terminal event": [accepted(), delta(0, 7)],
    "ends empty": [accepted()],
    "finished but not last": [accepted(), delta(0, 7), finished(1, is_last=False)],
    "after the last one": [accepted(), delta(0, 7), finished(1), delta(1, 8)],
    "which has finished": [accepted(), finished(0, is_last=False), delta(0, 8)],
    "before accepted": [delta(0, 7), finished(1)],
    "accepted twice": [accepted(), accepted(), finished(0)],
    "usage says": [accepted(), delta(0, 7), finished(2)],
    "of other tokens": [accepted(), with_logprobs(delta(0, 7, 8), 7), finished(2)],
}
GOOD: dict[str, Sequence[Step]] = {
    "coalesced": [accepted(), delta(0, 1, 2, text="a"), delta(2, 3, 4, 5, text="b"), finished(5)],
    "text after the ids": [accepted(), delta(0, 1), delta(1, text="é"), finished(1)],
    "no token": [accepted(), finished(0, reason="stop")],
    "logprobs": [accepted(), with_logprobs(delta(0, 7, 8), 7, 8), finished(2)],
}
FAILING: dict[str, Sequence[Step]] = {
    "refused": [InvalidRequest("top_p: got 2.0, wanted 0 < top_p <= 1")],
    "overloaded": [Overloaded("queue full", retry_after_s=1.5)],
    "lost": [accepted(), delta(0, 7), WorkerLost("decode-0 died")],
    "hangs": [accepted(), delta(0, 7), HOLD],
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({**BROKEN, **GOOD, **FAILING}) as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.endpoint) as connected:
        yield connected


Run = Callable[[str], Completion]


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, server: FakeServer) -> Run:
    def blocking(prompt: str) -> Completion:
        with Client(server.endpoint) as client:
            return client.generate_text(prompt)

    def in_a_loop(prompt: str) -> Completion:
        async def go() -> Completion:
            async with AsyncClient(server.endpoint) as client:
                return await client.generate_text(prompt)

        return asyncio.run(go())

    return blocking if request.param == "sync" else in_a_loop


@pytest.mark.parametrize("prompt", BROKEN)
def test_broken_streams_are_errors(run: Run, prompt: str) -> None:
    with pytest.raises(StreamError):
        run(prompt)


@pytest.mark.parametrize("prompt", BROKEN)
def test_the_error_says_what_was_broken(server: FakeServer, prompt: str) -> None:
    words = {
        "does not start at 0": "leaves out tokens",
        "ends empty": "without its terminal event",
        "finished but not last": "without its terminal event",
    }
    said = words.get(prompt, prompt)
    with Client(server.endpoint) as client, pytest.raises(StreamError, match=said):
        client.generate_text(prompt)


def test_completion_holds_what_was_streamed(run: Run) -> None:
    done = run("coalesced")
    assert done.request_id == REQUEST_ID
    assert done.output_token_ids == (1, 2, 3, 4, 5)
    assert done.text == "ab"
    assert done.finish_reason == "length"
    assert done.usage.completion_tokens == 5
    assert done.timing.ttft_s == 0.35
    assert done.transfer.blocks_moved == 2
    assert done.ttft_s is not None
    assert len(done.itl_s) == 4
    assert done.e2e_s >= done.ttft_s + sum(done.itl_s)


def test_text_may_lag_the_ids_and_output_may_be_empty(run: Run) -> None:
    assert run("text after the ids").text == "é"
    empty = run("no token")
    assert (empty.output_token_ids, empty.ttft_s, empty.itl_s) == ((), None, ())


def test_completion_holds_the_log_probabilities(run: Run) -> None:
    assert [entry.logprob for entry in run("logprobs").logprobs] == [-7.0, -8.0]
    assert run("coalesced").logprobs == () == run("coalesced").prompt_logprobs


def test_errors_are_typed(run: Run) -> None:
    with pytest.raises(InvalidRequest, match=r"top_p: got 2\.0"):
        run("refused")
    with pytest.raises(Overloaded) as overloaded:
        run("overloaded")
    assert overloaded.value.retry_after_s == 1.5
    with pytest.raises(WorkerLost, match="decode-0 died"):
        run("lost")


def test_request_id_is_known_even_of_a_refused_request(client: Client) -> None:
    stream = client.generate("refused")
    assert stream.request_id == ""
    with pytest.raises(InvalidRequest):
        next(stream)
    assert stream.request_id == REQUEST_ID


def test_deadline_ends_a_slow_stream(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate_text("hangs", timeout_s=0.3)


def test_closed_stream_cancels_its_request(client: Client, server: FakeServer) -> None:
    with client.generate("hangs") as stream:
        assert isinstance(next(stream), pb.Accepted)
        assert not server.left.is_set()
    assert server.left.wait(10)


def test_dropped_stream_cancels_its_request(client: Client, server: FakeServer) -> None:
    for event in client.generate("hangs"):
        assert isinstance(event, pb.Accepted)
        break
    gc.collect()
    assert server.left.wait(10)


def test_broken_stream_is_not_left_running(client: Client, server: FakeServer) -> None:
    server.scripts["gap then hold"] = [accepted(), delta(4, 7), HOLD]
    stream = client.generate("gap then hold")
    next(stream)
    with pytest.raises(StreamError):
        next(stream)
    assert server.left.wait(10)


def test_abandoned_async_stream_cancels_its_request(server: FakeServer) -> None:
    async def abandon() -> bool:
        async with AsyncClient(server.endpoint) as client:
            async for event in client.generate("hangs"):
                assert isinstance(event, pb.Accepted)
                break
            gc.collect()
            return await asyncio.to_thread(server.left.wait, 10)

    assert asyncio.run(abandon())


def test_cancelled_task_cancels_its_request(server: FakeServer) -> None:

    async def cancel() -> bool:
        async with AsyncClient(server.endpoint) as client:
            task = asyncio.create_task(client.generate_text("hangs"))
            assert await asyncio.to_thread(server.holding.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(server.left.wait, 10)

    assert asyncio.run(cancel())


def test_unary_calls(client: Client) -> None:
    assert client.cancel(REQUEST_ID)
    assert not client.cancel("unknown")
    assert client.status().model.name == "tiny"
    assert [pool.worker_id for pool in client.audit().pools] == ["prefill-0", "decode-0"]
    assert [pool.worker_id for pool in client.audit("decode-0").pools] == ["decode-0"]
    assert client.health()


def test_async_unary_calls(server: FakeServer) -> None:
    async def calls() -> None:
        async with AsyncClient(server.endpoint) as client:
            assert await client.cancel(REQUEST_ID)
            assert (await client.status()).ready
            assert len((await client.audit()).pools) == 2
            assert await client.health()

    asyncio.run(calls())


def test_unreachable_endpoint_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, but nobody listens
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        with Client(endpoint) as client, pytest.raises(ClusterUnreachable, match=endpoint):
            client.status()


def test_sampling_parameters_that_are_not_given_stay_unset(
    client: Client, server: FakeServer
) -> None:
    client.generate_text("one two", max_tokens=2, temperature=0.0, stop=["x"])
    sampling = server.requests[-1].sampling
    assert {field.name for field, _ in sampling.ListFields()} == {
        "max_tokens",
        "temperature",
        "stop",
    }


def test_every_kind_of_input_reaches_the_server(client: Client, server: FakeServer) -> None:
    client.generate_text(token_ids=[5, 6], max_tokens=1)
    assert list(server.requests[-1].token_ids.ids) == [5, 6]
    client.generate_text(chat=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert server.requests[-1].chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    ("prompt", "options", "names"),
    [
        (None, {}, "no input"),
        ("a", {"token_ids": [1]}, "prompt and token_ids"),
        ("a", {"max_token": 3}, "max_token"),
        ("a", {"max_tokens": 2**40}, "max_tokens: got 1099511627776"),
        ("a", {"seed": -1}, "seed: got -1"),
        ("a", {"stop": "ab"}, "stop: got 'ab', wanted a list"),
        ("a", {"bad_words": "ab"}, "bad_words: got 'ab', wanted a list"),
        (None, {"chat": [{"roll": "user"}]}, "encoded"),
        (None, {"chat": [{"role": "user", "tool_calls": ["x"]}]}, "encoded.*tool_calls: got 'x'"),
        (None, {"chat": [{"role": "user", "tool_calls": [{"x": {1}}]}]}, "encoded"),
        (None, {"chat": [], "tools": [[1]]}, r"encoded.*tools: got \[1\], wanted an object"),
        (None, {"chat": [], "tools": [{"x": float("nan")}]}, "encoded"),
        (None, {"chat": [], "template_args": [1]}, "template_args: got"),
        ("a", {"tools": [{}]}, "tools without chat"),
        ("a", {"continue_final_message": True, "template_args": {}}, "continue_.* and template_a"),
    ],
)
def test_requests_that_cannot_be_built_name_the_cause(
    prompt: str | None, options: dict[str, object], names: str
) -> None:
    with pytest.raises(InvalidRequest, match=names):
        build_request(prompt, options)  # type: ignore[arg-type]  # wrong on purpose


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))


def responses(parts: list[list[int]]) -> list[pb.GenerateResponse]:
    stream = [pb.GenerateResponse(request_id="r", accepted=accepted())]
    index = 0
    for ids in parts:
        stream.append(pb.GenerateResponse(request_id="r", delta=delta(index, *ids)))
        index += len(ids)
    return [*stream, pb.GenerateResponse(request_id="r", finished=finished(index))]


def check(stream: list[pb.GenerateResponse]) -> None:
    checker = StreamChecker()
    for response in stream:
        checker.check(response)
    checker.end()


@given(splits())
def test_any_split_into_deltas_is_accepted(parts: list[list[int]]) -> None:
    check(responses(parts))


@given(splits(), st.data())
def test_a_dropped_or_doubled_event_is_always_found(
    parts: list[list[int]], data: st.DataObject
) -> None:
    stream = responses(parts)
    carrying = [
        at for at, r in enumerate(stream) if r.WhichOneof("event") != "delta" or r.delta.token_ids
    ]
    at = data.draw(st.sampled_from(carrying))
    broken = data.draw(
        st.sampled_from([stream[:at] + stream[at + 1 :], [*stream[: at + 1], *stream[at:]]])
    )
    with pytest.raises(StreamError):
        check(broken)


def test_an_event_of_another_request_is_found() -> None:
    stream = responses([[1]])
    stream[1].request_id = "other"
    with pytest.raises(StreamError, match="other"):
        check(stream)


def test_cancelled_on_the_server_is_a_typed_error(client: Client, server: FakeServer) -> None:
    server.scripts["is cancelled"] = [accepted(), Cancelled("by another connection")]
    with pytest.raises(KVFerryError) as raised:
        client.generate_text("is cancelled")
    assert type(raised.value) is Cancelled
