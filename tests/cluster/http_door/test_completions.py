"""``/v1/completions``: OpenAI's shapes around the tokens that the model gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from benchmarks.peers.completions_api import PeerAnswer
from benchmarks.peers.completions_api import client as peer
from kvferry.cluster.client import Client
from tests.fakes import stub_output
from tests.stack import Stack

PROMPT = [5, 6, 7, 8, 9]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def post(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    read = answer.json()
    assert isinstance(read, dict)
    return read


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; it must have ended well."""
    assert text.endswith("data: [DONE]\n\n")
    lines = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def stream(http: httpx2.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def test_an_answer_has_openai_s_shape(http: httpx2.Client, stack: Stack) -> None:
    answer = post(http, model="stub", prompt=PROMPT, max_tokens=6, return_token_ids=True, **GREEDY)
    (choice,) = answer["choices"]
    ids = stub_output(PROMPT, 6)
    text = stack.node.intake.tokenizer.decode(ids)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-") and answer["model"] == "stub"
    assert choice == {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": PROMPT,
    }
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 11


def test_both_doors_give_the_same_tokens_and_usage(http: httpx2.Client, stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        ours = client.generate_text("one and the same", max_tokens=9, temperature=0.0)
        again = client.generate_text("one and the same", max_tokens=9, temperature=0.0)
    answer = post(http, prompt="one and the same", max_tokens=9, return_token_ids=True, **GREEDY)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(ours.output_token_ids)
    assert choice["text"] == ours.text
    usage = answer["usage"]
    assert usage["prompt_tokens"] == ours.usage.prompt_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": again.usage.cached_tokens}
    assert again.usage.cached_tokens > 0


def test_a_completion_without_a_limit_has_openai_s(http: httpx2.Client) -> None:
    assert post(http, prompt="x", **GREEDY)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", 1),
        (["abc"], 1),
        ([5, 6], 1),
        ([[5, 6]], 1),
        (["abc", "de"], 2),
        ([[5, 6], [7], [8, 9]], 3),
    ],
)
def test_every_kind_of_prompt_is_taken(prompt: Any, expected: int, http: httpx2.Client) -> None:
    answer = post(http, prompt=prompt, max_tokens=2, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == list(range(expected))
    assert answer["usage"]["completion_tokens"] == 2 * expected


def test_choices_of_a_batch_stand_in_the_order_of_prompts(http: httpx2.Client) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    body = {"prompt": prompts, "max_tokens": 4, "n": 2, "return_token_ids": True, **GREEDY}
    answer = post(http, **body)
    ids = [stub_output(prompt, 4, branch=branch) for prompt in prompts for branch in (0, 1)]
    assert [choice["token_ids"] for choice in answer["choices"]] == ids
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
        prompt for prompt in prompts for _ in (0, 1)
    ]
    streamed: dict[int, list[int]] = {}
    for event in stream(http, **body):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[index] for index in range(4)] == ids
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_is_the_answer_in_pieces(include_usage: bool, http: httpx2.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 7, "return_token_ids": True, "logprobs": 1, **GREEDY}
    whole = post(http, **body)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = stream(http, **body, **options)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 7
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (expected,) = whole["choices"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == expected["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    for name, values in expected["logprobs"].items():
        pieces = [choice["logprobs"][name] for choice in choices[:-1]]
        assert [value for piece in pieces for value in piece] == values


def test_logprobs_stand_beside_their_tokens(http: httpx2.Client, stack: Stack) -> None:
    answer = post(http, prompt=PROMPT, max_tokens=5, logprobs=1, return_token_ids=True, **GREEDY)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-5.0, -6.0, -7.0, -8.0, -9.0]  # the stub's, by position
    for token, top, logprob in zip(
        logprobs["tokens"], logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True
    ):
        assert top == {token: logprob}
    tokenizer = stack.node.intake.tokenizer
    ends = [len(tokenizer.decode(choice["token_ids"][:count])) for count in range(5)]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == 5
    # a token that ends within a character begins the next one where that character is
    assert all(offset <= end for offset, end in zip(offsets, ends, strict=True))


def test_prompt_logprobs_are_vllm_s(http: httpx2.Client) -> None:
    answer = post(http, prompt=PROMPT, max_tokens=1, prompt_logprobs=1, **GREEDY)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(PROMPT) - 1
    for place, (entry, token_id) in enumerate(zip(others, PROMPT[1:], strict=True), 1):
        assert entry[str(token_id)]["logprob"] == -float(place)
        assert entry[str(token_id)]["rank"] == 1


def test_prompt_logprobs_are_every_choice_s(http: httpx2.Client) -> None:
    prompts = [PROMPT, [9, 8, 7]]
    answer = post(http, prompt=prompts, max_tokens=2, n=2, prompt_logprobs=0, **GREEDY)
    shown = [[list(e or ()) for e in c["prompt_logprobs"]] for c in answer["choices"]]
    assert shown == [[[], *([str(token)] for token in p[1:])] for p in prompts for _ in (0, 1)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_shows_the_prompt_before_the_output(
    logprobs: int | None, streamed: bool, http: httpx2.Client
) -> None:
    body = {"max_tokens": 5, "logprobs": logprobs, "return_token_ids": True, **GREEDY}
    prompts = ["grüße, two words", "abc"]
    plain = post(http, prompt=prompts, **body)["choices"]
    if streamed:
        chunks = [c for e in stream(http, prompt=prompts, echo=True, **body) for c in e["choices"]]
    else:
        chunks = post(http, prompt=prompts, echo=True, **body)["choices"]
    for index, (prompt, choice) in enumerate(zip(prompts, plain, strict=True)):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == prompt + choice["text"]
        if logprobs is None:
            assert all(chunk["logprobs"] is None for chunk in mine)
            continue
        shown: dict[str, list[Any]] = {}
        for chunk in mine:
            for name, values in (chunk["logprobs"] or {}).items():
                shown.setdefault(name, []).extend(values)
        num_prompt = len(choice["prompt_token_ids"])
        # the stub says of each token where it stands
        wanted = [None, *(-float(place) for place in range(1, num_prompt + 5))]
        assert shown["token_logprobs"] == wanted
        assert shown["top_logprobs"][0] is None
        assert shown["tokens"][num_prompt:] == choice["logprobs"]["tokens"]
        offsets = [offset + len(prompt) for offset in choice["logprobs"]["text_offset"]]
        assert shown["text_offset"][num_prompt:] == offsets
        assert {len(values) for values in shown.values()} == {num_prompt + 5}


def test_an_echo_of_several_choices_is_in_each(http: httpx2.Client) -> None:
    answer = post(http, prompt="abc", max_tokens=2, n=2, echo=True, logprobs=0, **GREEDY)
    for choice in answer["choices"]:
        assert choice["text"].startswith("abc")
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -1.0, -2.0]


def test_a_stop_string_is_named_and_not_shown(http: httpx2.Client) -> None:
    text = post(http, prompt="abc", max_tokens=100, **GREEDY)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    for given in (stop, [stop, "never to be seen"]):
        (choice,) = post(http, prompt="abc", max_tokens=100, stop=given, **GREEDY)["choices"]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        assert choice["text"] == text[: text.index(stop)]


def test_a_stop_token_is_named_by_its_number(http: httpx2.Client) -> None:
    ids = stub_output(PROMPT, 8)
    (choice,) = post(
        http, prompt=PROMPT, max_tokens=8, stop_token_ids=[ids[4]], return_token_ids=True, **GREEDY
    )["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[4]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]


@pytest.fixture
def sampled(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The requests of the contract that reach the intake."""
    seen: list[Any] = []
    prepare = stack.node.intake.prepare

    def recording(request: Any) -> Any:
        seen.append(request)
        return prepare(request)

    monkeypatch.setattr(stack.node.intake, "prepare", recording)
    yield seen


def test_every_field_reaches_the_contract(http: httpx2.Client, sampled: list[Any]) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 3,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 4,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "seed": 2**64 - 1,
        "n": 2,
        "stop": ["zzzz"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "logprobs": 2,
        "skip_special_tokens": False,
        "bad_words": ["abc"],
        "prompt_logprobs": 0,
    }
    post(http, prompt="x", logit_bias={"7": -100, "8": 1.5}, cache_salt="s", user="me", **fields)
    (request,) = sampled
    for name, value in fields.items():
        got = getattr(request.sampling, name)
        assert (list(got) if isinstance(value, list) else got) == value, name
    assert dict(request.sampling.logit_bias) == {7: -100.0, 8: 1.5}
    assert request.cache_salt == "s"
    assert {field.name for field, _ in request.sampling.ListFields()} == {*fields, "logit_bias"}


@pytest.mark.parametrize(
    "neutral",
    [
        {"parallel_tool_calls": True},
        {"best_of": 1},
        {"suffix": None, "logprobs": None, "logit_bias": None, "stop": None, "nonsense": None},
        {"top_k": -1},
        {"use_beam_search": False, "response_format": {"type": "text"}},
        {"stream_options": None, "stream": False},
    ],
)
def test_what_asks_for_nothing_is_taken(neutral: dict[str, Any], http: httpx2.Client) -> None:
    assert post(http, prompt="x", max_tokens=1, **neutral)["usage"]["completion_tokens"] == 1


def test_the_bench_s_client_of_such_servers_takes_it_as_one(stack: Stack) -> None:
    async def ask() -> PeerAnswer:
        async with peer(stack.url, "stub") as send:
            answer = await send(PROMPT, 12)
        assert isinstance(answer, PeerAnswer)
        return answer

    assert list(asyncio.run(ask()).output_token_ids) == stub_output(PROMPT, 12)


@pytest.mark.parametrize(("early", "sent"), [(True, "true"), (False, "false"), ("never", "never")])
def test_beams_reach_the_contract(
    early: bool | str, sent: str, http: httpx2.Client, sampled: list[Any]
) -> None:
    post(http, prompt="x", max_tokens=2, num_beams=2, length_penalty=0.5, early_stopping=early)
    (request,) = sampled
    assert (request.sampling.num_beams, request.sampling.length_penalty) == (2, 0.5)
    assert request.sampling.early_stopping == sent
