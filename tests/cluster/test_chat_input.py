"""Conversations cross the contract unchanged, and a field that cannot be read is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.chat_input import ChatOptions, build_chat, read_chat
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
SOME_OBJECTS = st.lists(OBJECTS, min_size=1, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.text(max_size=5), "content": st.text(max_size=9)},
        optional={
            "tool_calls": SOME_OBJECTS,
            "tool_call_id": st.text(min_size=1, max_size=3),
            "name": st.text(min_size=1, max_size=3),
        },
    ),
    min_size=1,
    max_size=4,
)


@given(
    MESSAGES,
    st.none() | SOME_OBJECTS,
    st.booleans(),
    st.none() | st.booleans(),
    st.none() | OBJECTS,
)
def test_what_a_client_says_is_what_the_template_gets(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    continued: bool,
    prompted: bool | None,
    args: dict[str, Any] | None,
) -> None:
    options: ChatOptions = {"continue_final_message": continued}
    if tools is not None:
        options["tools"] = tools
    if prompted is not None:
        options["add_generation_prompt"] = prompted
    if args is not None:
        options["template_args"] = args
    sent = pb.ChatInput.FromString(build_chat(messages, options).SerializeToString())
    assert read_chat(sent) == {
        "messages": messages,
        "tools": tools,
        "continue_final_message": continued,
        "add_generation_prompt": prompted,
        "template_args": args or {},
    }


NO_OBJECTS = ["", "x", "5", "[]", "null", '"x"', "{", "{} {}", '{"x": NaN}', '{"x": -Infinity}']


@pytest.mark.parametrize("text", [*NO_OBJECTS, "[" * 200_000, '{"x": ' + "9" * 5000 + "}"])
def test_a_text_that_is_no_json_object_is_named_with_its_place(text: str) -> None:
    good, said = "{}", pb.ChatMessage(role="user", content="x")
    calls = pb.ChatMessage(role="assistant", tool_calls=[good, text])
    cases = {
        "chat.messages[3].tool_calls[1]": pb.ChatInput(messages=[said, said, said, calls]),
        "chat.tools[2]": pb.ChatInput(messages=[said], tools=[good, good, text]),
    }
    if text:
        cases["chat.template_args"] = pb.ChatInput(messages=[said], template_args=text)
    for where, chat in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            read_chat(chat)
        assert str(caught.value).startswith(f"{where}: got '"), where
        assert "wanted a JSON object" in str(caught.value)
        assert len(str(caught.value)) < 400
