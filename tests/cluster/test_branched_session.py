"""Several branches in one stream: each has its text and its end, and the client checks all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster import wire
from kvferry.cluster.client_stream import StreamChecker, Transcript
from kvferry.cluster.errors import StreamError
from kvferry.cluster.routed_request import RequestEnd, RoutedRequest
from kvferry.cluster.session import (
    BranchedSession,
    BranchEnd,
    Session,
    SessionEnd,
    SessionItem,
    TextDelta,
    coalesced,
)
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.request import Attempt, FinishReason
from kvferry.engine.stopping import Finish
from kvferry.engine.tokenizer import Tokenizer
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster.fake_server import delta
from tests.engine.tiny_tokenizers import byte_level
from tests.fakes import stub_spec

STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return byte_level(folder)


def listening(
    tokenizer: Tokenizer, num_branches: int
) -> tuple[RoutedRequest, BranchedSession, list[SessionItem]]:
    items: list[SessionItem] = []
    spec = stub_spec("r", [1], 50, num_branches=num_branches)
    sessions = [
        Session(spec, IncrementalDetokenizer(tokenizer, True), items.append) for _ in spec.branches
    ]
    listener = BranchedSession(sessions, items.append)
    return RoutedRequest(spec, listener, 0.0, 1, Attempt(1, 1), 0.0), listener, items


def test_each_branch_s_characters_are_put_together_apart(tokenizer: Tokenizer) -> None:
    _, listener, items = listening(tokenizer, 2)
    sign = tokenizer.encode("😀")
    assert len(sign) > 1
    letters = "abcd"[: len(sign)]
    word = [tokenizer.encode(letter)[0] for letter in letters]
    for place, pair in enumerate(zip(sign, word, strict=True)):
        for branch, token_id in enumerate(pair):
            listener.on_tokens(TokenRun(place, (token_id,), branch=branch), 0.0)
    text = {0: "", 1: ""}
    for item in items:
        assert isinstance(item, TextDelta)
        text[item.run.branch] += item.text
    assert text == {0: "😀", 1: letters}


def test_an_abort_ends_every_branch_that_goes_on_and_the_last_ends_the_stream(
    tokenizer: Tokenizer,
) -> None:
    request, listener, items = listening(tokenizer, 4)
    request.branches[1].finish = STOP
    listener.on_branch_end(1, STOP, 1.0)
    abort = Finish(FinishReason.ABORT)
    listener.on_end(request, RequestEnd(abort), 2.0)
    *before, last = items
    assert before == [BranchEnd(1, STOP), BranchEnd(0, abort), BranchEnd(2, abort)]
    assert last == SessionEnd(request, RequestEnd(abort, branch=3), 2.0)


def test_a_slow_client_gets_one_delta_per_branch_and_every_end() -> None:
    items: list[SessionItem] = [
        TextDelta(TokenRun(0, (1,)), "a"),
        TextDelta(TokenRun(0, (2,), branch=1), "b"),
        TextDelta(TokenRun(1, (3,)), "c"),
        BranchEnd(0, STOP),
        TextDelta(TokenRun(1, (4, 5), branch=1), "d"),
        BranchEnd(1, LENGTH),
    ]
    assert coalesced(items) == [
        TextDelta(TokenRun(0, (1, 3)), "ac"),
        TextDelta(TokenRun(0, (2, 4, 5), branch=1), "bd"),
        BranchEnd(0, STOP),
        BranchEnd(1, LENGTH),
    ]


def test_on_the_wire_a_branch_s_end_says_its_reason_and_only_the_last_the_usage(
    tokenizer: Tokenizer,
) -> None:
    request, _, _ = listening(tokenizer, 2)
    request.branches[0].delivered = [1, 2, 3]
    request.branches[1].delivered = [4]
    first = wire.branch_end("r", BranchEnd(1, Finish(FinishReason.STOP, 4))).finished
    assert first == pb.Finished(branch=1, finish_reason="stop", stop_reason="4")
    last = wire.finished(SessionEnd(request, RequestEnd(LENGTH), 9.0)).finished
    assert (last.branch, last.is_last, last.usage.completion_tokens) == (0, True, 4)
    shown = wire.delta("r", TextDelta(TokenRun(3, (9,), branch=1), "x")).delta
    assert (shown.branch, shown.index) == (1, 3)


def response(event: Any) -> pb.GenerateResponse:
    name = type(event).__name__.lower()
    return pb.GenerateResponse(request_id="r", **{name: event})


EVENTS = [
    pb.Accepted(prompt_tokens=3),
    delta(0, 5, text="a"),
    delta(0, 6, text="b", branch=1),
    pb.Finished(branch=1, finish_reason="stop", stop_reason="6"),
    delta(1, 7, 8, text="cd"),
    pb.Finished(finish_reason="length", usage=pb.Usage(completion_tokens=4), is_last=True),
]


def test_the_client_keeps_every_branch() -> None:
    checker, transcript = StreamChecker(), Transcript(0.0)
    for now, event in enumerate(EVENTS):
        transcript.add(checker.check(response(event)), float(now))
    checker.end()
    completion = transcript.completion("r")
    assert (completion.text, completion.finish_reason) == ("acd", "length")
    first, second = completion.branches
    assert (first.branch, first.output_token_ids, first.text) == (0, [5, 7, 8], "acd")
    assert (second.branch, second.output_token_ids, second.text) == (1, [6], "b")
    assert (second.finish_reason, second.stop_reason) == ("stop", "6")
    assert completion.itl_s == (3.0, 0.0), "the first branch's"


def test_the_client_counts_the_tokens_of_all_branches() -> None:
    checker = StreamChecker()
    for event in EVENTS[:-1]:
        checker.check(response(event))
    short = pb.Finished(finish_reason="length", usage=pb.Usage(completion_tokens=3), is_last=True)
    with pytest.raises(StreamError, match="got 4 tokens, but usage says 3"):
        checker.check(response(short))
