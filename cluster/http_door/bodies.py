"""The bodies of requests as pydantic models: the fields of each route, and their types.

OpenAI's names, and vLLM's for what OpenAI lacks. A null counts as left out, and so does a field
that is not supported but says what would happen anyway (``NEUTRAL``); any other field that is not
named here is refused by name. Ranges are not known here: they are the intake's.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from kvferry.engine.request import InvalidRequest

MAX_PROMPTS = 256

# Not supported, but with one of these values nothing is asked for that is not done anyway.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}

Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """OpenAI's four kinds of prompt, as a list of texts or of token ids."""
    if isinstance(value, str) or (_is_list(value, int) and value):
        return [value]  # type: ignore[list-item]  # one or the other
    if not isinstance(value, list) or not value:
        raise ValueError("wanted a string, a list of token ids, or a list of either")
    if not (_is_list(value, str) or all(_is_list(each, int) for each in value)):
        raise ValueError("wanted strings only, or lists of token ids only")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"wanted at most {MAX_PROMPTS} prompts, got {len(value)}")
    return value


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("wanted valid Unicode: half of a surrogate pair is no character")
    return value


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not _is_list(value, str):
        raise ValueError("wanted a string or a list of strings")
    return value  # type: ignore[return-value]  # just seen


def _biases(value: object) -> dict[int, float]:
    """JSON's keys are strings; these are token ids in decimal."""
    biases: dict[int, float] = {}
    if not isinstance(value, dict):
        raise ValueError("wanted an object of numbers by token id")
    for key, bias in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
            raise ValueError(f"wanted token ids as keys, got {reprlib.repr(key)}")
        if type(bias) not in (int, float) or abs(bias) > 1e9:
            raise ValueError(f"wanted numbers from -100 to 100, got {reprlib.repr(bias)}")
        biases[int(key)] = float(bias)
    return biases


Text = Annotated[str, AfterValidator(_text)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    model: Text = ""


class StreamOptions(BaseModel):
    """``include_usage``: the stream's last chunk says what was used."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(_Body):
    """What both kinds of completion take.

    The fields up to ``early_stopping`` are those of ``kvferry.v1.SamplingParams``.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Annotated[list[str] | None, PlainValidator(_strings)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_biases)] = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    cache_salt: Text = ""
    tenant: Text = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: Text = ""
    user: Text = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class CompletionBody(GenerationBody):
    """``/v1/completions``."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: int | None = None
    echo: bool = False


class _Conversation(_Body):
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, _Conversation):
    """``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto"] | None = None


class TokenizeBody(_Conversation):
    """``/tokenize``: one of ``prompt`` and ``messages``."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """``/detokenize``."""

    tokens: list[int]


Body = TypeVar("Body", bound=_Body)


def parse_body(kind: type[Body], data: object) -> Body:
    """The body of a route. Raises InvalidRequest: the field, what it was and what is wanted."""
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body: got {reprlib.repr(data)}, wanted a JSON object")
    given = {
        name: value
        for name, value in data.items()
        if value is not None and not (name not in kind.model_fields and _is_neutral(name, value))
    }
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    raise InvalidRequest(_problem(kind, dict(first)))


def _is_neutral(name: str, value: object) -> bool:
    return any(
        type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ())
    )


def _problem(kind: type[_Body], error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as ``field: what is wrong``."""
    place = _place(error["loc"])
    if error["type"] == "missing":
        return f"{place}: missing"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place, kind.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        value = reprlib.repr(error["input"])
        return f"{place}: got {value}, but this field is not supported; {hint}"
    said = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "wanted")
    return f"{place}: got {reprlib.repr(error['input'])}, {said}"


def _place(location: tuple[int | str, ...]) -> str:
    names = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(names).removeprefix(".")
