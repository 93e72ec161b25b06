"""One decode leg: the decode worker's half of an attempt.

FULL → RESERVED → RUNNING → FINISHED          any state → gone
  FULL: a place is kept, no block is held. RESERVED: all prompt blocks are held; those that were
  here already are shared, the others are being filled by reads (or, where the leg ``computes``, by
  the engine, and it is RUNNING at once).
  FINISHED: the output is kept until the router lets go of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.ranking import rank
from kvferry.engine.sequence import SequenceState
from kvferry.engine.stopping import Finish
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_cache.hashing import HashChain
from kvferry.kv_transfer.connector import ReadId
from kvferry.worker.messages import (
    AnnouncedBlock,
    DecodeStats,
    HandOff,
    LegState,
    NodeRef,
    PrefillStats,
    Reserve,
    TokenEvent,
    TransferStats,
)
from kvferry.worker.wanted import WantedMark


@dataclass(slots=True)
class Reading:
    """One running read: the first positions of its blocks, and when it last gave one."""

    starts: set[int]
    progress_at: float


@dataclass(slots=True)
class Pull:
    """The blocks of one reservation on their way here, keyed by first position.

    Invariant: ``verified_until`` is the end of the leading run of verified blocks; a block is in
    at most one of ``reading`` (by read) and ``verified``.
    """

    source: NodeRef | None = None
    announced: dict[int, AnnouncedBlock] = field(default_factory=dict)
    reading: dict[ReadId, Reading] = field(default_factory=dict)
    verified: dict[int, int] = field(default_factory=dict)  # first position -> end
    failures: Counter[int] = field(default_factory=Counter)
    verified_until: int = 0
    unacknowledged: bool = False
    connector: str = ""
    setup_s: float | None = None
    first_read_at: float | None = None
    last_verified_at: float | None = None
    hand_off_at: float | None = None
    bytes_moved: int = 0
    blocks_reused: int = 0
    reads_failed: int = 0
    blocks_before_last_chunk: int = 0

    def mark_verified(self, start: int, num_tokens: int) -> None:
        """A block has arrived whole; extend the leading run."""
        self.verified[start] = start + num_tokens
        while self.verified_until in self.verified:
            self.verified_until = self.verified[self.verified_until]

    def begin_at(self, position: int, num_blocks: int) -> None:
        """The blocks before ``position`` were here: nothing of them is read."""
        self.verified_until = position
        self.blocks_reused = num_blocks

    def hand_off_received(self, now: float) -> None:
        """Note how far the pull had come when the last chunk was done."""
        self.hand_off_at = now
        self.blocks_before_last_chunk = len(self.verified)

    def is_reading(self, start: int) -> bool:
        """Whether a read of the block at ``start`` is running."""
        return any(start in read.starts for read in self.reading.values())

    def measured(self) -> tuple[object, ...]:
        """All that ``stats`` is made of, cheaper to compare."""
        return (
            self.connector,
            len(self.verified),
            self.bytes_moved,
            self.reads_failed,
            self.blocks_before_last_chunk,
            self.first_read_at,
            self.last_verified_at,
            self.hand_off_at,
            self.setup_s,
        )

    def stats(self) -> TransferStats:
        """What was moved, and how long it took on this worker's clock."""
        whole = exposed = None
        if self.first_read_at is not None and self.last_verified_at is not None:
            whole = self.last_verified_at - self.first_read_at
            if self.hand_off_at is not None:
                exposed = max(0.0, self.last_verified_at - self.hand_off_at)
        return TransferStats(
            self.connector,
            len(self.verified),
            self.bytes_moved,
            self.blocks_reused,
            self.reads_failed,
            self.blocks_before_last_chunk,
            whole,
            exposed,
            self.setup_s,
        )


@dataclass(slots=True)
class DecodeLeg:
    """State of one leg.

    Attributes:
        output: every output token of the request known here, delivered ones included.
        logprobs: of the tokens from ``first_own_index`` on, if the request wants any.
        first_own_index: output index of the first token that this leg reports.
        reported: output tokens reported to the router so far (an index).
        last_event_seq: number of the message that carried the last report.
        ready_at: when every block was verified and the hand-off there.
        told: what the stats were made of when they were last reported.
        computes: the prompt, or the rest of it that is not here, is computed here.
        copies: block copies to make before the first step.
    """

    request: Reserve
    router: NodeRef
    wanted: WantedMark
    hashes: HashChain
    received_at: float
    state: LegState = LegState.FULL
    table: BlockTable | None = None
    pull: Pull = field(default_factory=Pull)
    hand_off: HandOff | None = None
    sequence: SequenceState | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reported: int = 0
    last_event_seq: int = 0
    finish: Finish | None = None
    ready_at: float | None = None
    decode_wait_s: float | None = None
    first_step_s: float | None = None
    prefill: PrefillStats | None = None
    told: tuple[object, ...] = ()
    computes: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def first_own_index(self) -> int:
        """Output index of the first token that this attempt samples."""
        return len(self.request.spec.suffixes[0])

    @property
    def num_kv_prompt(self) -> int:
        """Positions whose KV must be here before decode can begin."""
        return len(self.request.spec.kv_prompt())

    def rank(self, ageing: float | None) -> float:
        """Its place among those that are FULL; of equal ones the first to come is first."""
        return rank(self.request.spec.priority, self.received_at, ageing)

    def take_hand_off(self, hand_off: HandOff) -> None:
        """Token 1 is here."""
        self.output.extend(hand_off.token_ids)
        self.logprobs.extend(hand_off.logprobs)

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A token has been sampled."""
        self.output.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def event(self, from_index: int) -> TokenEvent:
        """The leg's own tokens from an output index on, its finish, and its stats if new."""
        first = max(self.first_own_index, min(from_index, len(self.output)))
        reason = self.finish.stop_reason if self.finish else None
        return TokenEvent(
            self.request.spec.request_id,
            self.request.attempt,
            0,
            first,
            tuple(self.output[first:]),
            self.finish.reason.value if self.finish else None,
            reason if isinstance(reason, int) else None,
            self.new_stats(),
            tuple(self.logprobs[first - self.first_own_index :]),
            self._prompt_logprobs() if first == 0 else (),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's, from whoever has computed it."""
        if self.hand_off is not None:
            return self.hand_off.prompt_logprobs
        return tuple(self.sequence.prompt_logprobs) if self.sequence is not None else ()

    def new_stats(self) -> DecodeStats | None:
        """How the leg has gone, if anything of it has changed since it was last told."""
        measured = self._measured()
        if measured == self.told and self.finish is None:
            return None  # the common case of a decode step
        self.told = measured
        return self.stats()

    def _measured(self) -> tuple[object, ...]:
        """All that ``stats`` is made of."""
        sequence = self.sequence
        return (
            self.decode_wait_s,
            self.first_step_s,
            sequence.num_preemptions if sequence else 0,
            sequence.recomputed_prompt_tokens if sequence else 0,
            self.prefill,
            self.pull.measured(),
        )

    def stats(self) -> DecodeStats:
        """How the leg has gone so far."""
        sequence = self.sequence
        return DecodeStats(
            self.decode_wait_s,
            self.first_step_s,
            sequence.num_preemptions if sequence else 0,
            sequence.recomputed_prompt_tokens if sequence else 0,
            None if self.computes else self.pull.stats(),
            self.prefill,
        )
