"""Whatever a body holds, the answer is a success or a refusal that says why, and it comes."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from kvferry.cluster.http_door.bodies import (
    NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from kvferry.protos import kvferry_pb2 as pb
from tests.stack import LONG_S, Stack

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FAST = {"max_tokens": 2, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
JSON_TYPE = {"content-type": "application/json"}

numbers = st.integers(-2, 5) | st.integers() | st.floats() | st.sampled_from([10**400, -(2**63)])
texts = st.text(max_size=5) | st.sampled_from(["\ud800", "\0", "x", "user", "text", "auto"])
scalars = st.none() | st.booleans() | numbers | texts
keys = st.sampled_from(["role", "content", "type", "text", "1", "-7", "include_usage"]) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a body of some of its fields with values of any kind."""
    path = draw(st.sampled_from(sorted(BODIES)))
    known = BODIES[path].model_fields
    body = {name: value for name, value in FAST.items() if name in known}
    names = st.sampled_from(sorted(known)) | st.sampled_from(sorted(NEUTRAL)) | texts
    body.update(draw(st.dictionaries(names, values, max_size=3)))
    return path, body


def assert_answered(answer: httpx2.Response, stack: Stack) -> None:
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        else:
            answer.json()
        return
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=bodies())
@example(case=("/v1/completions", {"prompt": [[]]}))
@example(case=("/v1/completions", {"prompt": "x", "temperature": 10**400}))
@example(case=("/v1/chat/completions", {"messages": [{"role": "user", "content": [[]]}]}))
@example(case=("/v1/chat/completions", {**FAST, "tools": [{"\ud800": 1}]}))
@example(case=("/detokenize", {"tokens": [-1, 10**400]}))
@example(case=("/tokenize", {"prompt": "x" * 100_000}))
def test_no_body_is_a_fault_of_ours(
    case: tuple[str, dict[str, Any]], http: httpx2.Client, stack: Stack
) -> None:
    path, body = case
    answer = http.post(path, content=json.dumps(body).encode(), headers=JSON_TYPE, timeout=LONG_S)
    assert_answered(answer, stack)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(BODIES)), content=st.binary(max_size=30))
def test_no_bytes_are_a_fault_of_ours(
    path: str, content: bytes, http: httpx2.Client, stack: Stack
) -> None:
    assert_answered(http.post(path, content=content, headers=JSON_TYPE), stack)


# Values that are as deep as JSON may be, where the door looks into them.
@pytest.mark.parametrize("depth", [100, 300, 600, 900, 990])
@pytest.mark.parametrize(
    "field", ["tools", "messages", "chat_template_kwargs", "stop", "prompt", "nonsense", "model"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_depth_is_a_fault_of_ours(
    path: str, field: str, depth: int, http: httpx2.Client, stack: Stack
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    content = json.dumps({**FAST, field: "HERE"}).replace('"HERE"', deep)
    if field in ("tools", "messages"):
        content = content.replace(deep, f"[{deep}]")
    assert_answered(http.post(path, content=content.encode(), headers=JSON_TYPE), stack)


def test_every_sampling_field_of_the_contract_has_its_field_here() -> None:
    """One that is missing is refused by name; but what gRPC takes this door should take."""
    fields = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert fields <= set(CompletionBody.model_fields)
    assert fields <= set(ChatBody.model_fields)
