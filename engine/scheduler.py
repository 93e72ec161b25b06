"""The scheduler: which tokens are computed in the next step, on which blocks.

One rule for prefill, chunked prefill, decode and recomputation after preemption: a sequence has
tokens, some of which are computed; a step computes up to a token budget, subject to the blocks.

Each step:
 1. Running sequences get their uncomputed tokens (at most ``chunk_tokens`` each): first those
    that decode, one token each, so that a long prompt does not hold them up; oldest first. When
    one cannot grow, the newest running sequence that would free a block now is preempted: its
    table is freed and it waits to be computed again. Each preemption takes one sequence out of
    the running list, so a step cannot loop.
 2. If nobody was preempted, waiting sequences are admitted in order of arrival while their whole
    known length fits beside what running ones still need for theirs, above the watermark (the
    share kept free so that running ones can grow). Each begins with the KV that is here already
    (``engine.prefix_reuse``); one whose next block another is computing is passed over.
    The first that does not fit stops the line: a large one is not starved by small ones.
    Sequences that came with computed blocks and found every seat taken stand first in line, for
    their blocks come back only when they run.
 3. If nothing runs and the first in line does not fit, the newest other sequence that waits with
    blocks gives them back; likewise if nothing that runs can go on because its blocks are shared.

Pure and deterministic; knows no model, clock, socket or role.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from kvferry.engine.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from kvferry.engine.prefix_reuse import PrefixReuse
from kvferry.engine.sequence import SequenceKey, SequenceProgress, SequenceState, SequenceStatus
from kvferry.engine.stopping import Finish, finish_after
from kvferry.kv_cache.block_table import KVCacheManager


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of one step. ``watermark`` is a share of the pool, 0 to 1."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 288
    chunk_tokens: int = 256
    watermark: float = 0.01


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step as the runner sees it, beside the sequences it is for (same order)."""

    output: SchedulerOutput
    sequences: tuple[SequenceState, ...]

    def alone(self, index: int) -> ScheduledStep:
        """The share of one sequence as a step by itself, with the copies into its own blocks.

        These may be made again; those of others would undo what they have written since.
        """
        share = self.output.sequences[index]
        copies = tuple(pair for pair in self.output.copies if pair[1] in share.block_table)
        return ScheduledStep(SchedulerOutput((share,), copies), (self.sequences[index],))


