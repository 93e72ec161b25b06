"""The internal messages: what routers and workers say to each other.

Frozen dataclasses, carried by one codec (``worker.codec``). Every message travels in an
``Envelope`` that names both ends as (id, epoch): what is meant for, or comes from, another life
is refused. All messages are idempotent; the periodic lists (``WantedList``, ``HeldList``,
``PullList``) are the retransmission, so any single message may be lost, doubled or late.

Positions are token positions. Durations are in seconds; no message carries a clock time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.request import Attempt, RequestId, RequestSpec
from kvferry.kv_transfer.connector import BlockRef
from kvferry.worker.kv_events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvferry.worker.lists import (
    HeldItem,
    HeldList,
    Leg,
    LegState,
    Received,
    WantedItem,
    WantedList,
)
from kvferry.worker.reports import (
    AuditReport,
    AuditRequest,
    BlockReport,
    CacheCounters,
    HistogramReport,
    LoadReport,
    Member,
    Membership,
    NodeRef,
    OwnerReport,
    PeerState,
    Role,
    RouterHeartbeat,
    TransferTally,
    WorkerHeartbeat,
    WorkerTallies,
)

# --- router → prefill worker ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the prompt's KV, sample token 1, and hand both to ``decode``.

    Blocks before position ``missing_from`` are with the decode worker already.
    """

    spec: RequestSpec
    attempt: Attempt
    decode: NodeRef
    missing_from: int = 0


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Router → worker: this leg is no longer wanted, for whatever reason; or one branch of it."""

    request_id: RequestId
    attempt: Attempt
    leg: Leg
    branch: int | None = None


# --- prefill worker → router ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """How the prefill went: the worker's own wait, its compute time, chunks, recomputation, and
    positions whose KV was there already.
    """

    queue_s: float
    prefill_s: float
    num_chunks: int
    recomputed_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Token 1, one id per branch, with its log-probabilities and the prompt's where wanted.

    Of several branches, one that has delivered tokens already takes none: its id says nothing.
    """

    request_id: RequestId
    attempt: Attempt
    token_ids: tuple[int, ...]
    stats: PrefillStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class FailureCause(StrEnum):
    """Why a leg failed; decides what the router does next."""

    READER_GONE = "reader_gone"  # the decode worker does not know the request
    STALLED = "stalled"  # the lease ended: the reader made no progress
    TRANSFER = "transfer"  # blocks could not be read, within the retry budget
    SOURCE_LOST = "source_lost"  # the prefill worker died with blocks unread
    STEP = "step"  # the engine step raised
    SHAPE = "shape"  # the request is one that cannot be served, here or anywhere like it
    ENDED = "ended"  # the attempt had already ended here


@dataclass(frozen=True, slots=True)
class LegFailed:
    """Worker → router: this leg has ended without success."""

    request_id: RequestId
    attempt: Attempt
    leg: Leg
    cause: FailureCause
    message: str


# --- router ↔ decode worker ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold blocks for the whole prompt. With ``prefill_here`` the decode worker computes it."""

    spec: RequestSpec
    attempt: Attempt
    prefill_here: bool = False


class ReserveOutcome(StrEnum):
    """GRANTED; COMPUTING: granted, and so much of the prompt is here that the worker computes the
    rest itself; or FULL: a place is kept as long as the router's lists name it.
    """

    GRANTED = "granted"
    COMPUTING = "computing"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """Decode worker → router. Positions from ``missing_from`` on must be prefilled and moved."""

    request_id: RequestId
    attempt: Attempt
    outcome: ReserveOutcome
    missing_from: int = 0


@dataclass(frozen=True, slots=True)
class HandOff:
    """What decode needs beside the blocks. Sampler state is a function of (params, tokens).

    Token ids are one per branch, as in ``PrefillDone``. The log-probabilities are passed on with
    decode's first event, which repeats token 1.
    """

    token_ids: tuple[int, ...]
    num_computed_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    extras: bytes = b""


