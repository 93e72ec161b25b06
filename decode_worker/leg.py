"""One decode leg: the decode worker's half of an attempt.

FULL → RESERVED → RUNNING → FINISHED (every branch)          any state → gone
  FULL: a place is kept, no block is held. RESERVED: all prompt blocks are held; those that were
  here already are shared, the others are being filled by reads (or, where the leg ``computes``, by
  the engine, and it is RUNNING at once).
  FINISHED: the output is kept until the router lets go of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.decode_worker.beams import BeamGroup
from kvferry.decode_worker.positions import Positions
from kvferry.engine.batch import TokenLogprobs
from kvferry.engine.beam_search import Beam, beam_sampling, searches_beams
from kvferry.engine.ranking import rank
from kvferry.engine.sequence import SequenceState
from kvferry.engine.stopping import Finish, finish_after
from kvferry.kv_cache.block_table import BlockTable
from kvferry.kv_cache.hashing import HashChain
from kvferry.kv_transfer.connector import ReadId
from kvferry.worker.messages import (
    AnnouncedBlock,
    DecodeStats,
    HandOff,
    HeldItem,
    Leg,
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
    """The source's blocks of one reservation on their way here, keyed by first position.

    Invariant: ``verified_until`` is the end of the leading run of positions that are ``here``; a
    block is in at most one of ``reading`` (by read) and ``verified``.
    """

    source: NodeRef | None = None
    announced: dict[int, AnnouncedBlock] = field(default_factory=dict)
    reading: dict[ReadId, Reading] = field(default_factory=dict)
    verified: dict[int, int] = field(default_factory=dict)  # first position -> end
    here: Positions = field(default_factory=Positions)
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
        self.here.add(start, start + num_tokens)
        self.verified_until = self.here.leading

    def begin_at(self, position: int, num_blocks: int) -> None:
        """The blocks before ``position`` were here: nothing of them is read."""
        self.here.add(0, position)
        self.verified_until = position
        self.blocks_reused = num_blocks

    def share(self, start: int, num_tokens: int) -> None:
        """A block has come for another request, and is this one's too."""
        self.here.add(start, start + num_tokens)
        self.verified_until = self.here.leading
        self.blocks_reused += 1
        self.unacknowledged = True

    def hand_off_received(self, now: float) -> None:
        """Note how far the pull had come when the last chunk was done."""
        self.hand_off_at = now
        self.blocks_before_last_chunk = len(self.verified)

    def is_reading(self, start: int) -> bool:
        """Whether a read of the block at ``start`` is running."""
        return any(start in read.starts for read in self.reading.values())

    def is_reading_any(self, start: int, end: int) -> bool:
        """Whether a read of any of these positions is running."""
        running = (at for read in self.reading.values() for at in read.starts)
        return any(at < end and start < at + self.announced[at].num_tokens for at in running)

    def measured(self) -> tuple[object, ...]:
        """All that ``stats`` is made of, cheaper to compare."""
        return (
            self.connector,
            len(self.verified),
            self.bytes_moved,
            self.blocks_reused,
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
class LegBranch:
    """One branch's output.

    Attributes:
        number: the branch's.
        first_own_index: output index of the first token that this leg reports.
        output: every output token of the branch known here, delivered ones included.
        logprobs: of the tokens from ``first_own_index`` on, if the request wants any.
        reported: output tokens reported to the router so far (an index).
        finish: why its output has ended.
        dropped: the router wants no more of it.
        sequence: what computes it, once it decodes.
    """

    number: int
    first_own_index: int
    output: list[int]
    reported: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    dropped: bool = False
    sequence: SequenceState | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be computed."""
        return self.dropped or self.finish is not None

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A token has been sampled."""
        self.output.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)


