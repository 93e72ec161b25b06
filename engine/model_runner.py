"""The torch model runner: one process computes a step and samples from it.

Owns the pool's tensor view and the batch buffers, which are allocated once and filled anew from
the ``SchedulerOutput`` of each step. Does not know requests, block ownership, or why a sequence
was scheduled.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.engine.batch import (
    BranchToken,
    PoisonedRows,
    RunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)
from kvferry.engine.models.llama import AttentionInputs, LlamaModel
from kvferry.engine.models.loading import TORCH_DTYPES
from kvferry.engine.sampling.constraints import SamplingRow
from kvferry.engine.sampling.logprobs import logprobs_of
from kvferry.engine.sampling.sampler import ROWS_AT_ONCE, InvalidLogits, sample
from kvferry.engine.table_rows import BlockOutOfRange, TableRows
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.layout import DTYPE_BYTES, KVCacheLayout

POOL_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
PoolBuffer = memoryview | bytearray | mmap.mmap | torch.Tensor


class PoolMismatch(KVFerryError):
    """The pool's memory does not fit its layout, or the layout the model; names both values."""


class InvalidStep(KVFerryError):
    """A step that cannot be computed as scheduled; names the sequence and the limit."""


def peak_step_bytes(
    model: LlamaModel, layout: KVCacheLayout, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Upper estimate of the memory that one maximal step takes beside weights and pool.

    Computed, not measured, so that it is known before the pool exists: the activations of one
    layer, the KV gathered for one sequence of maximal length, its mask, and the logits with what
    sampling makes of them.
    """
    config = model.config
    width = model.dtype.itemsize
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projected = q_size + 2 * kv_size
    attention = 4 * projected * width + 4 * q_size * 4  # fused qkv, rope's terms, fp32 queries
    gated = 4 * config.ffn_size * width
    norms = 3 * config.hidden_size * 4 + 3 * config.hidden_size * width
    mask = 6 * config.max_model_len  # as booleans and as numbers, per query
    activations = max_num_batched_tokens * (max(attention, gated) + norms + mask)
    gathered = config.max_model_len * 2 * kv_size * (DTYPE_BYTES[layout.groups[0].dtype] + 4)
    rows_drawn = min(max_num_seqs, ROWS_AT_ONCE)
    logits = config.vocab_size * (max_num_seqs * (width + 7 * 4) + rows_drawn * 18 * 8)
    return activations + gathered + logits


class TorchModelRunner:
    """Computes steps of one model on one pool; implements ``engine.batch.ModelRunner``.

    Not thread-safe. ``pool`` and ``pool_bytes`` are views: what others write into the buffer is
    seen, and the reverse.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool_buffer: PoolBuffer,
        layout: KVCacheLayout,
        num_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        """Lay the pool over ``pool_buffer`` and allocate the batch buffers.

        ``pool_buffer`` is ``num_blocks * layout.block_bytes()`` writable bytes, or a tensor of
        them; ``max_num_batched_tokens`` and ``max_num_seqs`` bound every step that will come.

        Raises PoolMismatch.
        """
        self.model = model
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool_bytes = pool_bytes(pool_buffer, layout, num_blocks)
        self.pool = pool_tensor(self.pool_bytes, layout, num_blocks)
        _check_layout(model, layout)
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        max_blocks = layout.num_blocks_for(model.config.max_model_len)
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._slots = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self._table_rows = TableRows(max_num_seqs, max_blocks, num_blocks)
        self._cu_seqlens = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)

    def profile_peak_bytes(self) -> int:
        """Upper estimate in bytes of what one maximal step takes beside weights and pool."""
        return peak_step_bytes(self.model, self.layout, self._max_tokens, self._max_seqs)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Copy blocks, write the KV of every scheduled position, sample where asked.

        When it returns, the step's KV is in the pool.

        Raises InvalidStep before anything is written, or PoisonedRows, whose ``rows`` are the
        places in the batch of the sequences without a token, after the KV has been written.
        """
        sequences = output.sequences
        num_tokens = self._fill(sequences)
        self.model.kernels.copy_blocks(self.pool_bytes, output.copies)
        if not sequences:
            return RunnerOutput(())
        hidden = self.model.forward(
            self._input_ids[:num_tokens],
            self._positions[:num_tokens],
            self._attention_inputs(len(sequences), num_tokens),
            self.pool,
        )
        return self._sample(sequences, hidden)

    def _sample(self, sequences: Sequence[ScheduledSequence], hidden: torch.Tensor) -> RunnerOutput:
        """Tokens in batch order, and their log-probabilities if anybody wants any.

        Logits are computed for the sampled rows only.
        """
        places = [place for place, seq in enumerate(sequences) if seq.sample]
        tokens: list[int | None] = [None] * len(sequences)
        if not places:
            return RunnerOutput(tuple(tokens), (), self._prompt_logprobs(sequences, hidden))
        last_rows = self._cu_seqlens[1:][places] - 1
        logits = self.model.logits(hidden.index_select(0, last_rows))
        rows = [_sampling_row(sequences[place]) for place in places]
        try:
            sampled = sample(logits, rows)
        except PoisonedRows as error:
            raise type(error)([places[row] for row in error.rows]) from error
        for place, token in zip(places, sampled, strict=True):
            tokens[place] = token
        logprobs = _logprobs(logits, sampled, rows, places, len(sequences))
        further: list[tuple[BranchToken, ...]] = []
        if any(len(sequences[place].branches) > 1 for place in places):
            further = [()] * len(sequences)
            for row, place in enumerate(places):
                further[place] = _further(logits[row : row + 1], sequences[place])
        prompt_logprobs = self._prompt_logprobs(sequences, hidden)
        return RunnerOutput(tuple(tokens), logprobs, prompt_logprobs, tuple(further))

    def _prompt_logprobs(
        self, sequences: Sequence[ScheduledSequence], hidden: torch.Tensor
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Those of every sequence's ``prompt_targets``, a few rows at a time.

        Raises InvalidLogits.
        """
        if not any(seq.prompt_targets for seq in sequences):
            return ()
        found = []
        begins = self._cu_seqlens.tolist()
        for place, seq in enumerate(sequences):
            entries: list[TokenLogprobs] = []
            for first in range(0, len(seq.prompt_targets), ROWS_AT_ONCE):
                targets = seq.prompt_targets[first : first + ROWS_AT_ONCE]
                begin = begins[place] + first
                logits = self.model.logits(hidden[begin : begin + len(targets)])
                if not torch.isfinite(logits.amax(-1)).all():
                    raise InvalidLogits([place])
                num_top = [seq.sampling.prompt_logprobs or 0] * len(targets)
                entries += logprobs_of(logits, targets, num_top)
            found.append(tuple(entries))
        return tuple(found)

    def _attention_inputs(self, num_seqs: int, num_tokens: int) -> AttentionInputs:
        return AttentionInputs(
            slot_mapping=self._slots[:num_tokens],
            block_tables=self._tables[:num_seqs],
            cu_seqlens_q=self._cu_seqlens[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
        )

    def _fill(self, sequences: Sequence[ScheduledSequence]) -> int:
        """Write the batch into the buffers; the number of its tokens. Raises InvalidStep."""
        num_seqs = len(sequences)
        num_tokens = sum(len(seq.token_ids) for seq in sequences)
        if num_tokens > self._max_tokens or num_seqs > self._max_seqs:
            raise InvalidStep(
                f"a step of {num_tokens} tokens in {num_seqs} sequences, wanted at most "
                f"{self._max_tokens} in {self._max_seqs}: the scheduler's limits must not "
                "exceed the runner's"
            )
        if not sequences:
            return 0
        self._table_rows.make_room([seq.block_table for seq in sequences])
        limit, size = self.model.config.max_model_len, self.layout.block_size
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
                    f"{start + count} positions, ids below {self.num_blocks}"
                ) from error
            token_ids += seq.token_ids
            starts.append(start)
            ends.append(len(token_ids))
            longest = max(longest, start + count)
        self._input_ids.numpy()[:num_tokens] = token_ids
        self._cu_seqlens.numpy()[: num_seqs + 1] = ends
        width = self.layout.num_blocks_for(longest)
        self._table_rows.gather(rows, width, self._tables.numpy())
        self._fill_places(np.array(starts, dtype=np.int64), num_tokens)
        return num_tokens

    def _fill_places(self, starts: np.ndarray, num_tokens: int) -> None:
        """Positions, slots and lengths of all tokens at once. ``starts``: [num_seqs]"""
        num_seqs = len(starts)
        cu_seqlens = self._cu_seqlens.numpy()[: num_seqs + 1].astype(np.int64)
        lengths = np.diff(cu_seqlens)
        self._seq_lens.numpy()[:num_seqs] = starts + lengths
        places = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(num_tokens) - np.repeat(cu_seqlens[:-1] - starts, lengths)
        blocks, offsets = np.divmod(positions, self.layout.block_size)
        self._positions.numpy()[:num_tokens] = positions
        block_ids = self._tables.numpy()[places, blocks].astype(np.int64)
        self._slots.numpy()[:num_tokens] = block_ids * self.layout.block_size + offsets


def _sampling_row(seq: ScheduledSequence, place: int = 0) -> SamplingRow:
    return SamplingRow(
        seq.sampling,
        seq.branches[place],
        seq.output_index,
        seq.known_token_ids,
        seq.eos_token_ids,
    )


def _logprobs(
    logits: torch.Tensor,
    sampled: Sequence[int],
    rows: Sequence[SamplingRow],
    places: Sequence[int],
    num_sequences: int,
) -> tuple[TokenLogprobs | None, ...]:
    """Those of the sampled tokens, by place in the batch; empty if nobody wants any."""
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return ()
    logprobs: list[TokenLogprobs | None] = [None] * num_sequences
    found = logprobs_of(
        logits[wanted],
        [sampled[i] for i in wanted],
        [rows[i].sampling.logprobs or 0 for i in wanted],
    )
    for i, entry in zip(wanted, found, strict=True):
        logprobs[places[i]] = entry
    return tuple(logprobs)


def _further(logits: torch.Tensor, seq: ScheduledSequence) -> tuple[BranchToken, ...]:
    """The tokens of a sequence's branches but the first. ``logits``: [1, vocab_size]"""
    rows = [_sampling_row(seq, place) for place in range(1, len(seq.branches))]
    if not rows:
        return ()
    spread = logits.expand(len(rows), -1)
    tokens = sample(spread, rows)  # what makes it raise has raised for the first branch
    places = range(len(rows))
    logprobs = _logprobs(spread, tokens, rows, places, len(rows)) or (None,) * len(rows)
    return tuple(map(BranchToken, tokens, logprobs))


