"""Taking a request in: validate every field, tokenize once, draw a seed, make the id.

Turns what a client sent into a ``RequestSpec`` or one typed error that names the field. Fields
that this version does not support are refused by name, never ignored. Knows no routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cluster.chat_input import read_chat
from kvferry.cluster.errors import UnknownModel
from kvferry.cluster.sampling_fields import SamplingFields
from kvferry.engine.chat import ChatTemplate
from kvferry.engine.models.size import ModelSize
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

MAX_PROMPT_LOGPROBS = 1 << 15

_UNSUPPORTED_REQUEST = ("adapter", "resume_grace_s", "first_output_index")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it; ``max_model_len`` is what every worker can hold."""

    name: str
    revision: str
    architecture: str
    dtype: str
    size: ModelSize
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
        priorities: whether a request may have one.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        random_bits: Callable[[int], int],
        priorities: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._random_bits = random_bits
        self._priorities = priorities
        self._sampling = SamplingFields(model.vocab_size, tokenizer, random_bits)

    def prepare(self, request: pb.GenerateRequest) -> RequestSpec:
        """The specification of a request, or InvalidRequest, PromptTooLong, UnknownModel."""
        self.check_model(request.model)
        for name in _UNSUPPORTED_REQUEST:
            if getattr(request, name):
                raise InvalidRequest(f"{name}: not supported yet in this version; leave it out")
        if request.priority and not self._priorities:
            raise InvalidRequest(
                f"priority: got {request.priority}, but requests are served in order of arrival; "
                "leave it out, or serve with scheduler.policy: priority"
            )
        sampling, num_branches = self._sampling.read(request.sampling)
        prompt = self._prompt(request)
        _check_prompt_logprobs(sampling, len(prompt))
        return RequestSpec(
            RequestId(f"{self._random_bits(128):032x}"),
            prompt,
            ((),) * num_branches,
            sampling,
            self.model.eos_token_ids,
            self.model.max_model_len,
            request.cache_salt,
            tuple(range(num_branches)),
            request.priority,
        )

    def check_model(self, name: str) -> None:
        """Raise UnknownModel unless ``name`` is empty or the served model's."""
        if name and name != self.model.name:
            raise UnknownModel(f"model {name!r} is not served here, {self.model.name!r} is")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a raw text, with the token that the model wants before a document."""
        self._check_length(text)
        return self.tokenizer.encode(text, add_special_tokens=True)

    def tokenize_input(self, request: pb.TokenizeRequest) -> list[int]:
        """Token ids of a text or conversation, as ``prepare`` would take it."""
        self.check_model(request.model)
        is_chat = request.WhichOneof("input") == "chat"
        return self.tokenize_chat(request.chat) if is_chat else self.tokenize(request.text)

    def tokenize_chat(self, chat: pb.ChatInput) -> list[int]:
        """Token ids of a conversation; its template writes every special token itself."""
        text = self.chat_text(chat)
        self._check_length(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _check_length(self, text: str) -> None:
        """Refuse what could not fit even in the longest tokens, before it is tokenized."""
        most = self.model.max_model_len * max(1, self.tokenizer.longest_token)
        if len(text) > most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters; {self.model.max_model_len} tokens, which "
                f"the model takes with the output, are {most} at most: shorten the prompt"
            )

    def chat_text(self, chat: pb.ChatInput) -> str:
        """The prompt text of a conversation, by the model's chat template."""
        return self._chat_template.render(**read_chat(chat))

    def close(self) -> None:
        """Take nothing more in: end the processes that render conversations."""
        self._chat_template.close()

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


def _check_prompt_logprobs(sampling: SamplingParams, num_prompt: int) -> None:
    """What a prompt's log-probabilities may weigh: they travel in one message."""
    if sampling.prompt_logprobs is None:
        return
    num_entries = num_prompt * (1 + sampling.prompt_logprobs)
    if num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs: {sampling.prompt_logprobs} for {num_prompt} prompt tokens make "
            f"{num_entries} values, wanted at most {MAX_PROMPT_LOGPROBS}: ask for fewer of the "
            "likeliest, or shorten the prompt"
        )
