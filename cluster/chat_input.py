"""Conversations in the contract and in Python: ``pb.ChatInput`` here, dictionaries there.

Objects whose shape the model's template decides (tools, tool calls, template variables) cross as
JSON texts. Knows their encoding and names each field that is at fault; what a conversation may
hold is ``engine.chat``'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from kvferry.engine.models.checkpoint import strict_json
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb


class ChatOptions(TypedDict, total=False):
    """What a client may say of a conversation beside its messages; see ``pb.ChatInput``."""

    tools: Iterable[Mapping[str, Any]]
    continue_final_message: bool
    add_generation_prompt: bool
    template_args: Mapping[str, Any]


class Conversation(TypedDict):
    """The arguments of ``ChatTemplate.render``."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None
    tools: list[dict[str, Any]] | None
    continue_final_message: bool
    template_args: dict[str, Any]


def build_chat(messages: Iterable[Mapping[str, Any]], options: ChatOptions) -> pb.ChatInput:
    """What a client sends. Raises TypeError, ValueError for what cannot be encoded."""
    chat = pb.ChatInput(
        messages=[_encoded_message(message) for message in messages],
        tools=[_encoded("tools", tool) for tool in options.get("tools") or ()],
        continue_final_message=options.get("continue_final_message"),
        add_generation_prompt=options.get("add_generation_prompt"),
    )
    args = options.get("template_args")
    if args is not None:
        chat.template_args = _encoded("template_args", args)
    return chat


def read_chat(chat: pb.ChatInput) -> Conversation:
    """What a client sent. Raises InvalidRequest, naming the field."""
    if not chat.messages:
        raise InvalidRequest("chat.messages: empty, wanted at least one message")
    prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    args = chat.template_args
    return Conversation(
        messages=[
            _message(f"chat.messages[{place}]", message)
            for place, message in enumerate(chat.messages)
        ],
        add_generation_prompt=prompt,
        tools=_objects("chat.tools", chat.tools) or None,
        continue_final_message=chat.continue_final_message,
        template_args=_object("chat.template_args", args) if args else {},
    )


def _encoded_message(message: Mapping[str, Any]) -> pb.ChatMessage:
    fields = dict(message)
    calls = fields.pop("tool_calls", None) or ()
    encoded = [_encoded("tool_calls", call) for call in calls]
    return pb.ChatMessage(**fields, tool_calls=encoded)


def _encoded(name: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: got {value!r:.80}, wanted an object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _message(where: str, message: pb.ChatMessage) -> dict[str, Any]:
    """A message as templates know it: what is empty, except the content, is not there."""
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        read["tool_calls"] = _objects(f"{where}.tool_calls", message.tool_calls)
    if message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    if message.name:
        read["name"] = message.name
    return read


def _objects(where: str, texts: Iterable[str]) -> list[dict[str, Any]]:
    return [_object(f"{where}[{place}]", text) for place, text in enumerate(texts)]


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{where}: got {text!r:.80}, wanted a JSON object ({error})"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: got {text!r:.80}, wanted a JSON object")
    return value
