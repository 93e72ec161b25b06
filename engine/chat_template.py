"""A model's Jinja template applied to one conversation: what it sees, and what it may not do.

Pure: a source and variables in, text out. What runs here comes with the weights and is trusted as
little as they: it cannot reach Python objects or change its arguments, and its output is bounded
while it is made. How long it runs and how much memory it takes cannot be bounded from inside;
that is done around the process it runs in (``engine.chat_child``). Imports jinja2 and nothing
of the project, so that this process is light.

The environment is transformers' own, so that a template renders as it does there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE_CHARS = 1 << 17
MAX_REPEATED = 1 << 20
MAX_EXPONENT = 1024

# Stands where the final message ends, until it is cut off. It is transformers' own, so that the
# text is the same also where a template measures contents or shows them twice.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG"

#: What a template that does not compile raises.
_COMPILE_FAULTS = (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError)


class Refused(Exception):
    """The conversation cannot be rendered; the message is the user's to read."""


class Renderer:
    """One compiled template.

    Args:
        source: the template.
        special_tokens: variables such as ``bos_token``.
        max_chars: of the text that it makes.

    Raises jinja2's TemplateError, SyntaxError and others for what does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> None:
        self._now = datetime.min
        self._source = source
        self._special_tokens = special_tokens
        self._max_chars = max_chars
        self._template = _environment(_Sandbox, lambda: self._now).from_string(source)

    def render(self, request: Mapping[str, Any]) -> str:
        """The text of a request as ``ChatTemplate.render`` makes it.

        Raises Refused, and whatever the template raises.
        """
        self._now = datetime.fromisoformat(request["now"])
        messages = [dict(message) for message in request["messages"]]
        final = self._mark_end(messages) if request["continue_final_message"] else None
        variables = {
            "documents": None,
            **self._special_tokens,
            **request["template_args"],
            "messages": messages,
            "tools": request["tools"],
            "add_generation_prompt": request["add_generation_prompt"],
        }
        text = self._bounded(variables)
        return text if final is None else _cut(text, final)

    def _bounded(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(variables):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise Refused(f"the rendered text exceeds {self._max_chars} characters; send less")
            parts.append(part)
        return "".join(parts)

    def _mark_end(self, messages: list[dict[str, Any]]) -> str:
        """Append the tag to the final message's content; returns what it was."""
        if "content" not in self._source:
            raise Refused("continue_final_message: the model's template reads no content")
        final: str = messages[-1]["content"]
        messages[-1]["content"] = f"{final}{_TAG} "
        return final


def check_compiles(source: str) -> None:
    """Raise ValueError, with the reason, for a template that does not compile.

    Evaluates nothing of it: a compiler that folds constants would make the string that
    ``'x' | center(10000000000)`` is, here and now.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"{len(source)} characters, wanted at most {MAX_SOURCE_CHARS}")
    environment = _environment(_Unfolded, datetime.now)
    environment.filters = dict.fromkeys(environment.filters, _not_evaluated)
    environment.tests = dict.fromkeys(environment.tests, _not_evaluated)
    try:
        environment.compile(source)
    except _COMPILE_FAULTS as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _cut(text: str, final: str) -> str:
    """The text up to the end of the final message.

    A template that trims contents has taken the blank behind the tag; then the message's own
    trailing blanks go too, as they would have.
    """
    if final.strip() not in text or _TAG not in text:
        raise Refused(
            "continue_final_message: the final message is not in the rendered text as it was sent; "
            "the model's template leaves out or changes parts of it"
        )
    end = text.rindex(_TAG)
    is_whole = text.startswith(f"{_TAG} ", end)
    return text[:end] if is_whole else text[:end].rstrip()


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute of Python, no change of arguments, no large power, no long repetition."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_number(right) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"the exponent {right!r:.40}, wanted at most {MAX_EXPONENT}")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            times, sequence = (left, right) if _is_number(left) else (right, left)
            if not _is_number(times) or len(sequence) * times > MAX_REPEATED:
                raise SecurityError(
                    f"{left!r:.40} * {right!r:.40}, wanted at most {MAX_REPEATED} items"
                )
        return super().call_binop(context, operator, left, right)


class _Unfolded(ImmutableSandboxedEnvironment):
    """Compiles without evaluating: an operator that is intercepted is not folded."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)


@pass_context  # what needs the context is not folded
def _not_evaluated(context: Any, *arguments: Any) -> NoReturn:
    raise AssertionError("a template that is only checked was run")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets; here it is only its body.

    Still a block of its own: what is set inside is not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict(...)`` and ``dict.fromkeys``, and no other attribute of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """``namespace(...)`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a value may be called self
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: the name {name!r:.40} begins with an underscore")


def _environment(kind: type[Environment], now: Callable[[], datetime]) -> Environment:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
