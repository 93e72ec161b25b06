"""The torch model runner: one process computes a step and samples from it.

Owns the pool's tensor view and the batch buffers, which are allocated once and filled anew from
the ``SchedulerOutput`` of each step. Does not know requests, block ownership, or why a sequence
was scheduled.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from kvferry.engine.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from kvferry.engine.models.llama import AttentionInputs, LlamaModel
from kvferry.engine.models.loading import TORCH_DTYPES
from kvferry.engine.sampling.sampler import ROWS_AT_ONCE
from kvferry.engine.step_inputs import InvalidStep, StepArrays, StepInputs
from kvferry.engine.step_sampling import sample_hidden
from kvferry.kv_cache.errors import KVFerryError
from kvferry.kv_cache.layout import DTYPE_BYTES, KVCacheLayout

__all__ = [
    "POOL_DTYPES",
    "InvalidStep",
    "PoolBuffer",
    "PoolMismatch",
    "TorchModelRunner",
    "check_layout",
    "peak_step_bytes",
    "pool_bytes",
    "pool_tensor",
    "step_activation_bytes",
    "step_logits_bytes",
]

POOL_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
PoolBuffer = memoryview | bytearray | mmap.mmap | torch.Tensor


class PoolMismatch(KVFerryError):
    """The pool's memory does not fit its layout, or the layout the model; names both values."""


def peak_step_bytes(
    model: LlamaModel, layout: KVCacheLayout, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Upper estimate of the memory that one maximal step takes beside weights and pool.

    Computed, not measured, so that it is known before the pool exists: the activations of one
    layer, the KV gathered for one sequence of maximal length, its mask, and the logits with what
    sampling makes of them.
    """
    config = model.config
    kv_size = config.num_kv_heads * config.head_dim
    mask = max_num_batched_tokens * 6 * config.max_model_len  # as booleans and as numbers
    gathered = config.max_model_len * 2 * kv_size * (DTYPE_BYTES[layout.groups[0].dtype] + 4)
    activations = step_activation_bytes(model, max_num_batched_tokens)
    return activations + mask + gathered + step_logits_bytes(model, max_num_seqs)


def step_activation_bytes(model: LlamaModel, max_num_batched_tokens: int) -> int:
    """Of one layer of one maximal step."""
    config = model.config
    width = model.dtype.itemsize
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projected = q_size + 2 * kv_size
    attention = 4 * projected * width + 4 * q_size * 4  # fused qkv, rope's terms, fp32 queries
    gated = 4 * config.ffn_size * width
    norms = 3 * config.hidden_size * 4 + 3 * config.hidden_size * width
    return max_num_batched_tokens * (max(attention, gated) + norms)


def step_logits_bytes(model: LlamaModel, max_num_seqs: int) -> int:
    """Of the logits of one maximal step, and what sampling makes of them."""
    rows_drawn = min(max_num_seqs, ROWS_AT_ONCE)
    drawn = rows_drawn * 18 * 8
    return model.config.vocab_size * (max_num_seqs * (model.dtype.itemsize + 7 * 4) + drawn)


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
        check_layout(model, layout)
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._inputs = StepInputs(
            max_num_batched_tokens,
            max_num_seqs,
            model.config.max_model_len,
            layout.block_size,
            num_blocks,
        )
        self._ends: list[int] = [0]
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._slots = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._tables = torch.zeros(max_num_seqs, self._inputs.max_blocks, dtype=torch.int32)
        self._cu_seqlens = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._arrays = StepArrays(
            self._input_ids.numpy(),
            self._positions.numpy(),
            self._slots.numpy(),
            self._cu_seqlens.numpy(),
            self._seq_lens.numpy(),
            self._tables.numpy(),
        )

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
        plan = self._inputs.plan(sequences)
        self._inputs.write(plan, self._arrays)
        num_tokens, self._ends = plan.num_tokens, plan.ends
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
        """Tokens in batch order. ``hidden``: [num_tokens, hidden_size]"""
        return sample_hidden(self.model, sequences, hidden, self._ends)

    def _attention_inputs(self, num_seqs: int, num_tokens: int) -> AttentionInputs:
        return AttentionInputs(
            slot_mapping=self._slots[:num_tokens],
            block_tables=self._tables[:num_seqs],
            cu_seqlens_q=self._cu_seqlens[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
        )


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


def check_layout(model: LlamaModel, layout: KVCacheLayout) -> None:
    """Raise PoolMismatch, naming both shapes, unless a pool of ``layout`` serves ``model``."""
    config = model.config
    wanted = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
    shape = layout.block_shape()
    found = (*shape[:3], shape[4])
    if len(layout.groups) != 1 or found != wanted:
        raise PoolMismatch(
            f"the layout has {len(layout.groups)} groups, layers, planes, heads and dim {found}, "
            f"wanted 1 group of {wanted} for model {config.name!r}"
        )
