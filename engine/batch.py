"""What one engine step computes, as plain data, and the runner that computes it.

Plain data so that a runner may be one process or the ranks of a tensor-parallel group, and so
that tests may put a stub in its place. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.engine.request import SamplingParams
from kvferry.kv_cache.errors import KVFerryError


class PoisonedRows(KVFerryError):
    """Sequences of the batch for which no token can be chosen, by place; the others are sound.

    Raised after the step's KV has been written: the others may simply be scheduled again.
    """

    message = "no token can be chosen"
    is_requests_fault = False  # or the model's, or the machine's

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(self.message)
        self.rows = tuple(rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, under the model's own distribution.

    Attributes:
        token_id, logprob: the token that stands there.
        top_ids, top_logprobs: the likeliest, in descending order.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchToken:
    """A token sampled for one branch, and its log-probabilities where wanted."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        token_ids: tokens at positions ``start .. start + len(token_ids) - 1``; their KV is
            written in this step.  [num_scheduled_tokens]
        start: positions already computed (``num_computed_tokens``).
        block_table: block ids covering at least ``start + len(token_ids)`` positions. A sequence
            that grows shows the same object again, with more at its end: where an entry has
            changed there is another object.
        sample: whether the last scheduled position's logits yield a token.
        sampling: the request's sampling parameters.
        branches: the branches that a token is sampled for, each from the same logits; a number
            is part of the generator's key.
        output_index: output position of the token to be sampled, part of the generator's key.
        known_token_ids: prompt and output so far, where sampling looks back at them; else empty.
        eos_token_ids: the ids that end the output, which ``sampling.min_tokens`` puts off.
        prompt_targets: the tokens at positions ``start + 1 ..`` whose log-probabilities are
            wanted, as the prompt has them; at most one per scheduled position.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool
    sampling: SamplingParams
    branches: tuple[int, ...]
    output_index: int
    known_token_ids: Sequence[int] = ()
    eos_token_ids: tuple[int, ...] = ()
    prompt_targets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: the sequences of the batch and the block copies to make before it.

    ``copies`` are (source block id, target block id) pairs.
    """

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Positions computed in this step, all sequences together."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What a step has found, in batch order.

    Attributes:
        token_ids: the sampled tokens, of a sequence of several branches the first one's; None
            where none was asked for.
        logprobs: of the sampled tokens, None where not wanted; empty if nobody wants any.
        further: the tokens of each sequence's branches but the first; empty if none has any.
        prompt_logprobs: of each sequence's ``prompt_targets``; empty if nobody has any.
    """

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    further: tuple[tuple[BranchToken, ...], ...] = ()


class ModelRunner(Protocol):
    """Computes steps. When ``execute`` returns, the step's KV has been written."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Write the KV of every scheduled position and sample where asked."""
        ...
