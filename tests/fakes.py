"""Fakes that stand for the expensive parts: a model, a clock, a listener.

The stub model is not blind: its next token is a function of the values that it reads back through
the block table, so that a lost, repeated or foreign block shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.cluster.routed_request import RequestEnd, RoutedRequest, StopMatch
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.batch import (
    BranchToken,
    RunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)
from kvferry.engine.beam_search import Continuation, search_of, searches_beams
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.sequence import SequenceFailure, SequenceProgress
from kvferry.engine.stopping import Finish, finish_after
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup

STUB_VOCAB = 997
_MODULUS = 2_147_483_647


def stub_layout(block_size: int = 4) -> KVCacheLayout:
    """One layer, one plane, one head, one 64-bit number per position."""
    return KVCacheLayout(block_size, (KVGroup(0, 1, 1, 1, "int64", num_planes=1),))


def stub_value(token_id: int, position: int) -> int:
    """The stub model's KV of one position."""
    return token_id * 100_003 + position + 1


def stub_next(values: Sequence[int] | NDArray[np.int64]) -> int:
    """The stub model's next token, from the KV of all positions so far."""
    total = 0
    for position, value in enumerate(values):
        total = (total * 31 + int(value) * (position + 7)) % _MODULUS
    return total % STUB_VOCAB


def stub_output(
    prompt: Sequence[int], num_tokens: int, shift: int = 0, branch: int = 0
) -> list[int]:
    """What the stub model answers to a prompt; ``shift`` perturbs its logits."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        token = stub_next([stub_value(t, p) for p, t in enumerate(tokens)])
        tokens.append(stub_branch((token + shift) % STUB_VOCAB, branch))
    return tokens[len(prompt) :]


def stub_branch(token_id: int, branch: int) -> int:
    """What a branch makes of the likeliest token, so that one in another's place shows."""
    return (token_id + 13 * branch) % STUB_VOCAB


def stub_logprobs(token_id: int, position: int) -> TokenLogprobs:
    """What the stub model says of a token at a position, so that one out of place shows."""
    return TokenLogprobs(token_id, -float(position), (token_id,), (-float(position),))


def stub_continuations(token_id: int, count: int) -> TokenLogprobs:
    """The likeliest ``count`` tokens where ``token_id`` is the likeliest: all hang on it."""
    best = -0.05 - token_id % 41 / 50
    others = ((best - 0.01 - (token_id * 7 + i * 17) % 97 / 40, i) for i in range(1, count))
    ranked = [(best, 0), *sorted(others, reverse=True)]
    ids = tuple((token_id + 101 * i) % STUB_VOCAB for _, i in ranked)
    return TokenLogprobs(token_id, best, ids, tuple(logprob for logprob, _ in ranked))


def stub_beams(spec: RequestSpec) -> list[int]:
    """What a beam search over the stub model finds, each beam computed by itself."""
    search = search_of(spec)
    while not search.is_over:
        found = []
        for beam in search.beams:
            (likeliest,) = stub_output((*spec.prompt_token_ids, *beam.token_ids), 1)
            each = stub_continuations(likeliest, search.num_continuations)
            found.append(list(map(Continuation, each.top_ids, each.top_logprobs)))
        search.advance(found)
    return list(search.hypotheses[0].token_ids)


