"""The scheduler: which tokens are computed in the next step, on which blocks.

One rule for prefill, chunked prefill, decode and recomputation after preemption: a sequence has
tokens, some of which are computed; a step computes up to a token budget, subject to the blocks.

Each step:
 1. Running sequences get their uncomputed tokens (at most ``chunk_tokens`` each): first those
    that decode, one token each, so that a long prompt does not hold them up; oldest first. When
    one cannot grow, the last in rank of the running sequences that would free a block now is
    preempted: its table is freed and it waits to be computed again or, if its KV went to the host
    tier (``engine.offload``), to be copied back. Each preemption takes one sequence out of the
    running list, so a step cannot loop.
 2. If nobody was preempted, waiting sequences are admitted in order of rank while their whole
    known length fits beside what running ones still need for theirs, above the watermark (the
    share kept free so that running ones can grow). Each begins with the KV that is here already
    (``engine.prefix_reuse``); one whose next block another is computing is passed over.
    The first that does not fit stops the line: a large one is not starved by small ones.
    Sequences that came with computed blocks and found every seat taken stand first in line, for
    their blocks come back only when they run.
 3. If nothing runs and the first in line does not fit, the last other sequence that waits with
    blocks gives them back; likewise if nothing that runs can go on because its blocks are shared.

A **beam** is parked with each token that it has sampled: it keeps its table, and may be preempted
like any other, but takes no seat and computes nothing until its owner has chosen its next token.

Rank is order of arrival, or priority with ageing (``engine.ranking``); it never changes. All beams
of a search have that of their first.

Pure and deterministic; knows no model, clock, socket or role.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.counters import EngineCounters, count_computed
from kvferry.engine.offload import Offloading
from kvferry.engine.prefix_reuse import PrefixReuse
from kvferry.engine.ranking import rank
from kvferry.engine.scheduled_step import ScheduledStep, share_of
from kvferry.engine.sequence import SequenceKey, SequenceProgress, SequenceState, SequenceStatus
from kvferry.engine.stopping import Finish, finish_after
from kvferry.kv_cache.block_table import KVCacheManager


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of one step, and who comes first.

    ``watermark`` is a share of the pool, 0 to 1; ``ageing`` is how many seconds of waiting one
    level of priority is worth, None where requests come in order of arrival.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 288
    chunk_tokens: int = 256
    watermark: float = 0.01
    ageing: float | None = None


class Scheduler:
    """Waiting and running sequences of one engine; see the module for the algorithm.

    Swapped sequences stand among the waiting ones.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, offloading: Offloading | None = None
    ) -> None:
        self.config = config
        self._kv = kv
        self._offloading = offloading
        self._reuse = PrefixReuse(kv, offloading)
        self.counters = offloading.counters if offloading is not None else EngineCounters()
        self._arrivals = 0
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.sequences: dict[SequenceKey, SequenceState] = {}

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free for running sequences to grow into."""
        return int(self.config.watermark * self._kv.pool.num_blocks)

    def add(self, sequence: SequenceState, beside: SequenceState | None = None) -> None:
        """Take a sequence in; its table may already hold computed blocks.

        It stands in every line where ``beside``, of the same request, does; None: at the end.
        """
        if sequence.key in self.sequences:
            raise ValueError(f"sequence {sequence.key} is already in the scheduler")
        if beside is None:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            sequence.rank = rank(sequence.spec.priority, sequence.arrived_at, self.config.ageing)
        else:
            sequence.arrival, sequence.arrived_at = beside.arrival, beside.arrived_at
            sequence.rank = beside.rank
        known = max(sequence.max_computed_tokens, sequence.num_computed_tokens)
        sequence.max_computed_tokens = known
        self.sequences[sequence.key] = sequence
        if sequence.table.block_ids and self.num_active < self.config.max_num_seqs:
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_rank)
        else:
            insort(self.waiting, sequence, key=_place_in_line)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out and free its table and what the host tier keeps for it; unknown or
        removed ones are ignored.
        """
        if self.sequences.get(sequence.key) is not sequence:
            return
        del self.sequences[sequence.key]
        self._leave_line(sequence)
        self._reuse.stop(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._kv.free(sequence.table)
        if self._offloading is not None:
            self._offloading.release(sequence)

    def go_on(self, sequence: SequenceState, token_id: int) -> None:
        """Continue a parked sequence with its owner's choice."""
        assert sequence.parked, "its owner has chosen already"
        sequence.token_ids.append(token_id)
        sequence.parked = False

    @property
    def num_active(self) -> int:
        """Running sequences that take a seat: parked ones have nothing to compute."""
        return sum(not s.parked for s in self.running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self.counters.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be computed, again or for the first time."""
        return sum(s.status is SequenceStatus.WAITING and not s.parked for s in self.waiting)

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV waits in the host tier."""
        return sum(s.status is SequenceStatus.SWAPPED for s in self.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be computed, the one of each decode step not among them."""
        uncomputed = (
            len(s.token_ids) - max(s.num_computed_tokens, s.num_swapped_tokens)
            for s in self.sequences.values()
        )
        return sum(count for count in uncomputed if count > 1)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence that has run before, or begins amid its search, waits for blocks."""
        return any((s.num_preemptions or s.is_beam) and not s.parked for s in self.waiting)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when nothing can run."""
        budget, chunk_tokens = self.config.max_num_batched_tokens, self.config.chunk_tokens
        planned: list[tuple[SequenceState, int]] = []
        preempted = False
        for sequence in self._decoding_first():
            if budget == 0 or len(planned) == self.config.max_num_seqs:
                break
            if sequence.parked or sequence.status is not SequenceStatus.RUNNING:
                continue  # nothing to compute, or preempted earlier in this loop
            count = min(sequence.num_uncomputed_tokens, chunk_tokens, budget)
            grown, victims = self._grow(sequence, count)
            preempted = preempted or victims
            if grown:
                planned.append((sequence, count))
                budget -= count
        if preempted:
            planned = [(s, n) for s, n in planned if s.status is SequenceStatus.RUNNING]
        elif self.waiting:
            planned.extend(self._admit(budget))
        if not planned:
            if not preempted:
                self._take_back()
            return None
        return ScheduledStep(
            SchedulerOutput(
                tuple([share_of(sequence, count) for sequence, count in planned]),
                tuple(pair for s, _ in planned if s.pending_copies for pair in _take_copies(s)),
            ),
            tuple(sequence for sequence, _ in planned),
        )

    def update(self, step: ScheduledStep, result: RunnerOutput) -> list[SequenceProgress]:
        """Record a completed step: computed counts, sampled tokens, sealed blocks."""
        progress = []
        for place, (sequence, share, token_id) in enumerate(
            zip(step.sequences, step.output.sequences, result.token_ids, strict=True)
        ):
            count = len(share.token_ids)
            if result.prompt_logprobs:
                sequence.add_prompt_logprobs(share.start + 1, result.prompt_logprobs[place])
            self._kv.copies_made(sequence.table)
            if self._offloading is not None:
                self._offloading.release(sequence)  # it has computed with what was copied back
            count_computed(sequence, count, self.counters)
            finish: Finish | None = None
            if token_id is not None and sequence.is_beam:
                sequence.parked = True
            elif token_id is not None:
                finish = finish_after(sequence.spec, sequence.num_output_tokens, token_id)
                sequence.token_ids.append(token_id)
            sealed = self._kv.seal(
                sequence.table,
                sequence.token_ids,
                sequence.num_computed_tokens,
                sequence.hashes,
                include_partial=sequence.prefill_only and token_id is not None,
            )
            if sequence.reused:
                sealed = [*sequence.reused, *sealed]
                sequence.reused.clear()
            if sequence.computing and token_id is not None:
                self._reuse.stop(sequence)
            logprobs = result.logprobs[place] if result.logprobs else None
            further = result.further[place] if result.further else ()
            progress.append(
                SequenceProgress(
                    sequence, count, token_id, finish, tuple(sealed), logprobs, further
                )
            )
        return progress

    def _grow(self, sequence: SequenceState, count: int) -> tuple[bool, bool]:
        """Make room for ``count`` tokens; returns (room made, anybody preempted)."""
        preempted = False
        while True:
            computed = sequence.num_computed_tokens
            copies = self._kv.allocate(sequence.table, computed, computed + count)
            if copies is not None:
                sequence.pending_copies.extend(copies)
                return True, preempted
            victim = self._victim()
            if victim is None:
                return False, preempted
            self._preempt(victim)
            preempted = True
            if victim is sequence:
                return False, preempted

    def without(self, step: ScheduledStep, lost: AbstractSet[int]) -> ScheduledStep | None:
        """A step less those sequences that were to begin with blocks whose content is lost.

        They wait again, and compute what is lost. None when nobody is left.
        """
        kept = []
        for index, sequence in enumerate(step.sequences):
            if lost.isdisjoint(sequence.table.block_ids):
                kept.append(index)
            else:
                self._stop_running(sequence)
                self._wait(sequence)
        if not kept:
            return None
        shares = tuple(step.output.sequences[index] for index in kept)
        return ScheduledStep(
            SchedulerOutput(shares, step.output.copies),
            tuple(step.sequences[index] for index in kept),
        )

    def _victim(self) -> SequenceState | None:
        """The last in rank of the running sequences whose table would give a block back now."""
        return next(
            (s for s in reversed(self.running) if self._kv.has_freeable_block(s.table)), None
        )

    def _take_back(self) -> None:
        """Nobody can go on: free the table of the last sequence that waits with one.

        Those that are parked give way first. Not that of the first in line where nothing runs.
        Where none gives a block back now, one that shares blocks lets go of them, so that they are
        another's alone. What runs and shares nothing waits for a lease to end, and nobody has to
        give way.
        """
        active = [s for s in self.running if not s.parked]
        if active and not any(self._kv.has_shared_block(s.table) for s in active):
            return
        line = [s for s in self.waiting if not s.parked]
        parked = [s for s in (*self.waiting, *self.running) if s.parked]
        waiting = [*(line if active else line[1:]), *parked]
        holders = [s for s in waiting if self._kv.has_freeable_block(s.table)]
        if not holders:
            others = (*active[1:], *waiting)
            holders = [s for s in others if self._kv.has_shared_block(s.table)]
        if holders:
            self._preempt(holders[-1])

    def _decoding_first(self) -> list[SequenceState]:
        """The running sequences in order of rank, those with one token to compute first."""
        chunks = [s for s in self.running if s.num_uncomputed_tokens > 1]
        if not chunks:
            return self.running.copy()
        return [s for s in self.running if s.num_uncomputed_tokens <= 1] + chunks

    def _leave_line(self, sequence: SequenceState) -> None:
        """Take a sequence out of the line that it stands in; both are sorted."""
        if sequence.status is SequenceStatus.RUNNING:
            line, place = self.running, bisect_left(self.running, _rank(sequence), key=_rank)
        else:
            line = self.waiting
            place = bisect_left(line, _place_in_line(sequence), key=_place_in_line)
        assert line[place] is sequence, "the line is not in order"
        del line[place]

    def _preempt(self, victim: SequenceState) -> None:
        """Take a sequence's blocks; its KV goes to the host tier if that is the better way."""
        if self._offloading is not None and self._offloading.save(victim):
            self.counters.preemptions_offload += 1
        else:
            self.counters.preemptions_recompute += 1
        victim.num_preemptions += 1
        self._stop_running(victim)
        self._wait(victim)

    def _stop_running(self, sequence: SequenceState) -> None:
        self._leave_line(sequence)
        self._reuse.stop(sequence)
        self._kv.free(sequence.table)
        sequence.pending_copies.clear()
        sequence.num_computed_tokens = 0

    def _wait(self, sequence: SequenceState) -> None:
        swapped = self._offloading is not None and self._offloading.has_swapped(sequence)
        sequence.status = SequenceStatus.SWAPPED if swapped else SequenceStatus.WAITING
        insort(self.waiting, sequence, key=_place_in_line)

    def _admit(self, budget: int) -> list[tuple[SequenceState, int]]:
        admitted = []
        promised = self._promised_blocks()
        place = 0  # of the next one to look at: those before it wait for another's block
        seats = self.config.max_num_seqs - self.num_active
        while place < len(self.waiting) and budget and seats > 0:
            sequence = self.waiting[place]
            if sequence.parked:
                place += 1
                continue
            spare = self.watermark_blocks + promised if self.running else 0
            if sequence.table.block_ids:
                whole = self._kv.blocks_needed(sequence.table, len(sequence.token_ids))
                whole += self._kv.needs_copy(sequence.table, sequence.num_computed_tokens)
                available = self._kv.pool.num_free
            else:
                beginning = self._reuse.find(sequence)
                whole, available = beginning.num_blocks, beginning.num_available
                if self._reuse.must_wait(sequence, beginning):
                    place += 1
                    continue
            if whole and whole + spare > available:
                break
            begins = not sequence.table.block_ids
            if begins:
                self._reuse.begin(sequence, beginning)
            count = min(sequence.num_uncomputed_tokens, self.config.chunk_tokens, budget)
            computed = sequence.num_computed_tokens
            copies = self._kv.allocate(sequence.table, computed, computed + count)
            assert copies is not None, "what was found to fit does not"
            if begins:
                self._reuse.restore(sequence, beginning)
            sequence.pending_copies.extend(copies)
            self.waiting.pop(place)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_rank)
            promised += self._kv.blocks_needed(sequence.table, len(sequence.token_ids))
            admitted.append((sequence, count))
            budget -= count
            seats -= 1
        return admitted

    def _promised_blocks(self) -> int:
        """Blocks that running sequences lack for the tokens they already have."""
        return sum(self._kv.blocks_needed(s.table, len(s.token_ids)) for s in self.running)


def _rank(sequence: SequenceState) -> tuple[float, int, int]:
    return sequence.rank, sequence.arrival, sequence.key.branch


def _place_in_line(sequence: SequenceState) -> tuple[bool, float, int, int]:
    return not sequence.table.block_ids, *_rank(sequence)


def _take_copies(sequence: SequenceState) -> list[tuple[int, int]]:
    copies, sequence.pending_copies = sequence.pending_copies, []
    return copies
