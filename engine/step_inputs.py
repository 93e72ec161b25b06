"""What a step's batch looks like as flat arrays, checked against the limits of a runner.

Owns how tokens, positions, slots, block tables and lengths of a ``SchedulerOutput`` are laid out,
and what is refused. Pure but for the rows that it keeps between steps; does not know where the
arrays lie, nor what is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.batch import ScheduledSequence
from kvferry.engine.table_rows import BlockOutOfRange, TableRows
from kvferry.kv_cache.errors import KVFerryError


class InvalidStep(KVFerryError):
    """A step that cannot be computed as scheduled; names the sequence and the limit."""


class StepArrays(NamedTuple):
    """Where a step is written: at least its tokens, sequences and widest table.

    Attributes:
        input_ids, positions, slots: int64 ``[num_tokens]``.
        cu_seqlens: int32 ``[num_seqs + 1]``.
        seq_lens: int32 ``[num_seqs]``.
        tables: int32 ``[num_seqs, width]``.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    tables: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that may be written.

    Attributes:
        token_ids: of all sequences, one after the other.
        starts: the first position of each sequence's share.
        ends: cumulative numbers of tokens from 0.  [num_seqs + 1]
        rows: where the sequences' block tables are kept.
        longest: the most positions that any sequence has after the step.
    """

    token_ids: list[int]
    starts: list[int]
    ends: list[int]
    rows: list[int]
    longest: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return len(self.starts)


NOTHING = StepPlan([], [], [0], [], 0)


class StepInputs:
    """Plans and writes the steps of one runner, whose limits these are.

    Args:
        max_tokens, max_seqs: of one step.
        max_model_len: positions of one sequence.
        block_size: positions per block.
        num_blocks: of the pool.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self._max_tokens = max_tokens
        self._max_seqs = max_seqs
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._table_rows = TableRows(max_seqs, self.max_blocks, num_blocks)

    def num_blocks_for(self, num_positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_positions // self.block_size)

    def plan(self, sequences: Sequence[ScheduledSequence]) -> StepPlan:
        """Check a batch and take in its block tables. Raises InvalidStep."""
        num_seqs = len(sequences)
        num_tokens = sum(len(seq.token_ids) for seq in sequences)
        if num_tokens > self._max_tokens or num_seqs > self._max_seqs:
            raise InvalidStep(
                f"a step of {num_tokens} tokens in {num_seqs} sequences, wanted at most "
                f"{self._max_tokens} in {self._max_seqs}: the scheduler's limits must not "
                "exceed the runner's"
            )
        if not sequences:
            return NOTHING
        self._table_rows.make_room([seq.block_table for seq in sequences])
        limit, size = self._max_model_len, self.block_size
        token_ids: list[int] = []
        ends, starts, rows = [0], [], []
        longest = 0
        for place, seq in enumerate(sequences):
            start, count = seq.start, len(seq.token_ids)
            if not count or start < 0 or start + count > limit:
                raise InvalidStep(
                    f"sequence {place} of the batch covers positions {start} to {start + count}, "
                    f"wanted at least one position, all within 0 to {limit}"
                )
            needed = -(-(start + count) // size)
            try:
                rows.append(self._table_rows.row(seq.block_table, needed))
            except BlockOutOfRange as error:
                raise InvalidStep(
                    f"sequence {place} of the batch has block table "
                    f"{list(seq.block_table[:needed])}, wanted {needed} blocks for "
                    f"{start + count} positions, ids below {self._num_blocks}"
                ) from error
            token_ids += seq.token_ids
            starts.append(start)
            ends.append(len(token_ids))
            longest = max(longest, start + count)
        return StepPlan(token_ids, starts, ends, rows, longest)

    def write(self, plan: StepPlan, arrays: StepArrays) -> None:
        """Write a step into the first entries of ``arrays``; what is behind stays as it was."""
        num_seqs, num_tokens = plan.num_seqs, plan.num_tokens
        if not num_seqs:
            return
        arrays.input_ids[:num_tokens] = plan.token_ids
        arrays.cu_seqlens[: num_seqs + 1] = plan.ends
        self._table_rows.gather(plan.rows, self.num_blocks_for(plan.longest), arrays.tables)
        starts = np.array(plan.starts, dtype=np.int64)
        cu_seqlens = arrays.cu_seqlens[: num_seqs + 1].astype(np.int64)
        lengths = np.diff(cu_seqlens)
        arrays.seq_lens[:num_seqs] = starts + lengths
        places = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(num_tokens) - np.repeat(cu_seqlens[:-1] - starts, lengths)
        blocks, offsets = np.divmod(positions, self.block_size)
        arrays.positions[:num_tokens] = positions
        block_ids = arrays.tables[places, blocks].astype(np.int64)
        arrays.slots[:num_tokens] = block_ids * self.block_size + offsets