def pool_bytes(buffer: PoolBuffer, layout: KVCacheLayout, num_blocks: int) -> torch.Tensor:
    """The pool as ``[num_blocks, block_bytes]`` uint8, without a copy.

    Raises PoolMismatch if ``buffer`` is not writable or has another size.
    """
    if isinstance(buffer, torch.Tensor):
        raw = buffer.view(torch.uint8).view(-1)
    else:
        with memoryview(buffer) as view:
            if view.readonly:
                raise PoolMismatch("the pool's buffer is read-only, wanted a writable one")
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
    wanted = num_blocks * layout.block_bytes()
    if raw.numel() != wanted:
        raise PoolMismatch(
            f"the pool's buffer has {raw.numel()} bytes, wanted {wanted} for {num_blocks} blocks "
            f"of {layout.block_bytes()} bytes"
        )
    return raw.view(num_blocks, -1)


def pool_tensor(buffer: PoolBuffer, layout: KVCacheLayout, num_blocks: int) -> torch.Tensor:
    """The pool as ``[num_blocks, layers, planes, heads, slots, dim]``, without a copy.

    Where the layout has scales the tensor steps over them, and is not contiguous. Raises
    PoolMismatch as ``pool_bytes``.
    """
    dtype = POOL_DTYPES[layout.groups[0].dtype]
    elements = pool_bytes(buffer, layout, num_blocks).view(dtype)
    strides = (layout.block_bytes(), *layout.block_strides())
    return elements.as_strided(
        (num_blocks, *layout.block_shape()), [stride // dtype.itemsize for stride in strides]
    )


def _check_layout(model: LlamaModel, layout: KVCacheLayout) -> None:
    config = model.config
    wanted = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
    shape = layout.block_shape()
    found = (*shape[:3], shape[4])
    if len(layout.groups) != 1 or found != wanted:
        raise PoolMismatch(
            f"the layout has {len(layout.groups)} groups, layers, planes, heads and dim {found}, "
            f"wanted 1 group of {wanted} for model {config.name!r}"
        )
