"""What a request asks for: the frozen specification that travels between processes.

Knows nothing of scheduling state (``engine.sequence``) or routing (``cluster``); imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

from kvferry.kv_cache.errors import KVFerryError

RequestId = NewType("RequestId", str)

MAX_BRANCHES = 64
"""Outputs that one request may ask for."""

MAX_BEAMS = 16
"""Beams that one request may search."""


MAX_BEAM_STOP_TOKEN_IDS = 64
"""Stop ids beside a search: each makes every step look at so many beams' continuations more."""


class Attempt(NamedTuple):
    """Which try of a request: attempts order by (router epoch, number)."""

    router_epoch: int
    number: int


class InvalidRequest(KVFerryError):
    """A field of the request is missing, out of range or unsupported; names the field."""

    exit_code = 2


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context; names both numbers."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EarlyStopping(StrEnum):
    """When a beam search that has as many hypotheses as beams is over.

    TRUE: at once. FALSE: when no beam of the present length is better than the worst of them.
    NEVER: when no beam of any length could be.
    """

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


class TokenBias(NamedTuple):
    """What is added to the logit of one token."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when output ends.

    Attributes:
        max_tokens: output tokens at most (>= 1).
        min_tokens: output tokens before an end-of-sequence id, a stop id or a stop string may end
            the output; until then these ids cannot be sampled.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest, 0 to 1.
        repetition_penalty: divides the positive logits, multiplies the negative ones, of every
            token in prompt or output; 1 is none.
        presence_penalty: subtracted from the logits of the tokens in the output.
        frequency_penalty: likewise, once per occurrence.
        logit_bias: added to the logits of single tokens; distinct ids.
        bad_words: token sequences whose last token is not sampled after the others.
        seed: 64-bit key of the counter-based generator; the front door draws one if the user
            gave none, so that workers always see a number.
        stop: stop strings, applied by the front door.
        include_stop_str_in_output: show the stop string, or the stop token's text, too.
        stop_token_ids: ids that end the output, beside the model's end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: give each output token's log-probability, and those of so many of the likeliest;
            None gives none.
        prompt_logprobs: likewise of the prompt's tokens but the first.
        num_beams: outputs that are searched side by side for the likeliest; 1 searches none.
        length_penalty: an output that has ended scores the sum of its log-probabilities, divided by
            its length to this power.
        early_stopping: when the search is over: see ``engine.beam_search``.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE

    @property
    def looks_back(self) -> bool:
        """Whether a token depends on those before it other than through the model."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or (self.bad_words and any(len(word) > 1 for word in self.bad_words))
        )

    @property
    def constrains(self) -> bool:
        """Whether anything but the filters of random sampling changes the logits."""
        return bool(self.looks_back or self.min_tokens or self.logit_bias or self.bad_words)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One attempt's work as every worker sees it: a common prefix and one suffix per branch.

    Attributes:
        request_id: 128 random bits in hex, made by the front door.
        prompt_token_ids: the user's prompt, common to all branches.
        branches: numbers of the branches that are to be continued, ascending; a number is part
            of the generator's key.
        suffixes: per branch, the output tokens already delivered to the client. They stay output
            for every limit and index; only the KV cache treats them as prompt.
        sampling: sampling parameters, seed included.
        eos_token_ids: ids that end the output unless ``sampling.ignore_eos``.
        max_model_len: positions that prompt and output together may take.
        cache_salt: opaque tenant salt of the block hash chain.
        priority: lower comes earlier, where the scheduler's policy is ``priority``.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...] = ((),)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 1 << 30
    cache_salt: str = ""
    branches: tuple[int, ...] = (0,)
    priority: int = 0

    @property
    def num_branches(self) -> int:
        """Branches that are to be continued."""
        return len(self.branches)

    @property
    def max_output_tokens(self) -> int:
        """Output tokens at most, the model's context considered."""
        return min(self.sampling.max_tokens, self.max_model_len - len(self.prompt_token_ids))

    def kv_prompt(self) -> tuple[int, ...]:
        """Tokens whose KV is computed and moved once, for all branches.

        Of a single branch its suffix too. Of several the prompt: each computes its own suffix
        where it decodes.
        """
        if len(self.suffixes) == 1:
            return self.prompt_token_ids + self.suffixes[0]
        return self.prompt_token_ids

    def own_suffix(self, place: int) -> tuple[int, ...]:
        """What the branch at ``place`` of ``branches`` has beyond ``kv_prompt``."""
        return self.suffixes[place] if len(self.suffixes) > 1 else ()
