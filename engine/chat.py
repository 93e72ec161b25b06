"""Chat messages to prompt text, by the model's own Jinja template.

Owns which templates a model has and what a conversation may hold. A template is run in a process
of its own (``engine.chat_pool``), as it comes with the weights and is trusted as little. Does
not know tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvferry.engine.chat_helper import (
    RENDER_LIMIT_S,
    ChatTemplateError,
    HelperSettings,
    HelperUnavailable,
)
from kvferry.engine.chat_pool import Helpers
from kvferry.engine.chat_template import check_compiles
from kvferry.engine.models.checkpoint import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    read_object,
    read_text,
)
from kvferry.engine.models.errors import DamagedModel

__all__ = ["ChatTemplate", "ChatTemplateError", "HelperUnavailable"]

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_TOOL_CALLS = 512  # of one message
MAX_RENDERED_CHARS = 4 << 20

_DEFAULT, _TOOL_USE = "default", "tool_use"
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_RESERVED_ARGS = frozenset(
    {*_SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "continue_final_message"}
)
_STRINGS = ("role", "content", "name", "tool_call_id")
_ALLOWED_KEYS = frozenset({*_STRINGS, "tool_calls"})


class ChatTemplate:
    """A model's templates, and the processes that run them.

    May be used from several threads at once. ``close`` ends the processes; dropping it does too.

    Args:
        sources: templates by name; of them ``default``, and ``tool_use`` for requests with tools,
            are used. Empty for a model without one: then ``render`` says so.
        special_tokens: variables that every template sees.
        now: serves templates that print the date.
        max_chars: of a conversation, and of the text made of it.
        limit_s: seconds that one rendering may take.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
        limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        self._used = {name: sources[name] for name in (_DEFAULT, _TOOL_USE) if name in sources}
        self._names = sorted(sources)
        self._now = now
        self._max_chars = max_chars
        self.helpers = Helpers(HelperSettings(self._used, special_tokens, max_chars, limit_s))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
        limit_s: float = RENDER_LIMIT_S,
    ) -> ChatTemplate:
        """Read ``chat_template.jinja`` and ``additional_chat_templates/*.jinja``.

        Without any such file, what ``tokenizer_config.json`` says. Raises DamagedModel for files
        that cannot be read or a template that does not compile.
        """
        root = Path(folder)
        config = read_object(
            root / "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES, optional=True
        )
        sources = _files(root) or _in_config(config)
        for name, source in sources.items():
            try:
                check_compiles(source)
            except ValueError as error:
                raise DamagedModel(
                    f"{root}: chat template {name!r} does not compile ({error})"
                ) from error
        return cls(sources, _special_tokens(config), now, max_chars, limit_s)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: objects with the strings ``role`` and ``content``, and where they apply
                ``tool_calls`` (a list of objects), ``tool_call_id`` and ``name`` (strings).
            add_generation_prompt: append what begins the assistant's answer; None: unless the
                final message is continued.
            tools: what the model may call, one object each.
            continue_final_message: end the text where the final message's content ends.
            template_args: further variables that the template sees.

        Raises ChatTemplateError, HelperUnavailable.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        self._check(messages, tools, template_args or {})
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "chat.add_generation_prompt: got true with continue_final_message, wanted one of "
                "them: the answer either begins anew or continues the final message"
            )
        request = {
            "template": self._choose(tools),
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template_args": template_args or {},
            "now": self._now().isoformat(),
        }
        try:
            encoded = json.dumps(request, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"chat: cannot be written as JSON ({error})") from error
        if len(encoded) > self._max_chars:
            raise ChatTemplateError(
                f"chat: {len(encoded)} characters as JSON, wanted at most {self._max_chars} of "
                "messages, tools and template_args together; send less"
            )
        return self.helpers.render(encoded.encode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """End the processes; rendering fails from now on."""
        self.helpers.close()

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The name of the template to use."""
        if not self._names:
            raise ChatTemplateError("chat: this model has no chat template; send text instead")
        if tools is not None and _TOOL_USE in self._used:
            return _TOOL_USE
        if _DEFAULT in self._used:
            return _DEFAULT
        raise ChatTemplateError(
            f"chat: this model's templates are {', '.join(self._names)}, wanted one called "
            "default; send text instead"
        )

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
    ) -> None:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ChatTemplateError(
                f"chat.messages: {len(messages)} of them, wanted 1 to {MAX_MESSAGES}"
            )
        for place, message in enumerate(messages):
            _check_message(f"chat.messages[{place}]", message)
        if tools is not None:
            _check_objects("chat.tools", tools, MAX_TOOLS)
        for name in sorted(_RESERVED_ARGS & template_args.keys()):
            raise ChatTemplateError(
                f"chat.template_args: got {name!r}, which has a meaning of its own; leave it out"
            )


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    for key in sorted(set(message) - _ALLOWED_KEYS):
        raise ChatTemplateError(f"{where}.{key}: this field is not supported")
    for key in _STRINGS:
        value = message.get(key)
        if not isinstance(value, str) and (key in message or key in ("role", "content")):
            raise ChatTemplateError(f"{where}.{key}: got {type(value).__name__}, wanted a string")
    if not message["role"]:
        raise ChatTemplateError(f"{where}.role: empty, wanted a role such as user")
    if "tool_calls" in message:
        _check_objects(f"{where}.tool_calls", message["tool_calls"], MAX_TOOL_CALLS)


def _check_objects(where: str, objects: Any, most: int) -> None:
    if not isinstance(objects, list | tuple):
        raise ChatTemplateError(f"{where}: got {type(objects).__name__}, wanted a list")
    if len(objects) > most:
        raise ChatTemplateError(f"{where}: {len(objects)} of them, wanted at most {most}")
    for place, value in enumerate(objects):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(
                f"{where}[{place}]: got {type(value).__name__}, wanted an object"
            )


def _files(root: Path) -> dict[str, str]:
    """Templates that are files, by name."""
    file = root / "chat_template.jinja"
    found = {_DEFAULT: file} if os.path.lexists(file) else {}
    for other in sorted((root / "additional_chat_templates").glob("*.jinja")):
        found[other.stem] = other
    return {name: read_text(path, MAX_TEMPLATE_BYTES) for name, path in found.items()}


def _in_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Templates inside the tokenizer's configuration: one, or several by name."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {
            str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)
        }
    named = found if isinstance(found, dict) else {_DEFAULT: found}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in _SPECIAL_TOKENS:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens
