"""The router's view of one request, and the automaton it walks.

    QUEUED ──place──▶ RESERVING ──granted──▶ PREFILLING ──first decode event──▶ DECODING
       ▲                  │ (FULL: stays, at the head of that worker's line)        │
       └───── retry: prompt + delivered tokens, attempt + 1, within the budget ─────┤
                                                                                    ▼
                        any state ──token ends it, stop string, cancel, error──▶  ENDED

Delivered is final: a token that the listener has accepted for an index is that index's token for
ever; every new attempt begins after the delivered ones. Only this automaton ends a request, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from kvferry.cluster.decisions import Decision
from kvferry.cluster.errors import RequestPoisoned, WorkerLost
from kvferry.cluster.token_run import TokenRun
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.request import Attempt, FinishReason, RequestId, RequestSpec
from kvferry.engine.stopping import Finish, finish_after
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_transfer.connector import TransferFailed
from kvferry.worker.logs import about
from kvferry.worker.messages import (
    DecodeStats,
    FailureCause,
    HandOff,
    NodeRef,
    PrefillRequest,
    PrefillStats,
    Reserve,
    TokenEvent,
)

LEAST_BETWEEN_MOVES_S = 0.25
MOST_BETWEEN_MOVES_S = 5.0


class RequestState(Enum):
    """See the module."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True)
