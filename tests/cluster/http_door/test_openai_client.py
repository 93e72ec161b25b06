"""OpenAI's own Python client, unmodified, against the door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from kvferry.cluster.errors import Overloaded, WorkerLost
from kvferry.cluster.routed_request import FAILED, RequestEnd
from kvferry.engine.request import RequestSpec
from kvferry.protos import kvferry_pb2 as pb
from tests.fakes import stub_output
from tests.stack import LONG_S, Stack, eventually

MODEL = "stub"
HI: Any = [{"role": "user", "content": "hi"}]
PROMPT = [5, 6, 7]
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=LONG_S
    ) as connected:
        yield connected


def decoded(stack: Stack, ids: list[int]) -> str:
    return stack.node.intake.tokenizer.decode(ids)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvferry"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here") as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_completions_with_everything(client: OpenAI, stack: Stack) -> None:
    completion = client.completions.create(
        model=MODEL,
        prompt=[PROMPT, [9, 8]],
        max_tokens=5,
        n=2,
        logprobs=1,
        seed=7,
        logit_bias={"3": 1},
        presence_penalty=0.5,
        frequency_penalty=0.25,
        temperature=0.5,
        top_p=0.5,
        user="me",
        extra_body={"top_k": 3, "min_p": 0.1, **IGNORE_EOS},
    )
    texts = [decoded(stack, stub_output(p, 5, branch=b)) for p in (PROMPT, [9, 8]) for b in (0, 1)]
    assert [choice.text for choice in completion.choices] == texts
    for choice in completion.choices:
        assert choice.finish_reason == "length" and choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.text_offset or ()) == 5
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 20, 25)
    assert completion._request_id is not None and completion.id == f"cmpl-{completion._request_id}"


def test_chat_and_its_stream_say_the_same(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HI, "max_completion_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.tool_calls is None
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or ()) == 9
    with client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 9
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens  # the first has left its prompt there


def test_an_answer_can_be_said_back_as_it_came(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "max_tokens": 3}
    first = client.chat.completions.create(messages=HI, **options)
    history: Any = [*HI, first.choices[0].message, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(messages=history, **options).choices
    dumped: Any = [*HI, first.choices[0].message.model_dump(), *HI]
    assert client.chat.completions.create(messages=dumped, **options).choices


def test_the_client_s_own_stream_helper_gathers_the_answer(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HI, "max_tokens": 100, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 :][:2]
    with client.chat.completions.stream(**options, stop=stop) as stream:
        kinds = {event.type for event in stream}
        gathered = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert gathered.choices[0].message.content == text[: text.index(stop)]


def test_stop(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 100, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:2]
    (choice,) = client.completions.create(**options, stop=[stop]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_tools_go_into_the_prompt_or_are_refused(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    options: Any = {"model": MODEL, "messages": HI, "max_tokens": 2, "tools": [tool]}
    assert client.chat.completions.create(**options, tool_choice="auto").choices
    with pytest.raises(openai.BadRequestError, match="tool_choice") as caught:
        client.chat.completions.create(**options, tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_errors_are_the_client_s_own_classes(
    client: OpenAI, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: got -1") as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    for error, cls in (
        (Overloaded("full", 0.5), openai.RateLimitError),
        (WorkerLost("gone"), openai.InternalServerError),
        (ZeroDivisionError("bug"), openai.InternalServerError),
    ):

        def prepare(request: pb.GenerateRequest, error: Exception = error) -> RequestSpec:
            raise error

        monkeypatch.setattr(stack.node.intake, "prepare", prepare)
        with pytest.raises(cls, match=str(error)) as caught:
            client.completions.create(model=MODEL, prompt="x")
        assert isinstance(caught.value, openai.APIStatusError)
        wait = caught.value.response.headers.get("retry-after-ms")
        assert wait == ("500" if isinstance(error, Overloaded) else None)


def test_a_stream_that_fails_raises(client: OpenAI, stack: Stack) -> None:
    stack.decode.runner.allow(2)
    stream = client.completions.create(
        model=MODEL, prompt="xyz", max_tokens=50, stream=True, extra_body=IGNORE_EOS
    )
    next(stream)
    stack.decode.runner.wait_held()

    def fail() -> None:
        (request,) = stack.router.requests.values()
        error = WorkerLost("decode-0 died")
        stack.router._end(request, RequestEnd(FAILED, error), stack.node.clock())

    stack.on_loop(fail)
    with pytest.raises(openai.APIError, match="decode-0 died"):
        list(stream)
    stack.release()
    stack.assert_quiet()


def test_closing_a_stream_cancels_its_request(client: OpenAI, stack: Stack) -> None:
    stack.decode.runner.allow(3)
    before = stack.counters().get("finished_abort", 0)
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=60, stream=True, extra_body=IGNORE_EOS
    )
    next(stream)
    stack.decode.runner.wait_held()
    stream.close()
    eventually("it is cancelled", lambda: stack.counters().get("finished_abort", 0) > before)
    stack.release()
    stack.assert_quiet()


def test_async_streams_side_by_side(stack: Stack) -> None:
    prompts = [[9 + k, 7, 5 + k] for k in range(6)]

    async def one(client: AsyncOpenAI, prompt: list[int]) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=20, stream=True, extra_body=IGNORE_EOS
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def together() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="none", timeout=LONG_S
        ) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    texts = asyncio.run(together())
    assert texts == [decoded(stack, stub_output(prompt, 20)) for prompt in prompts]


def test_the_raw_body_is_json_with_nothing_after_it(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1)
    assert json.loads(raw.text)["object"] == "text_completion"
