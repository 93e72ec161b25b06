"""``/v1/chat/completions``, ``/tokenize``, ``/detokenize``: conversations in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.http_door.test_completions import events
from tests.engine.tiny_tokenizers import byte_level
from tests.fakes import stub_output
from tests.stack import LONG_S, Stack

# Everything that a template sees of a conversation.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]"
    "{% endfor %}{{ m.tool_call_id }}{{ m.name }}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
HI = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    byte_level(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Stack(folder, http=True) as running:
        yield running
        running.assert_quiet()


def chat(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    read = answer.json()
    assert isinstance(read, dict)
    return read


def prompt_of(http: httpx2.Client, stack: Stack, **body: Any) -> str:
    """What the template made of a conversation; both routes must agree."""
    answer = chat(http, max_tokens=1, return_token_ids=True, **body)
    ids = answer["choices"][0]["prompt_token_ids"]
    if "tool_choice" not in body:
        assert http.post("/tokenize", json=body).json()["tokens"] == ids
    return stack.node.intake.tokenizer.decode(ids)


def test_an_answer_has_openai_s_shape(http: httpx2.Client, stack: Stack) -> None:
    answer = chat(http, messages=HI, max_completion_tokens=6, **GREEDY)
    (choice,) = answer["choices"]
    prompt = stack.node.intake.tokenizer.encode("<user>hi<assistant>")
    text = stack.node.intake.tokenizer.decode(stub_output(prompt, 6))
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"]["completion_tokens"] == 6


def test_a_chat_without_a_limit_has_the_model_s(http: httpx2.Client, stack: Stack) -> None:
    answer = chat(http, messages=HI, **GREEDY)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == stack.max_model_len


def test_a_stream_opens_with_the_role_of_every_choice(http: httpx2.Client) -> None:
    body = {"messages": HI, "max_tokens": 5, "n": 2, "logprobs": True, **GREEDY}
    whole = chat(http, **body)
    options = {"include_usage": True}
    answer = http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": options}
    )
    *chunks, last = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert last["choices"] == [] and last["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"],
    }
    for index in (0, 1):
        opening, *pieces, ending = [
            choice for c in chunks for choice in c["choices"] if choice["index"] == index
        ]
        assert opening["delta"] == {"role": "assistant", "content": ""}
        assert ending["delta"] == {} and ending["finish_reason"] == "length"
        expected = whole["choices"][index]
        text = "".join(piece["delta"]["content"] for piece in pieces)
        assert text == expected["message"]["content"]
        logprobs = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert logprobs == expected["logprobs"]["content"]


def test_logprobs_name_tokens_by_text_and_bytes(http: httpx2.Client, stack: Stack) -> None:
    answer = chat(http, messages=HI, max_tokens=8, logprobs=True, top_logprobs=1, **GREEDY)
    prompt = stack.node.intake.tokenizer.encode("<user>hi<assistant>")
    entries = answer["choices"][0]["logprobs"]["content"]
    for place, (entry, token) in enumerate(zip(entries, stub_output(prompt, 8), strict=True)):
        assert bytes(entry["bytes"]) == stack.node.intake.tokenizer.token_bytes(token)
        assert entry["logprob"] == -float(len(prompt) + place)
        top = entry.pop("top_logprobs")
        assert top == [entry]


def test_every_part_of_a_conversation_reaches_the_template(
    http: httpx2.Client, stack: Stack
) -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "c", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    said = "<system>a\nb<user>cAnn<assistant>[weather Bern]<tool>d1"
    assert prompt_of(http, stack, messages=messages) == f"{said}<assistant>"
    kwargs = {"mood": "calm"}
    body = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": kwargs}
    assert prompt_of(http, stack, **body) == f"{said}weathercalm<assistant>"
    assert prompt_of(http, stack, **body, tool_choice="auto") == f"{said}weathercalm<assistant>"
    assert prompt_of(http, stack, **body, tool_choice="none") == f"{said}calm<assistant>"
    continued = [*messages, {"role": "assistant", "content": "It is"}]
    assert (
        prompt_of(http, stack, messages=continued, continue_final_message=True)
        == f"{said}<assistant>It is"
    )


def test_a_tokenized_text_comes_back(http: httpx2.Client, stack: Stack) -> None:
    body = {"model": "stub", "prompt": "grüße two words", "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    tokens = answer["tokens"]
    assert answer["count"] == len(tokens) == len(answer["token_strs"])
    assert answer["max_model_len"] == stack.max_model_len
    back = http.post("/detokenize", json={"tokens": tokens}).json()
    assert back == {"prompt": f"<|im_start|>{body['prompt']}"}  # the tokenizer's own beginning


def message(content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def call(function: Any) -> dict[str, Any]:
    return message(tool_calls=[{"function": function}])


REFUSED = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [3]}, "messages[0]", "dictionary"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (message(3), "messages[0].content", "string"),
    (message([{"type": "image_url"}]), "messages[0].content[0]", "'image_url', wanted text"),
    (message([{"type": "text"}]), "messages[0].content[0].text", "string"),
    (message(audio={"id": "x"}), "messages[0].audio", "not supported"),
    (message(tool_calls=3), "messages[0].tool_calls", "list"),
    (call({"arguments": "{"}), "messages[0].tool_calls[0].function.arguments", "not valid JSON"),
    (call({"arguments": "[]"}), "messages[0].tool_calls[0].function.arguments", "object"),
    ({**message(), "tools": [3]}, "tools[0]", "dictionary"),
    ({**message(), "tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    ({**message(), "tool_choice": {"type": "function"}}, "tool_choice", "'none' or 'auto'"),
    ({**message(), "functions": [{}]}, "functions", "not supported"),
    ({**message(), "response_format": {"type": "json_object"}}, "response_format", "not supp"),
    ({**message(), "logprobs": 3}, "logprobs", "boolean"),
    ({**message(), "top_logprobs": 3}, "top_logprobs", "without logprobs"),
    ({**message(), "logprobs": True, "top_logprobs": 21}, "top_logprobs", "wanted 0 to 20"),
    ({**message(), "max_completion_tokens": 0}, "max_completion_tokens", "wanted 1 to"),
    ({**message(), "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "one"),
    ({**message(), "parallel_tool_calls": False}, "parallel_tool_calls", "not supported"),
    (
        {**message(), "chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
        "leave it out",
    ),
    (
        {**message(), "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "one of them",
    ),
]


@pytest.mark.parametrize(("body", "param", "said"), REFUSED)
def test_a_conversation_is_refused_by_the_field_s_own_name(
    body: dict[str, Any], param: str, said: str, http: httpx2.Client
) -> None:
    answer = http.post("/v1/chat/completions", json=body, timeout=LONG_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ") and said in error["message"]
