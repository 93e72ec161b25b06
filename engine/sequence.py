"""The engine's state of one sequence (one branch of one attempt of one request)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvferry.engine.batch import BranchToken, TokenLogprobs
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.stopping import Finish
from kvferry.kv_cache.block_table import BlockTable, SealedBlock
from kvferry.kv_cache.hashing import BlockHash, HashChain


class SequenceKey(NamedTuple):
    """Names a sequence; never a reusable slot number."""

    request_id: RequestId
    attempt: Attempt
    branch: int = 0


class SequenceStatus(Enum):
    """WAITING (new or preempted) → RUNNING → FINISHED; preemption goes back to WAITING, or, if the
    KV is kept in the host tier meanwhile, to SWAPPED.
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """What one step did for one sequence.

    Attributes:
        token_id, logprobs: the sampled token, of its first branch, and what is wanted of it.
        further: the tokens of its other branches.
    """

    sequence: SequenceState
    num_computed: int
    token_id: int | None
    finish: Finish | None
    sealed: tuple[SealedBlock, ...]
    logprobs: TokenLogprobs | None = None
    further: tuple[BranchToken, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """Why a step gave a sequence nothing. ``is_requests_fault``: no worker could do better."""

    sequence: SequenceState
    message: str
    is_requests_fault: bool = False


class SequenceOwner(Protocol):
    """Whoever put a sequence into the engine and hears of its steps."""

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """A step has completed. When ``progress.finish`` is set, or a prefill-only sequence has
        its token, the engine frees the sequence's table after this returns.
        """
        ...

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """The sequence cannot go on; the engine frees its table after this."""
        ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tokens, of which ``num_computed_tokens`` have KV; the token just sampled has none yet.

    Attributes:
        spec: the request; ``spec.kv_prompt()`` are the first ``num_kv_prompt`` tokens.
        sampling: how its tokens are sampled.
        branches: whom its first token is sampled for; several only if it is ``prefill_only``.
        prefill_only: ends when its first token is sampled; that token has no KV here.
        is_beam: its owner chooses its tokens: what is sampled is not appended, nor ends it.
        parked: a beam whose tokens are all computed and whose owner has not chosen the next.
        token_ids: prompt, delivered and newly sampled tokens, from position 0.
        max_computed_tokens: most positions that ever had KV here; what is computed below it
            again is recomputation.
        recomputed_prompt_tokens: prompt positions computed again after preemption.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed.
        num_cached_tokens: prompt positions whose KV was here when it was first admitted.
        reused: whole blocks that it began with; its owner hears of them with its first step.
        computing: chain values of whole blocks that it is about to compute, for who waits for them.
        arrival: order of arrival at this engine; the highest is the newest.
        arrived_at: when that was, on the engine's clock.
        rank: how late it stands in every line; see ``engine.ranking``.
        num_swapped_tokens: positions whose KV is in the host tier for it.
    """

    key: SequenceKey
    spec: RequestSpec
    owner: SequenceOwner
    table: BlockTable
    hashes: HashChain
    token_ids: list[int]
    sampling: SamplingParams
    branches: tuple[int, ...] = (0,)
    prefill_only: bool = False
    is_beam: bool = False
    parked: bool = False
    num_kv_prompt: int = 0
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0
    arrived_at: float = 0.0
    rank: float = 0.0
    num_swapped_tokens: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    recomputed_prompt_tokens: int = 0
    first_scheduled_at: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pending_copies: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    reused: list[SealedBlock] = field(default_factory=list)
    computing: list[BlockHash] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the request so far, those delivered by earlier attempts included."""
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that have no KV yet; at least one unless the sequence is parked."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_lost(self) -> int:
        """Positions that an earlier attempt had computed: of prompt and delivered tokens."""
        each = zip(self.spec.branches, self.spec.suffixes, strict=True)
        suffix = next((suffix for number, suffix in each if number == self.key.branch), ())
        return len(self.spec.prompt_token_ids) + len(suffix) if suffix else 0

    def prompt_targets(self, first: int, end: int) -> tuple[int, ...]:
        """The prompt's tokens in ``[first, end)`` whose log-probabilities are wanted.

        None once there is output: they go out with the first token.
        """
        if self.spec.sampling.prompt_logprobs is None or self.num_output_tokens:
            return ()
        return self.spec.prompt_token_ids[first:end]

    def add_prompt_logprobs(self, first: int, found: Sequence[TokenLogprobs]) -> None:
        """Take those of the tokens from position ``first`` on; what is known already stays."""
        self.prompt_logprobs.extend(found[len(self.prompt_logprobs) + 1 - first :])
