"""The engine: a step is three verbs, schedule → execute → update.

Owns the pool, the tables and the scheduler of one worker; runs on one thread. Knows nothing of
where sequences come from or where tokens go: each sequence's owner hears of its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.engine.batch import ModelRunner, PoisonedRows, RunnerOutput, SchedulerOutput
from kvferry.engine.beam_search import beam_sampling, searches_beams
from kvferry.engine.histogram import STEP_SECONDS, STEP_TOKENS, Histogram
from kvferry.engine.offload import Offloading
from kvferry.engine.request import Attempt, RequestSpec
from kvferry.engine.scheduled_step import ScheduledStep
from kvferry.engine.scheduler import Scheduler, SchedulerConfig
from kvferry.engine.sequence import (
    SequenceFailure,
    SequenceKey,
    SequenceOwner,
    SequenceState,
    SequenceStatus,
)
from kvferry.kv_cache.block_pool import BlockPool, KVCacheBlock
from kvferry.kv_cache.block_table import BlockTable, KVCacheManager
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.hashing import HashChain, root_hash

logger = logging.getLogger(__name__)


class Fork(NamedTuple):
    """What a second table begins with: the first positions of a table, and the block that the last
    of them are copied into where they do not fill one.
    """

    table: BlockTable
    num_tokens: int
    tail: int | None


class ForkFailed(KVFerryError):
    """A block could not be copied; nothing has been forked."""


class Engine:
    """One worker's engine.

    Args:
        runner: computes steps.
        pool: the worker's blocks.
        block_size: positions per block.
        model: model name and revision, the root of every hash chain.
        clock: seconds, monotonic.
        match_unit: tokens per value of a hash chain; divides ``block_size``, its default.
        offloading: where KV may wait outside the pool; None: nowhere.

    Attributes:
        step_seconds: how long the runner took for each step that it computed.
        step_tokens: how many positions each of these had.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        pool: BlockPool,
        block_size: int,
        model: str,
        clock: Callable[[], float],
        match_unit: int | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.kv = KVCacheManager(pool, block_size)
        self.offloading = offloading
        self.scheduler = Scheduler(config, self.kv, offloading)
        if offloading is not None:
            pool.on_evict = self._keep_evicted
        self.num_failed_steps = 0
        self.step_seconds = Histogram(STEP_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_started_at = 0.0
        self._runner = runner
        self._model = model
        self.match_unit = match_unit if match_unit is not None else block_size
        self.clock = clock

    def new_sequence(
        self,
        spec: RequestSpec,
        attempt: Attempt,
        owner: SequenceOwner,
        *,
        table: BlockTable | None = None,
        hashes: HashChain | None = None,
        output_token_ids: tuple[int, ...] = (),
        num_computed_tokens: int = 0,
        num_cached_tokens: int = 0,
        copies: Sequence[tuple[int, int]] = (),
        branches: tuple[int, ...] | None = None,
        prefill_only: bool = False,
        beam: int | None = None,
        parent: SequenceState | None = None,
    ) -> SequenceState:
        """Make a sequence and hand it to the scheduler.

        Args:
            spec: the request.
            attempt: which try of it.
            owner: hears of its steps.
            table: blocks that already hold ``num_computed_tokens`` positions.
            hashes: the request's hash chain, when somebody has begun it.
            output_token_ids: tokens sampled elsewhere in this attempt, after the KV prompt.
            num_computed_tokens: positions that ``table`` holds.
            num_cached_tokens: prompt positions of these that nobody computed for this request.
            copies: block copies to make before its first step.
            branches: whom it samples for; None: all of the request's.
            prefill_only: end when the first token is sampled.
            beam: its number among the request's beams; None: it chooses its tokens itself.
            parent: the beam that it goes on from, whose place in every line it shares.
        """
        prompt = spec.kv_prompt()
        branches = branches if branches is not None else spec.branches
        assert len(branches) == 1 or prefill_only, "one sequence goes on for one branch only"
        token_ids = [*prompt, *output_token_ids]
        sequence = SequenceState(
            key=SequenceKey(spec.request_id, attempt, branches[0] if beam is None else beam),
            spec=spec,
            owner=owner,
            table=table if table is not None else BlockTable(self.block_size),
            hashes=hashes if hashes is not None else self.hash_chain(spec),
            token_ids=token_ids,
            sampling=beam_sampling(spec) if searches_beams(spec) else spec.sampling,
            branches=branches,
            prefill_only=prefill_only,
            is_beam=beam is not None,
            parked=beam is not None and num_computed_tokens == len(token_ids),
            num_kv_prompt=len(prompt),
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=num_cached_tokens,
            pending_copies=list(copies),
            arrived_at=self.clock(),
        )
        if parent is not None:
            sequence.max_computed_tokens = parent.max_computed_tokens
        self.scheduler.add(sequence, parent)
        return sequence

    def fork(self, forks: Sequence[Fork]) -> list[BlockTable]:
        """Second tables with the KV of the first positions of others.

        They share the full blocks; a last, partial one is copied into the fork's tail, at once. A
        table may be that of a parked sequence. All or nothing: raises ForkFailed, and then the
        tails are given back, too.
        """
        made = [self.kv.fork(*fork) for fork in forks]
        copies = tuple(pair for _, pairs in made for pair in pairs)
        tables = [table for table, _ in made]
        try:
            if copies:
                self._runner.execute(SchedulerOutput((), copies))
        except Exception as error:  # what raises here ends one request, like a step
            for table in tables:
                self.kv.free(table)
            self.num_failed_steps += 1
            logger.error("blocks could not be copied", exc_info=error)
            raise ForkFailed(f"{type(error).__name__}: {error}") from error
        return tables

    def hash_chain(self, spec: RequestSpec) -> HashChain:
        """The request's hash chain, rooted in this engine's model and the request's salt."""
        root = root_hash(self._model, spec.cache_salt)
        return HashChain(root, self.block_size, self.match_unit)

    def go_on(self, sequence: SequenceState, token_id: int) -> None:
        """Continue a parked beam with the token that its owner has chosen."""
        self.scheduler.go_on(sequence, token_id)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.scheduler.sequences)

    def remove(self, sequence: SequenceState) -> None:
        """Abort or finish a sequence: its table is freed. Harmless when already gone."""
        self.scheduler.remove(sequence)
        if self.offloading is not None:
            self.offloading.flush()

    def step(self) -> bool:
        """Run one step; returns whether anything was computed."""
        step = self._plan()
        if step is None:
            return False
        self.step_started_at = self.clock()
        for sequence in step.sequences:
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = self.step_started_at
        try:
            result = self._runner.execute(step.output)
        except PoisonedRows as error:
            self._fail([step.sequences[row] for row in error.rows], error)
            return True  # the others are scheduled again, over the same positions
        except Exception as error:  # the step's boundary: whoever raises alone ends, counted
            if len(step.sequences) == 1:
                self._fail(step.sequences, error)
            else:
                logger.warning("a step raised, its sequences run alone: %s", error)
                self._step_alone(step)
            return True
        self._measure(step)
        self._advance(step, result)
        return True

    def _plan(self) -> ScheduledStep | None:
        """The next step, with every block that it needs in its place."""
        step = self.scheduler.schedule()
        if self.offloading is None:
            return step
        self.offloading.flush()
        lost = self.offloading.take_lost()
        return self.scheduler.without(step, lost) if step is not None and lost else step

    def _keep_evicted(self, block: KVCacheBlock) -> None:
        """Copy a cached block to the host tier before the pool gives it to somebody who may write
        it at once.
        """
        assert self.offloading is not None
        self.offloading.keep(block)
        self.offloading.flush()

    def _measure(self, step: ScheduledStep) -> None:
        """How long a step took; from one that was mostly prompts also what a token takes."""
        num_tokens, took = step.output.num_scheduled_tokens, self.clock() - self.step_started_at
        self.step_seconds.observe(took)
        self.step_tokens.observe(num_tokens)
        if self.offloading is not None and num_tokens >= 2 * len(step.sequences):
            self.offloading.costs.computed(num_tokens, took)

    def _step_alone(self, step: ScheduledStep) -> None:
        """Run each sequence of a step that raised by itself, so that only the culprit ends."""
        for index, sequence in enumerate(step.sequences):
            if sequence.status is SequenceStatus.FINISHED:
                continue  # the owner of another has ended it since
            alone = step.alone(index)
            try:
                result = self._runner.execute(alone.output)
            except Exception as error:  # one sequence's boundary
                self._fail([sequence], error)
            else:
                self._advance(alone, result)

    def _advance(self, step: ScheduledStep, result: RunnerOutput) -> None:
        """Record a completed step and tell the sequences' owners."""
        now = self.clock()
        for progress in self.scheduler.update(step, result):
            sequence = progress.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue  # the owner of another has ended it since
            try:
                sequence.owner.on_progress(progress, now)
            except ForkFailed as error:
                sequence.owner.on_failure(SequenceFailure(sequence, str(error)), now)
                self.remove(sequence)
                continue
            if progress.finish or (sequence.prefill_only and progress.token_id is not None):
                self.remove(sequence)
        if self.offloading is not None:
            self.offloading.flush()

    def _fail(self, sequences: Sequence[SequenceState], error: Exception) -> None:
        """End the sequences that a step could not compute: their KV cannot be trusted."""
        is_requests_fault = isinstance(error, PoisonedRows) and error.is_requests_fault
        if not is_requests_fault:
            self.num_failed_steps += 1
            logger.error(
                "an engine step failed for %d sequences",
                len(sequences),
                exc_info=error,
                extra=_about(sequences),
            )
        now = self.clock()
        for sequence in sequences:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            message = str(error) if is_requests_fault else f"{type(error).__name__}: {error}"
            sequence.owner.on_failure(SequenceFailure(sequence, message, is_requests_fault), now)
            self.remove(sequence)


def _about(sequences: Sequence[SequenceState]) -> dict[str, object]:
    """What a log record about these sequences' requests carries."""
    requests: list[dict[str, object]] = [
        {"request_id": sequence.key.request_id, "attempt": sequence.key.attempt.number}
        for sequence in sequences
    ]
    return requests[0] if len(requests) == 1 else {"requests": requests}
