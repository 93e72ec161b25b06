"""Messages about the nodes themselves: who is alive, how loaded, and what owns their blocks.

The half of the internal messages that concerns no request; ``worker.messages`` has the other half
and the envelope.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.kv_transfer.connector import PeerInfo


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A router or worker in one of its lives."""

    node_id: str
    epoch: int


class Role(StrEnum):
    """What a worker serves; a colocated worker has both roles."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker, as the router tells the others."""

    ref: NodeRef
    roles: tuple[Role, ...]
    address: str
    peer_info: PeerInfo


@dataclass(frozen=True, slots=True)
class Membership:
    """Router → worker: the router's address, and who is alive. Replaces the list before it."""

    version: int
    router_address: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RouterHeartbeat:
    """Router → worker: the router lives."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """A worker's connection to one source: by which connector and why, or the error."""

    ref: NodeRef
    connector: str
    connected: bool
    error: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """What the paged cache has done since the worker started.

    Attributes:
        queried_tokens: tokens whose KV was looked for by requests that began.
        hit_tokens_local, hit_tokens_moved, hit_tokens_host: those found in blocks that were
            computed here, in blocks that came from a peer, and in the host tier.
        num_evictions: cached blocks taken for something else.
        num_cow_copies: blocks copied because a sequence wrote where others read.
        preemptions_recompute, preemptions_offload: by what became of the victim's KV.
        recomputed_tokens_preemption, recomputed_tokens_recovery: positions computed again because
            of a preemption here, or of a worker's death elsewhere.
        mean_block_lifetime_s, mean_block_idle_s: from a block's allocation to the end of its
            content, and cached without an owner; None before the first.
    """

    queried_tokens: int = 0
    hit_tokens_local: int = 0
    hit_tokens_moved: int = 0
    hit_tokens_host: int = 0
    num_evictions: int = 0
    num_cow_copies: int = 0
    preemptions_recompute: int = 0
    preemptions_offload: int = 0
    recomputed_tokens_preemption: int = 0
    recomputed_tokens_recovery: int = 0
    mean_block_lifetime_s: float | None = None
    mean_block_idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class HistogramReport:
    """An ``engine.histogram.Histogram`` without its bounds, which both sides know; empty before it
    is known.
    """

    bucket_counts: tuple[int, ...] = ()
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferTally:
    """What one connector has read since the worker started: blocks verified, reads of a block that
    failed by reason, and how long the blocks of a request took from the first read to the last.
    """

    connector: str
    num_moved: int
    bytes_moved: int
    failures: tuple[tuple[str, int], ...]
    seconds: HistogramReport


@dataclass(frozen=True, slots=True)
class WorkerTallies:
    """What a worker has counted since it started, besides its cache.

    Attributes:
        number: of this report; one with a lower number is older, however late it comes.
        step_seconds, step_tokens: the engine's steps, their duration and their positions.
        refused: messages and acknowledgements that were refused, by kind.
        num_leases_expired: leases ended because their reader had stalled.
        transfers: one per connector that has read.
        connections_refused: (port, reason, number) of those that never became a peer's.
    """

    number: int = 0
    step_seconds: HistogramReport = HistogramReport()
    step_tokens: HistogramReport = HistogramReport()
    refused: tuple[tuple[str, int], ...] = ()
    num_leases_expired: int = 0
    transfers: tuple[TransferTally, ...] = ()
    connections_refused: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker holds, for placement and status. Free blocks are those that can be taken,
    cached ones among them; swapped sequences are not among the waiting ones. ``match_unit`` is the
    number of tokens per chain value of the index, 0 if there is none. ``block_classes`` are (class,
    number) pairs; their sum is the pool.
    """

    membership_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_reserved: int = 0
    num_full: int = 0
    num_preemptions: int = 0
    stale_refused: int = 0
    num_kv_events: int = 0
    match_unit: int = 0
    cache: CacheCounters = CacheCounters()
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    peers: tuple[PeerState, ...] = ()
    num_swapped: int = 0
    block_classes: tuple[tuple[str, int], ...] = ()
    num_leases: int = 0
    tallies: WorkerTallies = WorkerTallies()


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """Worker → router: the worker lives, and its load. ``step_age_s`` tells a long step (which
    is not a death) from a hung one; None between steps.
    """

    load: LoadReport
    step_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """Router → worker: walk the pool now."""

    query_id: int


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """One owner of one block, as ``kv_cache.audit`` found it."""

    kind: str
    request_id: str | None
    attempt: int
    peer: str
    lease_remaining_s: float | None


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block that is not free."""

    block_id: int
    generation: int
    block_class: str
    ref_count: int
    num_tokens: int
    block_hash: bytes | None
    owners: tuple[OwnerReport, ...]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Worker → router: the pool's audit; ``counts`` are (class, number) pairs."""

    query_id: int
    block_size: int
    block_bytes: int
    counts: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]
    blocks: tuple[BlockReport, ...]