class Scheduler:
    """Waiting and running sequences of one engine; see the module for the algorithm."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self._kv = kv
        self._reuse = PrefixReuse(kv)
        self._arrivals = 0
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.sequences: dict[SequenceKey, SequenceState] = {}
        self.num_preemptions = 0

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free for running sequences to grow into."""
        return int(self.config.watermark * self._kv.pool.num_blocks)

    def add(self, sequence: SequenceState) -> None:
        """Take a sequence in; its table may already hold computed blocks."""
        if sequence.key in self.sequences:
            raise ValueError(f"sequence {sequence.key} is already in the scheduler")
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.max_computed_tokens = sequence.num_computed_tokens
        self.sequences[sequence.key] = sequence
        if sequence.table.block_ids and len(self.running) < self.config.max_num_seqs:
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
        else:
            insort(self.waiting, sequence, key=_place_in_line)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out and free its table; unknown or removed ones are ignored."""
        if self.sequences.get(sequence.key) is not sequence:
            return
        del self.sequences[sequence.key]
        self._leave_line(sequence)
        self._reuse.stop(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._kv.free(sequence.table)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be computed, the one of each decode step not among them."""
        uncomputed = (s.num_uncomputed_tokens for s in self.sequences.values())
        return sum(count for count in uncomputed if count > 1)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence that has run before waits for blocks."""
        return any(sequence.num_preemptions for sequence in self.waiting)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when nothing can run."""
        budget, chunk_tokens = self.config.max_num_batched_tokens, self.config.chunk_tokens
        planned: list[tuple[SequenceState, int]] = []
        preempted = False
        for sequence in self._decoding_first():
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted earlier in this loop
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
                tuple([_scheduled(sequence, count) for sequence, count in planned]),
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
            _count_computed(sequence, count)
            finish: Finish | None = None
            if token_id is not None:
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

    def _victim(self) -> SequenceState | None:
        """The newest running sequence whose table would give a block back now."""
        candidates = (s for s in self.running if self._kv.has_freeable_block(s.table))
        return max(candidates, key=lambda s: s.arrival, default=None)

    def _take_back(self) -> None:
        """Nobody can go on: free the table of the newest sequence that waits with one.

        Not that of the first in line where nothing runs. Where none gives a block back now, one
        that shares blocks lets go of them, so that they are another's alone. What runs and shares
        nothing waits for a lease to end, and nobody has to give way.
        """
        if self.running and not any(self._kv.has_shared_block(s.table) for s in self.running):
            return
        waiting = self.waiting if self.running else self.waiting[1:]
        holders = [s for s in waiting if self._kv.has_freeable_block(s.table)]
        if not holders:
            others = (*self.running[1:], *waiting)
            holders = [s for s in others if self._kv.has_shared_block(s.table)]
        if holders:
            self._preempt(holders[-1])

    def _decoding_first(self) -> list[SequenceState]:
        """The running sequences, those with one token to compute first; oldest first."""
        chunks = [s for s in self.running if s.num_uncomputed_tokens > 1]
        if not chunks:
            return self.running.copy()
        return [s for s in self.running if s.num_uncomputed_tokens <= 1] + chunks

    def _leave_line(self, sequence: SequenceState) -> None:
        """Take a sequence out of the line that it stands in; both are sorted."""
        if sequence.status is SequenceStatus.RUNNING:
            line, place = self.running, bisect_left(self.running, sequence.arrival, key=_arrival)
        else:
            line = self.waiting
            place = bisect_left(line, _place_in_line(sequence), key=_place_in_line)
        assert line[place] is sequence, "the line is not in order"
        del line[place]

    def _preempt(self, victim: SequenceState) -> None:
        self._leave_line(victim)
        self._reuse.stop(victim)
        self._kv.free(victim.table)
        victim.pending_copies.clear()
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.WAITING
        insort(self.waiting, victim, key=_place_in_line)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> list[tuple[SequenceState, int]]:
        admitted = []
        promised = self._promised_blocks()
        place = 0  # of the next one to look at: those before it wait for another's block
        while place < len(self.waiting) and budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[place]
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
            if not sequence.table.block_ids:
                self._reuse.begin(sequence, beginning)
            count = min(sequence.num_uncomputed_tokens, self.config.chunk_tokens, budget)
            computed = sequence.num_computed_tokens
            copies = self._kv.allocate(sequence.table, computed, computed + count)
            assert copies is not None, "what was found to fit does not"
            sequence.pending_copies.extend(copies)
            self.waiting.pop(place)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=_arrival)
            promised += self._kv.blocks_needed(sequence.table, len(sequence.token_ids))
            admitted.append((sequence, count))
            budget -= count
        return admitted

    def _promised_blocks(self) -> int:
        """Blocks that running sequences lack for the tokens they already have."""
        return sum(self._kv.blocks_needed(s.table, len(s.token_ids)) for s in self.running)


def _arrival(sequence: SequenceState) -> int:
    return sequence.arrival


def _place_in_line(sequence: SequenceState) -> tuple[bool, int]:
    return not sequence.table.block_ids, sequence.arrival


def _scheduled(sequence: SequenceState, count: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    sampling = sequence.spec.sampling
    return ScheduledSequence(
        token_ids=sequence.token_ids[start : start + count],
        start=start,
        block_table=sequence.table.block_ids,
        sample=start + count == len(sequence.token_ids),
        sampling=sampling,
        branches=sequence.branches,
        output_index=sequence.num_output_tokens,
        known_token_ids=sequence.token_ids if sampling.looks_back else (),
        eos_token_ids=sequence.spec.eos_token_ids,
        prompt_targets=sequence.prompt_targets(start + 1, start + count + 1),
    )


def _take_copies(sequence: SequenceState) -> list[tuple[int, int]]:
    copies, sequence.pending_copies = sequence.pending_copies, []
    return copies


def _count_computed(sequence: SequenceState, count: int) -> None:
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens = end = start + count
    if start < sequence.num_kv_prompt:
        sequence.num_prefill_chunks += 1
    if start >= sequence.max_computed_tokens:  # the common case: nothing is recomputed
        sequence.max_computed_tokens = end
        return
    again = min(end, sequence.max_computed_tokens) - start
    sequence.recomputed_tokens += again
    sequence.recomputed_prompt_tokens += max(0, min(start + again, sequence.num_kv_prompt) - start)
    sequence.max_computed_tokens = max(sequence.max_computed_tokens, end)
