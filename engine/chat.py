"""Chat messages to prompt text, by the model's own Jinja template.

Owns the sandbox. A template comes with the weights and is trusted as little: it cannot reach
Python objects, and its output is bounded while it is made. Does not know tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.engine.models.checkpoint import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
    read_object,
    read_text,
)
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.request import InvalidRequest

MAX_MESSAGES = 4096
MAX_RENDERED_CHARS = 4 << 20

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_ALLOWED_KEYS = frozenset({"role", "content"})


class ChatTemplateError(InvalidRequest):
    """The messages cannot be rendered; names the message or repeats what the template said."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    ``template`` is None for a model without one: then ``render`` says so.
    """

    template: Template | None
    special_tokens: Mapping[str, str]
    max_chars: int = MAX_RENDERED_CHARS

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> ChatTemplate:
        """Read ``chat_template.jinja``, else the template inside ``tokenizer_config.json``.

        ``now`` serves templates that print the date. Raises DamagedModel for files that cannot
        be read or a template that does not compile.
        """
        root = Path(folder)
        config = read_object(
            root / "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES, optional=True
        )
        source = _source(root / "chat_template.jinja", config)
        compiled: Template | None = None
        if source is not None:
            try:
                compiled = _environment(now).from_string(source)
            except (*_TEMPLATE_FAULTS, SyntaxError, MemoryError) as error:
                raise DamagedModel(f"{root}: chat template does not compile ({error})") from error
        return cls(compiled, _special_tokens(config), max_chars)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation.

        ``messages`` are objects with the strings ``role`` and ``content``;
        ``add_generation_prompt`` appends what begins the assistant's answer. Raises
        ChatTemplateError.
        """
        if self.template is None:
            raise ChatTemplateError("chat: this model has no chat template; send text instead")
        self._check(messages)
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self.template.generate(
                **self.special_tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            ):
                num_chars += len(part)
                if num_chars > self.max_chars:
                    raise ChatTemplateError(
                        f"chat: the rendered text exceeds {self.max_chars} characters; send less"
                    )
                parts.append(part)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(f"chat: the model's template refused: {error}") from error
        return "".join(parts)

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ChatTemplateError(
                f"messages: {len(messages)} of them, wanted 1 to {MAX_MESSAGES}"
            )
        num_chars = 0
        for place, message in enumerate(messages):
            for key in sorted(set(message) - _ALLOWED_KEYS):
                raise ChatTemplateError(f"messages[{place}].{key}: this field is not supported")
            for key in ("role", "content"):
                value = message.get(key)
                if not isinstance(value, str):
                    raise ChatTemplateError(
                        f"messages[{place}].{key}: got {type(value).__name__}, wanted a string"
                    )
                num_chars += len(value)
        if num_chars > self.max_chars:
            raise ChatTemplateError(
                f"messages: {num_chars} characters, wanted at most {self.max_chars}"
            )


#: What code inside a template may raise; anything else is our own fault.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute of Python, no change of arguments, no power, and no long repetition."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not all(isinstance(side, int | float) for side in (left, right)):
            raise SecurityError(f"operator {operator} on {left!r:.40} and {right!r:.40}")
        return super().call_binop(context, operator, left, right)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _source(file: Path, config: Mapping[str, Any]) -> str | None:
    if os.path.lexists(file):
        return read_text(file, MAX_TEMPLATE_BYTES)
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name: the one called default
        named = [entry for entry in found if isinstance(entry, Mapping)]
        found = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if not isinstance(found, str):
        return None
    if len(found) > MAX_TEMPLATE_BYTES:
        raise DamagedModel(
            f"{file.parent}: chat template of {len(found)} characters, wanted at most "
            f"{MAX_TEMPLATE_BYTES}"
        )
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in _SPECIAL_TOKENS:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens
