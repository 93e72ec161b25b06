"""The peer's answers are read as they came, and nothing that is not whole passes for an answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from benchmarks.peers.completions_api import (
    CompletionStream,
    PeerAnswer,
    PeerFailed,
    completion_body,
    sender,
)

URL = "http://127.0.0.1:1"


def data(value: object) -> str:
    return f"data: {json.dumps(value)}"


def tokens(*ids: int) -> str:
    return data({"choices": [{"index": 0, "text": "x", "token_ids": list(ids)}]})


def usage(count: int) -> str:
    return data({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": 9}})


DONE = "data: [DONE]"


def read(*lines: str, started: float = 10.0) -> CompletionStream:
    """A stream whose lines come one second after the other."""
    stream = CompletionStream(started)
    for number, line in enumerate(lines, start=1):
        stream.add(line, started + number)
    return stream


def test_every_token_has_the_time_of_its_event() -> None:
    stream = read(tokens(5), "", tokens(6, 7), ": a comment", tokens(8), usage(4), DONE)
    assert stream.answer(20.0) == PeerAnswer((5, 6, 7, 8), 1.0, (2.0, 0.0, 2.0), 10.0)


def test_events_without_tokens_are_no_tokens() -> None:
    stream = read(tokens(), tokens(5), usage(1), "event: x", "id: 3", DONE)
    assert stream.answer(20.0) == PeerAnswer((5,), 2.0, (), 10.0)


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(PeerFailed, match="ended early, after 1 tokens"):
        read(tokens(5), usage(1)).answer(20.0)


@pytest.mark.parametrize("counted", [1, 3])
def test_tokens_and_usage_must_agree(counted: int) -> None:
    with pytest.raises(PeerFailed, match=f"got 2 tokens, but usage says {counted}"):
        read(tokens(5), tokens(6), usage(counted), DONE).answer(20.0)


def test_an_answer_without_usage_is_none() -> None:
    with pytest.raises(PeerFailed, match="usage says None"):
        read(tokens(5), DONE).answer(20.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (data({"error": {"message": "out of blocks"}}), "out of blocks"),
        (data({"choices": [{"index": 0, "text": "x"}]}), "no token ids"),
        ("data: {", "no JSON"),
        (data([1]), "holds an error"),
    ],
)
def test_what_cannot_be_read_is_an_error(line: str, message: str) -> None:
    with pytest.raises(PeerFailed, match=message):
        read(tokens(5), line)


def test_nothing_may_follow_the_last_event() -> None:
    with pytest.raises(PeerFailed, match="after the last one"):
        read(tokens(5), usage(1), DONE, tokens(6))


Handler = Callable[[httpx2.Request], httpx2.Response]


def ask(handler: Handler) -> PeerAnswer:
    """The answer of a server that is a function, by a clock that counts its readings."""
    ticks = itertools.count()

    async def one() -> Any:
        transport = httpx2.MockTransport(handler)
        async with httpx2.AsyncClient(transport=transport) as client:
            return await sender(client, URL, "m", lambda: float(next(ticks)))([1, 2], 2)

    answer = asyncio.run(one())
    assert isinstance(answer, PeerAnswer)
    return answer


def test_a_request_says_exactly_what_is_wanted() -> None:
    seen: list[httpx2.Request] = []

    def serve(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, text="\n\n".join([tokens(5), tokens(6), usage(2), DONE]))

    answer = ask(serve)
    assert answer.output_token_ids == (5, 6)
    assert answer.ttft_s is not None
    assert answer.ttft_s < answer.e2e_s
    assert str(seen[0].url) == f"{URL}/v1/completions"
    body = json.loads(seen[0].content)
    assert body == completion_body("m", [1, 2], 2)
    assert body["prompt"] == [1, 2]
    assert body["max_tokens"] == 2
    assert (body["ignore_eos"], body["temperature"], body["stream"]) == (True, 0.0, True)


def test_a_refusal_says_the_status_and_the_servers_words() -> None:
    with pytest.raises(PeerFailed, match="status 400: too long"):
        ask(lambda _: httpx2.Response(400, text="too long"))


def test_a_lost_connection_is_the_peers_failure() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield f"{tokens(5)}\n\n".encode()
        raise httpx2.ReadError("reset")

    with pytest.raises(PeerFailed, match="ReadError: reset"):
        ask(lambda _: httpx2.Response(200, content=lines()))
