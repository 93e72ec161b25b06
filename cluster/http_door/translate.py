"""From the bodies of HTTP requests to ``kvferry.v1``, which the intake takes.

Owns where the two differ: names, defaults, messages in parts, calls whose arguments are texts.
Ranges and what is supported beyond the fields' names are the intake's; ``Ask.names`` says how a
field that it refuses is called here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvferry.cluster.client_stream import GenerateOptions, Sampling, build_request
from kvferry.cluster.http_door.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Prompt,
    TokenizeBody,
)
from kvferry.engine.models.checkpoint import strict_json
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for completions without chat

_NOT_ENCODED = "the request cannot be encoded"
_CHAT_NAMES = {
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_args": "chat_template_kwargs",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat": "messages",
    "text": "messages",
}
_PATH = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)?")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the contract; ``names``: what its fields are called at this door."""

    request: pb.GenerateRequest
    names: Mapping[str, str]


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message that begins with a field's name, with the name that the client knows."""
    found = _PATH.match(message)
    if found is None or message[found.end() : found.end() + 1] not in (":", "[", "."):
        return message
    path = found[0]
    for ours in (path, path.partition(".")[0]):
        if ours in names:
            return names[ours] + message[len(ours) :]
    return message


def completion_asks(body: CompletionBody) -> list[Ask]:
    """One request per prompt. Raises InvalidRequest."""
    options = _options(body)
    options.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    names = {}
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        _check_echo(body)
        options["prompt_logprobs"] = body.logprobs
        names["prompt_logprobs"] = "logprobs"
    several = len(body.prompt) > 1
    return [
        _completion_ask(prompt, f"prompt[{place}]" if several else "prompt", options, names)
        for place, prompt in enumerate(body.prompt)
    ]


def _check_echo(body: CompletionBody) -> None:
    """What goes together with a prompt that is shown with its log-probabilities."""
    if body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: given with echo and logprobs, which show the same; leave it out"
        )
    if body.stream and body.n not in (None, 1):
        raise InvalidRequest(
            f"n: got {body.n} with echo and logprobs in a stream, wanted 1; ask without stream"
        )


def _completion_ask(
    prompt: Prompt, name: str, options: GenerateOptions, others: Mapping[str, str]
) -> Ask:
    names = {"text": name, "token_ids": name, **others}
    if isinstance(prompt, str):
        return _ask(prompt, options, names)
    return _ask(None, {**options, "token_ids": prompt}, names)


def chat_ask(body: ChatBody, max_model_len: int) -> Ask:
    """The request of a conversation. Raises InvalidRequest."""
    options = _options(body)
    names = dict(_CHAT_NAMES)
    limit, newer = body.max_tokens, body.max_completion_tokens
    if newer is not None:
        if limit is not None and limit != newer:
            raise InvalidRequest(
                f"max_completion_tokens: got {newer}, but max_tokens is {limit}: give one of them"
            )
        limit = newer
        names["max_tokens"] = "max_completion_tokens"
    options["max_tokens"] = max_model_len if limit is None else limit
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: given without logprobs; set logprobs to true")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    tools = None if body.tool_choice == "none" else body.tools
    options.update(cast(GenerateOptions, _chat_options(body, body.messages, tools)))
    return _ask(None, options, names)


def tokenize_ask(body: TokenizeBody) -> tuple[pb.TokenizeRequest, Mapping[str, str]]:
    """What ``Tokenize`` takes, and the names of its fields here. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give it or messages, one of them")
    if body.messages is None:
        ask = _ask(body.prompt, {"model": body.model}, {"text": "prompt"})
        return pb.TokenizeRequest(model=body.model, text=ask.request.text), ask.names
    options = cast(GenerateOptions, _chat_options(body, body.messages, body.tools))
    ask = _ask(None, {**options, "model": body.model}, _CHAT_NAMES)
    return pb.TokenizeRequest(model=body.model, chat=ask.request.chat), ask.names


def _ask(prompt: str | None, options: GenerateOptions, names: Mapping[str, str]) -> Ask:
    try:
        return Ask(build_request(prompt, options), names)
    except InvalidRequest as error:
        message = renamed(str(error), names)
        if message.startswith(_NOT_ENCODED):  # of which all but the prompt has been looked at
            message = f"{names['text']}: {message}"
        raise InvalidRequest(message) from error


def _options(body: GenerationBody) -> GenerateOptions:
    """What is said alike at both doors."""
    given = {name: getattr(body, name, None) for name in Sampling.__annotations__}
    del given["logprobs"]  # two things here: a number for completions, a switch for chats
    if given["top_k"] == -1:  # vLLM's older way to say all
        given["top_k"] = 0
    if isinstance(given["early_stopping"], bool):
        given["early_stopping"] = str(given["early_stopping"]).lower()
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("model", "cache_salt", "tenant", "priority", "request_id"):
        options[name] = getattr(body, name)
    return cast(GenerateOptions, options)


def _chat_options(
    body: ChatBody | TokenizeBody,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    options = {
        "chat": [_message(f"messages[{at}]", message) for at, message in enumerate(messages)],
        "tools": tools,
        "continue_final_message": body.continue_final_message,
        "add_generation_prompt": body.add_generation_prompt,
        "template_args": body.chat_template_kwargs,
    }
    return {name: value for name, value in options.items() if value is not None}


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the contract has it: a text, and calls whose arguments are objects."""
    fields = {name: value for name, value in message.items() if value is not None}
    for name in fields:
        if name not in _MESSAGE_FIELDS:
            raise InvalidRequest(f"{where}.{name}: not supported; leave it out")
    for name in ("role", "name", "tool_call_id"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidRequest(f"{where}.{name}: wanted a string")
    if not fields.get("role"):
        raise InvalidRequest(f"{where}.role: missing, wanted a role such as user")
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls: wanted a list")
    if "content" not in fields and not calls:
        raise InvalidRequest(f"{where}.content: missing, wanted a text")
    return {
        **fields,
        "content": _text(f"{where}.content", fields.get("content", "")),
        "tool_calls": [
            _tool_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)
        ],
    }


def _text(where: str, content: object) -> str:
    """A content, whose parts, if it has any, are texts; each begins a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: wanted a string or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(f"{where}[{at}]: got a part of type {kind!r:.40}, wanted text")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{at}].text: wanted a string")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates expect."""
    if not isinstance(call, dict):
        raise InvalidRequest(f"{where}: wanted an object")
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        read = strict_json(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments: not valid JSON ({error})") from error
    if not isinstance(read, dict):
        raise InvalidRequest(f"{where}.function.arguments: wanted a JSON object")
    return {**call, "function": {**function, "arguments": read}}