@dataclass
class StubRunner:
    """A ``ModelRunner`` over raw pool bytes ``[num_blocks, block_bytes]``.

    ``fail_next`` makes so many of the next steps raise, ``forbid_prompt`` every step with prompt
    positions;
    ``shift`` perturbs the logits.
    """

    blocks: NDArray[np.uint8]
    block_size: int
    num_steps: int = 0
    fail_next: int = 0
    forbid_prompt: bool = False
    shift: int = 0
    batches: list[int] = field(default_factory=list)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Write each position's value, then read everything back to find the next token."""
        if self.fail_next:
            self.fail_next -= 1
            raise ArithmeticError("the stub model was told to fail")
        self.num_steps += 1
        self.batches.append(output.num_scheduled_tokens)
        slots = self.blocks.view(np.int64)  # [num_blocks, block_size]
        for source, target in output.copies:
            slots[target] = slots[source]
        sampled = [self._sample(slots, share) for share in output.sequences]
        return RunnerOutput(
            tuple(tokens[0].token_id if tokens else None for tokens in sampled),
            tuple(tokens[0].logprobs if tokens else None for tokens in sampled),
            tuple(
                tuple(stub_logprobs(t, p) for p, t in enumerate(s.prompt_targets, s.start + 1))
                for s in output.sequences
            ),
            tuple(tokens[1:] for tokens in sampled),
        )

    def _sample(
        self, slots: NDArray[np.int64], share: ScheduledSequence
    ) -> tuple[BranchToken, ...]:
        token = self._compute(slots, share)
        if token is None:
            return ()
        end = share.start + len(share.token_ids)
        if share.sampling.num_beams > 1 and share.sampling.logprobs is not None:
            return (BranchToken(token, stub_continuations(token, share.sampling.logprobs)),)
        wanted = share.sampling.logprobs is not None
        tokens = [stub_branch(token, branch) for branch in share.branches]
        return tuple(BranchToken(t, stub_logprobs(t, end) if wanted else None) for t in tokens)

    def _compute(self, slots: NDArray[np.int64], share: ScheduledSequence) -> int | None:
        if self.forbid_prompt and len(share.token_ids) > 1:
            raise AssertionError("prompt positions are computed where they must not be")
        end = share.start + len(share.token_ids)
        for position, token_id in enumerate(share.token_ids, share.start):
            block = share.block_table[position // self.block_size]
            slots[block, position % self.block_size] = stub_value(token_id, position)
        if not share.sample:
            return None
        table = np.asarray(share.block_table)
        return (stub_next(slots[table].reshape(-1)[:end]) + self.shift) % STUB_VOCAB


class FakeClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RecordingListener:
    """A request's listener that keeps everything, and insists on contiguous indexes.

    ``tokens`` and what else names no branch is the first one's.
    """

    branches: dict[int, list[int]] = field(default_factory=lambda: {0: []})
    branch_ends: dict[int, Finish] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The first branch's tokens."""
        return self.branches[0]

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        """Keep the tokens."""
        tokens = self.branches.setdefault(run.branch, [])
        assert run.first_index == len(tokens), "an index was lost or repeated"
        assert not self.ends, "a token after the terminal event"
        assert run.branch not in self.branch_ends, "a token after the branch's end"
        tokens.extend(run.token_ids)
        if run.branch == 0:
            self.logprobs.extend(run.logprobs)
        self.prompt_logprobs.extend(run.prompt_logprobs)
        return None

    def on_branch_end(self, branch: int, finish: Finish, now: float) -> None:
        """Keep the branch's end."""
        assert branch not in self.branch_ends and not self.ends
        self.branch_ends[branch] = finish

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """Keep the end."""
        self.ends.append(end)


@dataclass
class RecordingOwner:
    """A sequence owner for engine tests."""

    progress: list[SequenceProgress] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """Keep the step."""
        self.progress.append(progress)

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """Keep the failure."""
        self.failures.append(failure.message)

    def tokens(self, request_id: str) -> list[int]:
        """Tokens sampled for a request, in order."""
        return [
            p.token_id
            for p in self.progress
            if p.sequence.key.request_id == request_id and p.token_id is not None
        ]


ATTEMPT = Attempt(1, 1)


def stub_spec(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    suffix: Sequence[int] = (),
    logprobs: int | None = None,
    num_branches: int = 1,
    stop_token_ids: Sequence[int] = (),
    num_beams: int = 1,
) -> RequestSpec:
    """A greedy request of the stub model; ``logprobs`` of output and prompt."""
    return RequestSpec(
        RequestId(request_id),
        tuple(prompt),
        (tuple(suffix),) * num_branches,
        branches=tuple(range(num_branches)),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=logprobs,
            prompt_logprobs=logprobs,
            stop_token_ids=tuple(stop_token_ids),
            num_beams=num_beams,
        ),
    )


def stub_answer(spec: RequestSpec, branch: int) -> list[int]:
    """What the stub model answers to a request in one branch, up to its finish."""
    if searches_beams(spec):
        return stub_beams(spec)
    tokens = stub_output(spec.prompt_token_ids, spec.sampling.max_tokens, branch=branch)
    for index, token_id in enumerate(tokens):
        if finish_after(spec, index, token_id) is not None:
            return tokens[: index + 1]
    return tokens
