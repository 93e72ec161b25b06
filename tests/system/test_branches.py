"""Several outputs of one prompt, through gRPC and the command line of a real cluster."""

from __future__ import annotations

import json

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.client import Client, Completion
from kvferry.protos import kvferry_pb2 as pb
from tests.system.pools import assert_quiet
from tests.system.processes import Served
from tests.system.test_serving import PROMPT, after_tokens

LONG = [(i * 6113) % 40_000 + 1000 for i in range(150)]


def sampled(client: Client, n: int, token_ids: list[int] = LONG) -> Completion:
    return client.generate_text(
        token_ids=token_ids, n=n, temperature=0.9, seed=11, max_tokens=9, ignore_eos=True
    )


def test_four_outputs_are_moved_as_one_and_counted_each(client: Client) -> None:
    other = [token + 1 for token in LONG]  # so that nothing of the first is found again
    one, four = sampled(client, 1), sampled(client, 4, other)
    assert four.transfer.bytes_moved == one.transfer.bytes_moved > 0
    assert four.usage.completion_tokens == 36
    assert [branch.branch for branch in four.branches] == [0, 1, 2, 3]
    assert len({branch.text for branch in four.branches}) == 4
    assert all(len(branch.output_token_ids) == 9 for branch in four.branches)
    assert {branch.finish_reason for branch in four.branches} == {"length"}
    assert four.finished.recomputed_prompt_tokens == 0


def test_the_first_output_is_that_of_a_request_for_one(client: Client) -> None:
    one, four = sampled(client, 1), sampled(client, 4)
    assert four.output_token_ids == one.output_token_ids
    assert four.text == one.text


def test_a_cancelled_stream_of_several_leaves_nothing(client: Client) -> None:
    with client.generate(PROMPT, n=3, temperature=0.8, max_tokens=400, ignore_eos=True) as stream:
        after_tokens(stream, 8)
        assert client.cancel(stream.request_id)
        ends = [event for event in stream if isinstance(event, pb.Finished)]
    assert [end.finish_reason for end in ends] == ["abort"] * 3
    assert [end.is_last for end in ends] == [False, False, True]
    assert_quiet(client)


def test_the_command_prints_every_output(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--endpoint", served.endpoint, "--max-tokens", "6", "--ignore-eos", "--seed", "3"]
    assert main(["generate", PROMPT, "--n", "3", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines if line.startswith("[")] == ["[0]", "[1]", "[2]"]
    assert main(["generate", PROMPT, "--n", "3", "--json", *where]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert [branch["branch"] for branch in request["branches"]] == [0, 1, 2]
    assert request["text"] == request["branches"][0]["text"]
    assert request["usage"]["completion_tokens"] == 18
