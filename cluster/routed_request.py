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

from dataclasses import dataclass, field
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
from kvferry.worker.messages import (
    DecodeStats,
    FailureCause,
    NodeRef,
    PrefillRequest,
    PrefillStats,
    Reserve,
)


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
    """The one terminal event. ``error`` is set exactly when the reason is ERROR."""

    finish: Finish
    error: KVFerryError | None = None


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

    def on_end(self, request: RoutedRequest, end: RequestEnd, now: float) -> None:
        """The request has ended; nothing follows."""
        ...


@dataclass(slots=True)
class RoutedRequest:
    """State of one request at the router.

    Attributes:
        spec: the request as submitted, without delivered tokens.
        delivered: output tokens that the listener has accepted.
        token_times: when each was accepted, router clock.
        own_logprobs: of the first token that the current attempt delivered, for its hand-off.
        attempt: the current attempt; events of any other are dropped.
        full: the decode worker keeps a place but has no blocks yet.
        decode, prefill: the legs placed for the current attempt.
        failures: attempts in a row that have failed since a token was last delivered.
        past_preemptions, past_recomputed, past_chunks: what earlier attempts counted.
        gap_stats: decode's figures for the gap to token 2, if decode sampled that token.
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
    delivered: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    own_logprobs: tuple[TokenLogprobs, ...] = ()
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
    dispatched_at: float | None = None
    prefill_ref: NodeRef | None = None
    decode_ref: NodeRef | None = None
    prefill_stats: PrefillStats | None = None
    first_prefill_stats: PrefillStats | None = None
    decode_stats: DecodeStats | None = None
    gap_stats: DecodeStats | None = None
    decision: Decision | None = None
    end: RequestEnd | None = None

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.spec.request_id

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
        if run.first_index == self.first_own_index:
            self.own_logprobs = run.logprobs[:1]
        self.delivered.extend(run.token_ids)
        self.token_times.extend([now] * len(run.token_ids))

    def view(self) -> RequestView:
        """The request as it is now."""
        return RequestView(
            self.request_id,
            self.state,
            self.full,
            self.attempt.number,
            len(self.delivered),
            self.prefill_ref,
            self.decode_ref,
        )

    @property
    def num_kv_prompt(self) -> int:
        """Positions that a new attempt must have KV for: prompt and delivered tokens."""
        return len(self.spec.prompt_token_ids) + len(self.delivered)

    @property
    def first_own_index(self) -> int:
        """Output index of the first token that the current attempt samples."""
        ticket = self.decode
        return len(ticket.body.spec.suffixes[0]) if ticket is not None else len(self.delivered)

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

    def count_past_attempt(self) -> None:
        """Keep what the attempt that has failed counted; what it computed will be again."""
        self.past_preemptions = self.num_preemptions
        self.past_recomputed = self.recomputed_prompt_tokens
        self.past_chunks = self.num_prefill_chunks
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
            and len(self.delivered) > self.first_own_index
        )

    def finish_of_delivered(self) -> Finish | None:
        """The finish that the last delivered token means, when only the event was lost."""
        if not self.delivered:
            return None
        return finish_after(self.spec, len(self.delivered) - 1, self.delivered[-1])


ABORTED = Finish(FinishReason.ABORT)
FAILED = Finish(FinishReason.ERROR)


def error_for(cause: FailureCause, message: str) -> KVFerryError:
    """What a client is told when the last allowed attempt has failed for this cause."""
    if cause is FailureCause.TRANSFER:
        return TransferFailed(message)
    if cause is FailureCause.STEP:
        return RequestPoisoned(message)
    return WorkerLost(message)