@dataclass(slots=True)
class DecodeLeg:
    """State of one leg.

    Attributes:
        branches: what is decoded, as the attempt names them.
        table: the prompt's blocks, until they pass to the sequences.
        tails: blocks for the branches' own copies of the prompt's last, partial block.
        stem: what computes the prompt here for several branches.
        beams: what computes the output, where it is searched.
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
    tails: list[int] = field(default_factory=list)
    hand_off: HandOff | None = None
    branches: tuple[LegBranch, ...] = ()
    stem: SequenceState | None = None
    beams: BeamGroup | None = None
    last_event_seq: int = 0
    ready_at: float | None = None
    decode_wait_s: float | None = None
    first_step_s: float | None = None
    prefill: PrefillStats | None = None
    told: tuple[object, ...] = ()
    computes: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.request.spec
        self.branches = tuple(
            LegBranch(number, len(suffix), list(suffix), len(suffix))
            for number, suffix in zip(spec.branches, spec.suffixes, strict=True)
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be computed."""
        return all(branch.is_over for branch in self.branches)

    @property
    def sequences(self) -> list[SequenceState]:
        """All that computes or has computed for it."""
        found = [branch.sequence for branch in self.branches if branch.sequence is not None]
        if self.beams is not None:
            return self.beams.sequences
        return found if self.stem is None else [self.stem, *found]

    def computing(self, branch: LegBranch) -> list[SequenceState]:
        """What computes for one branch alone."""
        if self.beams is not None:
            return self.beams.sequences
        return [branch.sequence] if branch.sequence is not None else []

    @property
    def held_ids(self) -> list[int]:
        """Every block reference that the leg or one of its sequences holds."""
        tables = {id(s.table): s.table for s in self.sequences}
        if self.table is not None:
            tables[id(self.table)] = self.table
        held = [block_id for table in tables.values() for block_id in table.held_ids]
        return held + self.tails

    def branch(self, number: int) -> LegBranch | None:
        """The branch of that number; None where this attempt has none."""
        return next((branch for branch in self.branches if branch.number == number), None)

    @property
    def num_kv_prompt(self) -> int:
        """Positions whose KV must be here before decode can begin."""
        return len(self.request.spec.kv_prompt())

    def misfit(self, hand_off: HandOff) -> str:
        """Why this leg cannot begin with a hand-off; empty if it can."""
        if len(hand_off.token_ids) != len(self.branches):
            return f"hand-off for {len(hand_off.token_ids)} branches of {len(self.branches)}"
        if not searches_beams(self.request.spec):
            return ""
        wanted = beam_sampling(self.request.spec).logprobs
        got = [len(entry.top_ids) for entry in hand_off.logprobs]
        return "" if got == [wanted] else f"hand-off with {got} of the {wanted} likeliest tokens"

    def take_first(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[LegBranch]:
        """Token 1 of every branch that has none yet is here; the branches that go on."""
        spec = self.request.spec
        for place, branch in enumerate(self.branches):
            if spec.own_suffix(place):
                continue
            index, token_id = len(branch.output), token_ids[place]
            branch.take(token_id, logprobs[place] if logprobs else None)
            if len(self.branches) > 1:  # of a single one the router ends the request
                branch.finish = finish_after(spec, index, token_id)
        return [branch for branch in self.branches if not branch.is_over]

    def conclude(self, best: Beam) -> None:
        """The search is over: the output is known, whole."""
        (branch,) = self.branches
        branch.output = list(best.token_ids)
        last = len(branch.output) - 1
        branch.finish = finish_after(self.request.spec, last, branch.output[last])
        self.note_end()

    def rank(self, ageing: float | None) -> float:
        """Its place among those that are FULL; of equal ones the first to come is first."""
        return rank(self.request.spec.priority, self.received_at, ageing)

    def note_end(self) -> None:
        """The last of its branches may be over."""
        if self.is_over:
            self.state = LegState.FINISHED

    def time_first(self, sequence: SequenceState, begun: float, now: float) -> None:
        """Measure the wait and the first decode step, once each, on this worker's clock.

        A step for the sequence was ``begun`` and has ended now.
        """
        started = sequence.first_scheduled_at if sequence.first_scheduled_at is not None else now
        if self.computes and self.prefill is None:
            self.prefill = PrefillStats(
                started - self.received_at,
                now - started,
                sequence.num_prefill_chunks,
                sequence.recomputed_prompt_tokens,
                sequence.num_preemptions,
                sequence.num_cached_tokens,
            )
            self.ready_at = now
        elif self.first_step_s is None and self.ready_at is not None:
            self.decode_wait_s = max(0.0, begun - self.ready_at)
            self.first_step_s = now - begun

    def held_item(self) -> HeldItem:
        """What the router is told that is held for it."""
        return HeldItem(
            self.request.spec.request_id,
            self.request.attempt,
            Leg.DECODE,
            self.state,
            0,
            sum(branch.reported for branch in self.branches),
            self.pull.verified_until,
            self.computes,
        )

    def event(self, branch: LegBranch, from_index: int) -> TokenEvent:
        """A branch's own tokens from an output index on, its finish, and the stats if new."""
        first = max(branch.first_own_index, min(from_index, len(branch.output)))
        reason = branch.finish.stop_reason if branch.finish else None
        is_first = first == 0 and branch is self.branches[0]
        return TokenEvent(
            self.request.spec.request_id,
            self.request.attempt,
            branch.number,
            first,
            tuple(branch.output[first:]),
            branch.finish.reason.value if branch.finish else None,
            reason if isinstance(reason, int) else None,
            self.new_stats(branch),
            tuple(branch.logprobs[first - branch.first_own_index :]),
            self._prompt_logprobs() if is_first else (),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's, from whoever has computed it."""
        if self.hand_off is not None:
            return self.hand_off.prompt_logprobs
        return tuple(self.sequences[0].prompt_logprobs) if self.sequences else ()

    def new_stats(self, branch: LegBranch) -> DecodeStats | None:
        """How the leg has gone, if that has changed since it was last told or a branch ends."""
        measured = self._measured()
        if measured == self.told and branch.finish is None:
            return None  # the common case of a decode step
        self.told = measured
        return self.stats()

    def _measured(self) -> tuple[object, ...]:
        """All that ``stats`` is made of."""
        return (
            self.decode_wait_s,
            self.first_step_s,
            *self._lost(),
            self.prefill,
            self.pull.measured(),
        )

    def _lost(self) -> tuple[int, int]:
        """Preemptions, and prompt positions computed again, of all branches."""
        losers: list[SequenceState | BeamGroup] = [*self.sequences]
        if self.beams is not None:
            losers.append(self.beams)
        return (
            sum(each.num_preemptions for each in losers),
            sum(each.recomputed_prompt_tokens for each in losers),
        )

    def stats(self) -> DecodeStats:
        """How the leg has gone so far."""
        return DecodeStats(
            self.decode_wait_s,
            self.first_step_s,
            *self._lost(),
            None if self.computes else self.pull.stats(),
            self.prefill,
        )