@dataclass(frozen=True, slots=True)
class HandOffRecord:
    """Router → decode: the hand-off, when the prefill worker died after token 1."""

    request_id: RequestId
    attempt: Attempt
    hand_off: HandOff


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How the request's blocks came, as the decode worker measured it."""

    connector: str
    blocks_moved: int
    bytes_moved: int
    blocks_reused: int
    reads_failed: int
    blocks_before_last_chunk: int
    transfer_s: float | None
    transfer_exposed_s: float | None
    first_use_setup_s: float | None


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """How decode went so far. ``prefill`` is set where this worker computed the prompt."""

    decode_wait_s: float | None
    first_step_s: float | None
    num_preemptions: int
    recomputed_prompt_tokens: int
    transfer: TransferStats | None
    prefill: PrefillStats | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one branch; ``first_index`` is the first one's output position.

    ``logprobs`` are one per token, or none; ``prompt_logprobs`` come with the first token.
    """

    request_id: RequestId
    attempt: Attempt
    branch: int
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    stats: DecodeStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvents:
    """Decode worker → router: all new tokens of one engine step, one message."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Router → decode: send a branch's tokens again from an output index (a gap was seen)."""

    request_id: RequestId
    attempt: Attempt
    from_index: int
    branch: int = 0


# --- prefill worker ↔ decode worker --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnouncedBlock:
    """A sealed, pinned block: where it is, which positions it holds, and what it must read as."""

    start: int
    num_tokens: int
    ref: BlockRef
    block_hash: bytes
    digest: int | None


@dataclass(frozen=True, slots=True)
class Announce:
    """Prefill → decode: blocks ready to be read, and with the last ones the hand-off.

    Repeated every period, from the first unacknowledged block on, until all is acknowledged.
    """

    request_id: RequestId
    attempt: Attempt
    blocks: tuple[AnnouncedBlock, ...]
    hand_off: HandOff | None = None


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Decode → prefill, cumulative: positions before ``verified_until`` are verified."""

    request_id: RequestId
    attempt: Attempt
    verified_until: int
    hand_off_received: bool


@dataclass(frozen=True, slots=True)
class PullRefused:
    """Decode → prefill: no such request here; nothing was started."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Prefill → decode: the blocks are no longer pinned."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class PullList:
    """Decode → prefill, every period: the requests whose blocks are still wanted."""

    items: tuple[Acknowledge, ...]


Body = (
    Membership
    | RouterHeartbeat
    | WorkerHeartbeat
    | PrefillRequest
    | CancelLeg
    | PrefillDone
    | LegFailed
    | Reserve
    | ReserveReply
    | HandOffRecord
    | TokenEvents
    | Replay
    | WantedList
    | HeldList
    | Announce
    | Acknowledge
    | PullRefused
    | LeaseEnded
    | PullList
    | AuditRequest
    | AuditReport
    | KVEvents
    | KVSnapshotRequest
    | KVSnapshot
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with both its ends.

    ``seq`` numbers the sender's messages to this receiver from 1; 0 is a heartbeat, which no
    list speaks of. ``heard`` is the highest ``seq`` of the receiver's that the sender had
    handled when it wrote this: a list says nothing of what is newer.
    """

    sender: NodeRef
    receiver: NodeRef
    seq: int
    heard: int
    body: Body


# fmt: off
__all__ = [
    "Acknowledge", "Announce", "AnnouncedBlock", "AuditReport", "AuditRequest", "BlockReport",
    "Body", "CacheCounters", "CancelLeg", "DecodeStats", "Envelope", "FailureCause", "HandOff",
    "HandOffRecord", "HeldItem", "HeldList", "HistogramReport",
    "KVEvents", "KVSnapshot", "KVSnapshotRequest", "LeaseEnded", "Leg", "LegFailed", "LegState",
    "LoadReport", "Member", "Membership", "NodeRef", "OwnerReport", "PeerState",
    "PrefillDone", "PrefillRequest", "PrefillStats", "PullList", "PullRefused", "Received",
    "Replay",
    "Reserve", "ReserveOutcome", "ReserveReply", "Role", "RouterHeartbeat", "TokenEvent",
    "TokenEvents", "TransferStats", "TransferTally", "WantedItem", "WantedList", "WorkerHeartbeat",
    "WorkerTallies",
]
# fmt: on
