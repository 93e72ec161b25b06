"""Taking a request in: validate every field, tokenize once, draw a seed, make the id.

Turns what a client sent into a ``RequestSpec`` or one typed error that names the field. Fields
that this version does not support are refused by name, never ignored. Knows no routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cluster.errors import UnknownModel
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.request import (
    InvalidRequest,
    PromptTooLong,
    RequestId,
    RequestSpec,
    SamplingParams,
)
from kvferry.engine.tokenizer import Tokenizer
from kvferry.kv_cache.layout import KVCacheLayout
from kvferry.protos import kvferry_pb2 as pb

DEFAULT_MAX_TOKENS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
INT32_MAX = 2**31 - 1

_UNSUPPORTED_SAMPLING = (
    "min_tokens",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
)
_UNSUPPORTED_LISTS = ("logit_bias", "bad_words")
_UNSUPPORTED_CHAT = ("tools", "continue_final_message", "template_args")
_UNSUPPORTED_MESSAGE = ("tool_calls", "tool_call_id", "name")
_UNSUPPORTED_REQUEST = ("priority", "tenant", "adapter", "resume_grace_s", "first_output_index")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it; ``max_model_len`` is what every worker can hold."""

    name: str
    revision: str
    architecture: str
    dtype: str
    layout: KVCacheLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Intake:
    """See the module.

    Args:
        model: what is served.
        tokenizer: the model's.
        chat_template: the model's.
        random_bits: source of ids and seeds: called with a number of bits.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        random_bits: Callable[[int], int],
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._random_bits = random_bits

    def prepare(self, request: pb.GenerateRequest) -> RequestSpec:
        """The specification of a request, or InvalidRequest, PromptTooLong, UnknownModel."""
        self.check_model(request.model)
        for name in _UNSUPPORTED_REQUEST:
            if getattr(request, name):
                raise InvalidRequest(f"{name}: not supported yet in this version; leave it out")
        sampling = self._sampling(request.sampling)
        prompt = self._prompt(request)
        return RequestSpec(
            RequestId(f"{self._random_bits(128):032x}"),
            prompt,
            ((),),
            sampling,
            self.model.eos_token_ids,
            self.model.max_model_len,
            request.cache_salt,
        )

    def check_model(self, name: str) -> None:
        """Raise UnknownModel unless ``name`` is empty or the served model's."""
        if name and name != self.model.name:
            raise UnknownModel(f"model {name!r} is not served here, {self.model.name!r} is")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a raw text, with the token that the model wants before a document."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def tokenize_input(self, request: pb.TokenizeRequest) -> list[int]:
        """Token ids of a text or conversation, as ``prepare`` would take it."""
        self.check_model(request.model)
        is_chat = request.WhichOneof("input") == "chat"
        return self.tokenize_chat(request.chat) if is_chat else self.tokenize(request.text)

    def tokenize_chat(self, chat: pb.ChatInput) -> list[int]:
        """Token ids of a conversation; its template writes every special token itself."""
        return self.tokenizer.encode(self.chat_text(chat), add_special_tokens=False)

    def chat_text(self, chat: pb.ChatInput) -> str:
        """The prompt text of a conversation, by the model's chat template."""
        if not chat.messages:
            raise InvalidRequest("chat.messages: empty, wanted at least one message")
        for name in _UNSUPPORTED_CHAT:
            if getattr(chat, name):
                raise InvalidRequest(
                    f"chat.{name}: not supported yet in this version; leave it out"
                )
        if chat.HasField("add_generation_prompt"):
            raise InvalidRequest("chat.add_generation_prompt: not supported yet in this version")
        for message in chat.messages:
            for name in _UNSUPPORTED_MESSAGE:
                if getattr(message, name):
                    raise InvalidRequest(f"messages.{name}: not supported yet in this version")
        return self._chat_template.render(
            [{"role": message.role, "content": message.content} for message in chat.messages]
        )

    def _prompt(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        kind = request.WhichOneof("input")
        if kind == "text":
            ids = self.tokenize(request.text) if request.text else []
        elif kind == "chat":
            ids = self.tokenize_chat(request.chat)
        elif kind == "token_ids":
            ids = list(request.token_ids.ids)
        else:
            raise InvalidRequest("input: none given, wanted text, token_ids or chat")
        if not ids:
            raise InvalidRequest(f"{kind}: the prompt has no tokens, wanted at least one")
        wrong = next((i for i in ids if not 0 <= i < self.model.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"{kind}: token id {wrong}, wanted 0 to {self.model.vocab_size - 1}"
            )
        if len(ids) >= self.model.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; the model takes {self.model.max_model_len} "
                "with the output, so at most "
                f"{self.model.max_model_len - 1}: shorten the prompt"
            )
        return tuple(ids)

    def _sampling(self, sampling: pb.SamplingParams) -> SamplingParams:
        for name in _UNSUPPORTED_SAMPLING:
            if sampling.HasField(name):
                raise InvalidRequest(f"{name}: not supported yet in this version; leave it out")
        for name in _UNSUPPORTED_LISTS:
            if getattr(sampling, name):
                raise InvalidRequest(f"{name}: not supported yet in this version; leave it out")
        if sampling.HasField("n") and sampling.n != 1:
            raise InvalidRequest(f"n: got {sampling.n}; only 1 is supported yet in this version")
        default = SamplingParams()
        return SamplingParams(
            max_tokens=_integer(sampling, "max_tokens", DEFAULT_MAX_TOKENS, 1, INT32_MAX),
            temperature=_number(sampling, "temperature", default.temperature, 0.0, 100.0),
            top_k=_integer(sampling, "top_k", default.top_k, 0, INT32_MAX),
            top_p=_number(sampling, "top_p", default.top_p, 0.0, 1.0, above=True),
            seed=sampling.seed if sampling.HasField("seed") else self._random_bits(63),
            stop=_stop_strings(list(sampling.stop)),
            stop_token_ids=self._stop_ids(list(sampling.stop_token_ids)),
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=(
                sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
            ),
        )

    def _stop_ids(self, ids: list[int]) -> tuple[int, ...]:
        for token_id in ids:
            if not 0 <= token_id < self.model.vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: got {token_id}, wanted 0 to {self.model.vocab_size - 1}"
                )
        return tuple(ids)


def _integer(sampling: pb.SamplingParams, name: str, default: int, low: int, high: int) -> int:
    value: int = getattr(sampling, name) if sampling.HasField(name) else default
    if not low <= value <= high:
        raise InvalidRequest(f"{name}: got {value}, wanted {low} to {high}")
    return value


def _number(
    sampling: pb.SamplingParams,
    name: str,
    default: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    """A float field within [low, high], or (low, high] with ``above``."""
    value: float = getattr(sampling, name) if sampling.HasField(name) else default
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        bound = "above" if above else "from"
        raise InvalidRequest(f"{name}: got {value}, wanted {bound} {low:g} to {high:g}")
    return value


def _stop_strings(stops: list[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop: {len(stops)} strings, wanted at most {MAX_STOP_STRINGS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_STRING_LENGTH:
            raise InvalidRequest(
                f"stop: a string of {len(stop)} characters, wanted 1 to {MAX_STOP_STRING_LENGTH}"
            )
    return tuple(stops)
