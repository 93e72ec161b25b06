"""A step's inputs as one stretch of bytes, so that one copy takes them to the device.

Owns where each array lies in it, and the pinned buffers that are filled in turn: none is written
while a copy out of it may still be queued. Knows neither sequences nor what the arrays mean, except
that rows behind a step's own are padding (``graph_keys``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from kvferry.engine.device.protocol import Device, Event, Stream
from kvferry.engine.models.llama import AttentionInputs
from kvferry.engine.step_inputs import StepArrays, StepInputs, StepPlan

ALIGNMENT = 64  # bytes; what kernels load at once must not straddle
NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class InputLayout:
    """How many of everything a step has, and so where its arrays lie."""

    num_tokens: int
    num_seqs: int
    width: int

    @property
    def parts(self) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
        """Offset in bytes, shape and dtype of each array, in the order of ``StepArrays``."""
        tokens, seqs = (self.num_tokens,), (self.num_seqs,)
        shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            (tokens, torch.int64),
            (tokens, torch.int64),
            (tokens, torch.int64),
            ((self.num_seqs + 1,), torch.int32),
            (seqs, torch.int32),
            ((self.num_seqs, self.width), torch.int32),
        )
        parts, offset = [], 0
        for shape, dtype in shapes:
            parts.append((offset, shape, dtype))
            offset += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return tuple(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        offset, shape, dtype = self.parts[-1]
        return offset + prod(shape) * dtype.itemsize

    def views(self, buffer: torch.Tensor) -> InputViews:
        """The arrays in ``buffer``, uint8 of at least ``num_bytes``."""
        return InputViews(
            *(
                buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for offset, shape, dtype in self.parts
            )
        )


class InputViews(NamedTuple):
    """A step's arrays as tensors; see ``StepArrays``."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor

    def attention(self) -> AttentionInputs:
        """What the model wants of them."""
        return AttentionInputs(self.slots, self.tables, self.cu_seqlens, self.seq_lens)

    def arrays(self) -> StepArrays:
        """The same memory, which is the host's, for numpy."""
        return StepArrays(*(view.numpy() for view in self))


@dataclass(slots=True)
class _Pinned:
    """A buffer, and the event behind the last copy out of it."""

    tensor: torch.Tensor
    copied: Event | None = None


class InputBuffers:
    """Buffers for the largest step of a runner.

    Args:
        device: where the inputs go.
        inputs: plans and writes steps.
        largest: the layout of the largest step, whatever its shape.
        first_scratch: the first of the pool's blocks that belong to no sequence; there are enough
            of them for a slot per row.
    """

    def __init__(
        self, device: Device, inputs: StepInputs, largest: InputLayout, first_scratch: int
    ) -> None:
        self._inputs = inputs
        self._first_scratch = first_scratch
        self._device_buffer = device.zeros(largest.num_bytes)
        self._pinned = [_Pinned(device.host_buffer(largest.num_bytes)) for _ in range(NUM_BUFFERS)]

    def on_device(self, layout: InputLayout) -> InputViews:
        """Where the inputs of such a step lie on the device: always the same memory."""
        return layout.views(self._device_buffer)

    def send(self, plan: StepPlan, layout: InputLayout, stream: Stream) -> InputViews:
        """Write a step, its rows filled up with padding, and queue its copy to the device.

        Returns where it will lie.
        """
        pinned = self._pinned.pop(0)
        self._pinned.append(pinned)
        if pinned.copied is not None:
            pinned.copied.synchronize()  # it is not read any longer
        arrays = layout.views(pinned.tensor).arrays()
        arrays.tables.fill(0)  # no kernel may meet what is no block, not even ahead of a mask
        self._inputs.write(plan, arrays)
        self._pad(plan, arrays)
        used = slice(0, layout.num_bytes)
        stream.copy(self._device_buffer[used], pinned.tensor[used])
        pinned.copied = stream.record()
        return self.on_device(layout)

    def _pad(self, plan: StepPlan, arrays: StepArrays) -> None:
        """Rows of one token each, with a slot of their own behind the pool's blocks."""
        first, last = plan.num_seqs, len(arrays.seq_lens)
        if first == last:
            return
        assert plan.num_tokens == first, "a step that is padded has one token a row"
        rows = np.arange(first, last)
        size = self._inputs.block_size
        arrays.input_ids[first:] = 0
        arrays.positions[first:] = 0
        arrays.slots[first:] = self._first_scratch * size + rows
        arrays.cu_seqlens[: last + 1] = np.arange(last + 1)
        arrays.seq_lens[first:] = 1
        arrays.tables[first:, 0] = self._first_scratch + rows // size
