"""The machine's runner and owner: they write, copy and read where the product tells them to.

The runner holds each share of a step against the model, does as it is told with the memory, and
reads back all positions of each sequence through the table that it was shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvferry.engine.batch import PoisonedRows, RunnerOutput, ScheduledSequence, SchedulerOutput
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceFailure, SequenceProgress
from tests.engine.cache_host import HostModel
from tests.engine.cache_model import CacheModel, Record


class StepFails(Exception):
    """The runner was told to fail."""


class MemoryRunner:
    """See the module.

    Attributes:
        poison: sequence for which no token can be had in the next step.
        culprit: sequence whose steps raise once everything has been written.
        fault: what was wrong with a step; the engine takes it for a failed one.
        host: what lies outside the pool, if anything may.
    """

    def __init__(self, model: CacheModel, config: SchedulerConfig) -> None:
        self.poison: int | None = None
        self.culprit: int | None = None
        self.fault: Exception | None = None
        self.host: HostModel | None = None
        self._model = model
        self._config = config

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute a step."""
        try:
            return self._execute(output)
        except (PoisonedRows, StepFails):
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise

    def _execute(self, output: SchedulerOutput) -> RunnerOutput:
        model = self._model
        model.spoil()
        if not output.sequences:
            for source, target in output.copies:
                model.copy(source, target, num_holders=0)
            return RunnerOutput(())
        model.notice_preemptions()
        if self.host is not None:
            self.host.end_stopped()
        model.note_owners()
        shares = [(model.records[s.sampling.seed], s) for s in output.sequences]
        self._check_budgets(output)
        for record, share in shares:
            self._check_share(record, share)
        for source, target in output.copies:
            model.copy(source, target)
            for record, _ in shares:
                record.uncopied.pop(target, None)
        written: Counter[tuple[int, int]] = Counter()
        for record, share in shares:
            model.touched.update(share.block_table)
            for position in range(share.start, share.start + len(share.token_ids)):
                index, offset = divmod(position, model.size)
                written[share.block_table[index], offset] += 1
                model.write(share.block_table[index], offset, record.cells[position])
        assert set(written.values()) == {1}, "a slot has two writers"
        for record, share in shares:
            self._read_back(record, share)
        numbers = [record.number for record, _ in shares]
        if self.poison in numbers:
            model.seen["poisoned"] += 1
            raise PoisonedRows([numbers.index(self.poison)])
        if self.culprit in numbers:
            model.seen["raised"] += 1
            raise StepFails
        return RunnerOutput(tuple(self._complete(record, share) for record, share in shares))

    def _check_budgets(self, output: SchedulerOutput) -> None:
        assert output.num_scheduled_tokens <= self._config.max_num_batched_tokens
        assert len(output.sequences) <= self._config.max_num_seqs
        chunks = [len(share.token_ids) for share in output.sequences]
        assert 1 <= min(chunks) <= max(chunks) <= self._config.chunk_tokens

    def _check_share(self, record: Record, share: ScheduledSequence) -> None:
        """The share goes on where the sequence stands, and its table has room for it."""
        assert not record.parked, "a parked beam computes"
        if record.fresh:
            self._admit(record, share)
        start, end = share.start, share.start + len(share.token_ids)
        assert start == len(record.held), "computed from another position"
        assert list(share.token_ids) == record.tokens[start:end], "other tokens"
        assert share.sample == (end == len(record.tokens))
        assert len(share.block_table) * self._model.size >= end

    def _admit(self, record: Record, share: ScheduledSequence) -> None:
        """What it begins with is all that can be found of it, less the last token."""
        model, host, record.fresh = self._model, self.host, False
        most = len(record.cells) - 1
        before = model.longest_prefix(record.cells, model.findable_before) if record.reuses else 0
        after = model.longest_prefix(record.cells, model.findable) if record.reuses else 0
        # Where the copy of its last block would be one block too many it begins before that.
        given_up = max(0, -(-after // model.size) - 1) * model.size
        if host is not None:
            before = host.reach(record, before, host.ever)
            after = host.reach(record, after, host.always)
            given_up = host.reach(record, given_up, host.always)
        if before == after:
            assert share.start in (min(after, most), min(given_up, most)), (share.start, after)
        assert min(given_up, most) <= share.start <= min(before, most), (share.start, before, after)
        record.held = {position: record.cells[position] for position in range(share.start)}
        model.seen["reused"] += share.start > 0
        model.seen["given up"] += share.start < min(after, most)
        if record.holding and not record.num_swapped:
            model.seen["reused from the host"] += 1
        if record.num_swapped:
            whole = share.start >= min(record.num_swapped, most)
            assert whole or record.lost_some, "swapped, and not whole"
            model.seen["restored"] += whole
            model.seen["recomputed what was lost"] += record.lost_some

    def _read_back(self, record: Record, share: ScheduledSequence) -> None:
        for position in range(share.start + len(share.token_ids)):
            index, offset = divmod(position, self._model.size)
            found = self._model.memory[share.block_table[index]][offset]
            assert found == record.cells[position], f"r{record.number} reads another's {position}"

    def _complete(self, record: Record, share: ScheduledSequence) -> int | None:
        """The share is computed: blocks that are full now are sealed."""
        model, end = self._model, share.start + len(share.token_ids)
        for position in range(share.start, end):
            record.held[position] = record.cells[position]
        token = model.words.next_token(record.cells[-1]) if share.sample else None
        last = end if record.prefill_only and share.sample else end // model.size * model.size
        for start in range(0, last, model.size):
            block_id = share.block_table[start // model.size]
            if model.closed.get(block_id) != model.published[block_id]:
                model.seal(block_id, record.cells, start, min(start + model.size, last))
        record.let_go()
        if token is not None and record.group is not None:
            record.parked = True
        elif token is not None:
            record.tokens.append(token)
            record.cells.append(model.words.after(record.cells[-1], token))
        return token


class MachineOwner:
    """Hears of the steps as a role does.

    Args:
        lease: pins what a prefill job's step has sealed.
        ended: the sequence is over; the engine frees it.
        parked: a beam has computed.
    """

    def __init__(
        self,
        model: CacheModel,
        lease: Callable[[Record, SequenceProgress], None],
        ended: Callable[[Record], None],
        parked: Callable[[Record], None],
    ) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self._model, self._lease, self._ended, self._parked = model, lease, ended, parked

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """Check what is told; end what has ended."""
        sequence, model = progress.sequence, self._model
        record = model.records[sequence.spec.sampling.seed]
        for block in progress.sealed:
            assert block.start == record.told, "told of blocks out of order"
            record.told += block.num_tokens
            assert record.table.block_ids[block.start // model.size] == block.block_id
            assert model.closed.get(block.block_id) == model.published[block.block_id]
        done = progress.token_id is not None
        whole = record.prefill_only and done
        assert record.told == (
            len(record.held) if whole else record.told // model.size * model.size
        )
        assert record.told >= len(record.held) // model.size * model.size, (
            "a full block is not told"
        )
        if done and record.group is None:
            assert progress.token_id == record.tokens[-1]
        self._lease(record, progress)
        num_output = len(record.tokens) - record.num_prompt
        finished = done and num_output >= record.max_tokens and record.group is None
        assert (progress.finish is not None) == finished
        if finished or whole:
            model.seen["finished"] += 1
            self._ended(record)
        if record.parked:
            self._parked(record)
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            act()

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """The sequence is over."""
        self._model.seen["failed"] += 1
        self._ended(self._model.records[failure.sequence.spec.sampling.seed])