class Ticket:
    """One leg placed on a worker: the message that asked for it and its newest number."""

    worker: NodeRef
    body: Reserve | PrefillRequest
    seq: int


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The listener found a stop string: how many of the offered tokens count, and the finish."""

    num_tokens: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The one terminal event. ``error`` is set exactly when the reason is ERROR.

    ``finish`` is that of the branch that ended last, or of all that were left.
    """

    finish: Finish
    error: KVFerryError | None = None
    branch: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request at one moment, for whoever watches from outside.

    ``full``: it keeps a place at a decode worker that has no blocks for it yet. ``prefill`` and
    ``decode`` are the workers that it was last placed on.
    """

    request_id: RequestId
    state: RequestState
    full: bool
    attempt: int
    num_delivered: int
    prefill: NodeRef | None
    decode: NodeRef | None


class RequestListener(Protocol):
    """Who receives a request's tokens: a front door's session."""

    def on_tokens(self, run: TokenRun, now: float) -> StopMatch | None:
        """Accept new tokens, contiguous and exactly once; may find a stop string in them."""
        ...

    def on_branch_end(self, branch: int, finish: Finish, now: float) -> None:
        """A branch has ended while others go on."""
        ...

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """The request has ended; nothing follows."""
        ...


@dataclass(slots=True)
class RoutedBranch:
    """One of a request's outputs.

    Attributes:
        number: the branch's.
        delivered: output tokens that the listener has accepted.
        token_times: when each was accepted, router clock.
        own_logprobs: of the first token that the current attempt delivered, for its hand-off.
        finish: why it has ended, if others went on then.
    """

    number: int
    delivered: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    own_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None

    def is_over(self, request: RoutedRequest) -> bool:
        """Whether it, or its whole request, has ended."""
        return self.finish is not None or request.end is not None

    def finish_of_delivered(self, spec: RequestSpec) -> Finish | None:
        """The finish that the last delivered token means, when only the event was lost."""
        if not self.delivered:
            return None
        return finish_after(spec, len(self.delivered) - 1, self.delivered[-1])


@dataclass(slots=True)
class RoutedRequest:
    """State of one request at the router.

    Attributes:
        spec: the request as submitted, without delivered tokens.
        branches: its outputs, by number.
        first_tokens_here: the current attempt's prefill has given every branch its first token.
        attempt: the current attempt; events of any other are dropped.
        full: the decode worker keeps a place but has no blocks yet.
        num_moves, may_move_at: how often it went elsewhere from there, and when it may again.
        decode, prefill: the legs placed for the current attempt.
        failures: attempts in a row that have failed since a token was last delivered.
        past_preemptions, past_recomputed, past_chunks, past_reused: what earlier attempts counted.
        lost_at: when an attempt was lost since a token was last delivered.
        gap_stats: decode's figures for the gap to token 2, if decode sampled that token.
        reserved_at: when the decode leg was last asked for: what it computes waits from there.
        dispatched_at: when the first leg that computes was first sent.
        waiting_since: since when no worker could take it (placement waits at most worker_wait).
    """

    spec: RequestSpec
    listener: RequestListener
    received_at: float
    arrival: int
    attempt: Attempt
    waiting_since: float
    state: RequestState = RequestState.QUEUED
    branches: tuple[RoutedBranch, ...] = ()
    first_tokens_here: bool = False
    num_moves: int = 0
    may_move_at: float = 0.0
    full: bool = False
    decode: Ticket | None = None
    prefill: Ticket | None = None
    planned_prefill: NodeRef | None = None
    prefill_here: bool = False
    num_attempts: int = 1
    failures: int = 0
    past_preemptions: int = 0
    past_recomputed: int = 0
    past_chunks: int = 0
    past_reused: int = 0
    lost_at: float | None = None
    reserved_at: float | None = None
    dispatched_at: float | None = None
    prefill_ref: NodeRef | None = None
    decode_ref: NodeRef | None = None
    prefill_stats: PrefillStats | None = None
    first_prefill_stats: PrefillStats | None = None
    decode_stats: DecodeStats | None = None
    gap_stats: DecodeStats | None = None
    decision: Decision | None = None
    end: RequestEnd | None = None

    def __post_init__(self) -> None:
        if not self.branches:
            self.branches = tuple(RoutedBranch(number) for number in self.spec.branches)

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.spec.request_id

    @property
    def about(self) -> dict[str, object]:
        """What a log record about it carries."""
        return about(self.request_id, self.attempt.number)

    @property
    def delivered(self) -> list[int]:
        """Output tokens that the listener has accepted, of the first branch."""
        return self.branches[0].delivered

    @property
    def token_times(self) -> list[float]:
        """When each of these was accepted, router clock."""
        return self.branches[0].token_times

    @property
    def num_delivered(self) -> int:
        """Output tokens that the listener has accepted, of all branches."""
        return sum(len(branch.delivered) for branch in self.branches)

    @property
    def live(self) -> list[RoutedBranch]:
        """The branches that have not ended."""
        return [branch for branch in self.branches if branch.finish is None]

    def branch(self, number: int) -> RoutedBranch | None:
        """A branch that goes on; None for any other number."""
        found = self.branches[number] if number < len(self.branches) else None
        return found if found is not None and found.finish is None else None

    def attempt_spec(self) -> RequestSpec:
        """What a new attempt is to do: the branches that go on, after what is delivered."""
        return replace(
            self.spec,
            branches=tuple(branch.number for branch in self.live),
            suffixes=tuple(tuple(branch.delivered) for branch in self.live),
        )

    @property
    def prefill_worker(self) -> str | None:
        """Name of the worker that last was to compute the prompt."""
        return self.prefill_ref.node_id if self.prefill_ref is not None else None

    @property
    def decode_worker(self) -> str | None:
        """Name of the worker that last was to decode."""
        return self.decode_ref.node_id if self.decode_ref is not None else None

    def accept(self, run: TokenRun, now: float) -> None:
        """The listener has taken these tokens: they are final."""
        branch = self.branches[run.branch]
        if run.first_index == self.first_own_index(run.branch):
            branch.own_logprobs = run.logprobs[:1]
        branch.delivered.extend(run.token_ids)
        branch.token_times.extend([now] * len(run.token_ids))

    def view(self) -> RequestView:
        """The request as it is now."""
        return RequestView(
            self.request_id,
            self.state,
            self.full,
            self.attempt.number,
            self.num_delivered,
            self.prefill_ref,
            self.decode_ref,
        )

    @property
    def num_kv_prompt(self) -> int:
        """Positions that a new attempt's prefill computes: with one branch, delivered ones too."""
        live = self.live
        suffix = len(live[0].delivered) if len(live) == 1 else 0
        return len(self.spec.prompt_token_ids) + suffix

    def first_own_index(self, number: int) -> int:
        """Output index of the first token that the current attempt samples for a branch."""
        if self.decode is None:
            return len(self.branches[number].delivered)
        spec = self.decode.body.spec
        return len(spec.suffixes[spec.branches.index(number)])

    def hand_off(self) -> HandOff:
        """What the attempt's prefill worker would tell the decode worker."""
        assert self.decode is not None
        spec = self.decode.body.spec
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for number in spec.branches:
            branch, index = self.branches[number], self.first_own_index(number)
            # Of several branches, one that had tokens before takes none: any id will do.
            place = min(index, len(branch.delivered) - 1)
            token_ids.append(branch.delivered[place])
            logprobs += branch.own_logprobs
        complete = len(logprobs) == len(token_ids)
        return HandOff(tuple(token_ids), len(spec.kv_prompt()), tuple(logprobs) if complete else ())

    @property
    def num_preemptions(self) -> int:
        """Over all attempts and both legs; a worker that did both reports it once, as decode's."""
        return self.past_preemptions + self._over_legs("num_preemptions")

    @property
    def recomputed_prompt_tokens(self) -> int:
        """Prompt positions computed again, by preemption or by a new attempt."""
        again = 0 if self.first_prefill_stats is None else self._cached(self.prefill_stats)
        return self.past_recomputed + self._over_legs("recomputed_prompt_tokens") - again

    @property
    def num_cached_tokens(self) -> int:
        """Prompt positions whose KV was there when the request came: of its first attempt."""
        return self._cached(self.first_prefill_stats or self.prefill_stats)

    def _cached(self, stats: PrefillStats | None) -> int:
        """Of the user's prompt: what was delivered earlier is output."""
        if stats is None:
            return 0
        return min(stats.num_cached_tokens, len(self.spec.prompt_token_ids))

    @property
    def num_prefill_chunks(self) -> int:
        """Steps that computed prompt positions, over all attempts."""
        own = self.prefill_stats.num_chunks if self.prefill_stats is not None else 0
        return self.past_chunks + own

    @property
    def reused_tokens(self) -> int:
        """Positions, output too, whose KV attempts after the first found where they ran."""
        stats = self.prefill_stats if self.first_prefill_stats is not None else None
        return self.past_reused + (0 if stats is None else stats.num_cached_tokens)

    def _over_legs(self, name: str) -> int:
        decode, prefill = self.decode_stats, self.prefill_stats
        total: int = getattr(decode, name) if decode is not None else 0
        if prefill is not None and (decode is None or decode.prefill is None):
            total += getattr(prefill, name)
        return total

    def expects_stats(self, sender: NodeRef, attempt: Attempt) -> bool:
        """Whether the prefill's figures of this attempt are unknown, and this worker's to tell."""
        unknown = self.prefill_stats is None and self.attempt == attempt
        return unknown and self.prefill_ref == sender

    def take_stats(self, event: TokenEvent, stats: DecodeStats) -> None:
        """Decode's figures, before the event's tokens are delivered."""
        self.decode_stats = stats
        self.prefill_stats = self.prefill_stats or stats.prefill
        second = event.branch == 0 and event.first_index + len(event.token_ids) > 1
        if second and len(self.delivered) <= 1:
            self.gap_stats = stats  # decode sampled token 2

    def note_move(self, now: float) -> None:
        """It goes elsewhere from a full worker; when it may do so again."""
        pause = LEAST_BETWEEN_MOVES_S * 2 ** min(self.num_moves, 10)
        self.may_move_at = now + min(MOST_BETWEEN_MOVES_S, pause)
        self.num_moves += 1

    def count_past_attempt(self) -> None:
        """Keep what the attempt that has failed counted; what it computed will be again."""
        self.past_preemptions = self.num_preemptions
        self.past_recomputed = self.recomputed_prompt_tokens
        self.past_chunks = self.num_prefill_chunks
        self.past_reused = self.reused_tokens
        if self.prefill_stats is not None:
            self.past_recomputed += len(self.spec.prompt_token_ids)
        self.first_prefill_stats = self.first_prefill_stats or self.prefill_stats
        self.prefill_stats = self.decode_stats = None

    @property
    def holds_hand_off(self) -> bool:
        """Token 1 is here and its prefill worker is not: decode learns it from the router alone."""
        return (
            self.state is RequestState.PREFILLING
            and self.decode is not None
            and self.prefill is None
            and not self.prefill_here
            and self.first_tokens_here
        )


ABORTED = Finish(FinishReason.ABORT)
FAILED = Finish(FinishReason.ERROR)


def error_for(cause: FailureCause, message: str) -> KVFerryError:
    """What a client is told when the last allowed attempt has failed for this cause."""
    if cause is FailureCause.TRANSFER:
        return TransferFailed(message)
    if cause is FailureCause.STEP:
        return RequestPoisoned(message)
    return WorkerLost(message)
