"""The sampling flags of ``kvferry generate``, and what it shows of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.cluster.cli import main
from kvferry.cluster.client_stream import Sampling
from kvferry.protos import kvferry_pb2 as pb
from tests.cluster import documents
from tests.cluster.fake_server import FakeServer, Step, accepted, finished

ENTRIES = [
    pb.TokenLogprobs(token_id=7, logprob=-0.25, top={9: -1.5, 7: -0.25}),
    pb.TokenLogprobs(token_id=8, logprob=-3.0, top={1: -0.5, 2: -0.5}),
]
WITH_LOGPROBS: list[Step] = [
    accepted(),
    pb.Delta(index=0, token_ids=[7], logprobs=ENTRIES[:1], prompt_logprobs=ENTRIES[1:]),
    pb.Delta(index=1, token_ids=[8], text="x", logprobs=ENTRIES[1:]),
    finished(2),
]

# flag with arguments: field, value on the wire
FLAGS: dict[str, tuple[str, Any]] = {
    "--max-tokens 3": ("max_tokens", 3),
    "--min-tokens 2": ("min_tokens", 2),
    "--temperature 0": ("temperature", 0.0),
    "--top-p 0.5": ("top_p", 0.5),
    "--top-k 4": ("top_k", 4),
    "--min-p 0.25": ("min_p", 0.25),
    "--repetition-penalty 1.5": ("repetition_penalty", 1.5),
    "--presence-penalty -1": ("presence_penalty", -1.0),
    "--frequency-penalty 0.5": ("frequency_penalty", 0.5),
    "--logit-bias 3=-5 --logit-bias 4=2.5": ("logit_bias", {3: -5.0, 4: 2.5}),
    "--bad-word a --bad-word b": ("bad_words", ["a", "b"]),
    "--n 2": ("n", 2),
    "--seed 9": ("seed", 9),
    "--stop a --stop b": ("stop", ["a", "b"]),
    "--stop-token-id 5 --stop-token-id 6": ("stop_token_ids", [5, 6]),
    "--include-stop": ("include_stop_str_in_output", True),
    "--ignore-eos": ("ignore_eos", True),
    "--show-special-tokens": ("skip_special_tokens", False),
    "--logprobs 2": ("logprobs", 2),
    "--prompt-logprobs 0": ("prompt_logprobs", 0),
    "--num-beams 4": ("num_beams", 4),
    "--length-penalty -0.5": ("length_penalty", -0.5),
    "--early-stopping never": ("early_stopping", "never"),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer({"hi": WITH_LOGPROBS}) as running:
        monkeypatch.setenv("KVFERRY_ENDPOINT", running.endpoint)
        yield running


def plain(value: Any) -> Any:
    """A protobuf container as Python's own."""
    if hasattr(value, "items"):
        return dict(value)
    return value if isinstance(value, bool | int | float | str) else list(value)


def test_every_sampling_parameter_has_a_flag() -> None:
    assert {field for field, _ in FLAGS.values()} == set(Sampling.__annotations__)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_sends_its_field_and_no_other(server: FakeServer, flags: str) -> None:
    field, value = FLAGS[flags]
    assert main(["generate", "hi", *flags.split()]) == 0
    sampling = server.requests[-1].sampling
    assert plain(getattr(sampling, field)) == value
    sent = {descriptor.name for descriptor, _ in sampling.ListFields()}
    assert sent == {field}


@pytest.mark.parametrize("bias", ["5", "x=1", "5=x", "=1", ""])
def test_a_bias_that_is_none_is_a_usage_error(
    bias: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--logit-bias", bias]) == 2
    assert "wanted ID=X" in capsys.readouterr().err


def test_a_bias_given_twice_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--logit-bias", "5=1", "--logit-bias", "5=-100"]) == 2
    assert "token id 5 is given twice" in capsys.readouterr().err


def test_logprobs_are_in_the_document_likeliest_first(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--logprobs", "2", "--prompt-logprobs", "2", "--json"]) == 0
    (request,) = documents.parse(capsys.readouterr().out)["requests"]
    first, second = request["logprobs"]
    assert first == {
        "token_id": 7,
        "logprob": -0.25,
        "top": [{"token_id": 7, "logprob": -0.25}, {"token_id": 9, "logprob": -1.5}],
    }
    assert [entry["token_id"] for entry in second["top"]] == [1, 2]
    assert request["prompt_logprobs"] == [second]


def test_logprobs_are_null_in_the_document_unless_they_came(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one", "--max-tokens", "2", "--json"]) == 0
    (request,) = documents.parse(capsys.readouterr().out)["requests"]
    assert request["logprobs"] is None and request["prompt_logprobs"] is None


def test_people_see_logprobs_beside_the_text(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--logprobs", "2", "--prompt-logprobs", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "x\n"
    assert "7   -0.250  7 -0.250  9 -1.500" in printed.err
    assert "prompt" in printed.err and "output" in printed.err


def test_salt_and_priority_are_sent_where_they_were_given(server: FakeServer) -> None:
    assert main(["generate", "hi", "--cache-salt", "tenant", "--priority", "-3"]) == 0
    assert (server.requests[-1].cache_salt, server.requests[-1].priority) == ("tenant", -3)
    assert main(["generate", "hi"]) == 0
    assert (server.requests[-1].cache_salt, server.requests[-1].priority) == ("", 0)
