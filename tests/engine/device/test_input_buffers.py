"""A step's inputs in one stretch of bytes: where they lie, padding, and buffers in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.batch import ScheduledSequence
from kvferry.engine.device.input_buffers import ALIGNMENT, NUM_BUFFERS, InputBuffers, InputLayout
from kvferry.engine.request import SamplingParams
from kvferry.engine.step_inputs import NOTHING, StepInputs
from tests.fake_device import FakeDevice, FakeStream

SIZE, NUM_BLOCKS, MAX_SEQS = 4, 20, 8
LARGEST = InputLayout(32, MAX_SEQS, 16)


def share(token_id: int, start: int, table: list[int]) -> ScheduledSequence:
    return ScheduledSequence([token_id], start, table, True, SamplingParams(), (0,), 0)


def made() -> tuple[FakeDevice, FakeStream, StepInputs, InputBuffers]:
    device = FakeDevice()
    inputs = StepInputs(32, MAX_SEQS, 64, SIZE, NUM_BLOCKS)
    return device, device.stream(), inputs, InputBuffers(device, inputs, LARGEST, NUM_BLOCKS)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_arrays_are_aligned_and_lie_behind_one_another(tokens: int, seqs: int, width: int) -> None:
    layout = InputLayout(tokens, seqs, width)
    end = 0
    for offset, shape, dtype in layout.parts:
        assert offset >= end and offset % ALIGNMENT == 0
        end = offset + int(np.prod(shape)) * dtype.itemsize
    assert end == layout.num_bytes
    larger = InputLayout(tokens + 1, seqs + 2, width + 3)
    assert larger.num_bytes >= layout.num_bytes
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    assert views.tables.shape == (seqs, width) and views.tables.is_contiguous()
    assert views.cu_seqlens.shape == (seqs + 1,) and views.slots.dtype is torch.int64


@pytest.mark.parametrize("num_seqs", [0, 1, 3, 8])
def test_padding_rows_have_a_token_a_slot_and_a_block_that_no_sequence_has(num_seqs: int) -> None:
    _, stream, inputs, buffers = made()
    sequences = [share(10 + i, 4 * i + 1, list(range(i + 1))) for i in range(num_seqs)]
    plan = inputs.plan(sequences)
    views = buffers.send(plan, InputLayout(8, 8, 16), stream)
    stream.record().synchronize()
    assert views.input_ids.tolist() == [10 + i for i in range(num_seqs)] + [0] * (8 - num_seqs)
    assert views.positions[num_seqs:].tolist() == [0] * (8 - num_seqs)
    assert views.cu_seqlens.tolist() == list(range(9))
    assert views.seq_lens[num_seqs:].tolist() == [1] * (8 - num_seqs)
    slots = views.slots.tolist()
    assert len(set(slots)) == 8, "no two rows write one slot"
    assert slots[:num_seqs] == [i * SIZE + 1 for i in range(num_seqs)]
    scratch = range(NUM_BLOCKS * SIZE, (NUM_BLOCKS + 2) * SIZE)
    assert all(slot in scratch for slot in slots[num_seqs:])
    assert all(block >= NUM_BLOCKS for block in views.tables[num_seqs:, 0].tolist())


def test_no_table_shows_a_number_that_is_no_block_even_behind_its_end() -> None:
    _, stream, inputs, buffers = made()
    for _ in range(NUM_BUFFERS):  # every buffer is full of large numbers
        ids = [(1 << 60) + 7] * 32
        long = ScheduledSequence(ids, 0, list(range(8)), True, SamplingParams(), (0,), 0)
        buffers.send(inputs.plan([long]), InputLayout(32, 1, 8), stream)
        stream.record().synchronize()
    views = buffers.send(inputs.plan([share(1, 0, [3])]), InputLayout(2, 2, 16), stream)
    stream.record().synchronize()
    assert ((views.tables >= 0) & (views.tables < NUM_BLOCKS + 2)).all()


def test_what_a_step_means_is_what_the_runner_on_the_cpu_computes_with() -> None:
    _, stream, inputs, buffers = made()
    shares = [
        ScheduledSequence([1, 2, 3, 4, 5], 2, [7, 5], True, SamplingParams(), (0,), 0),
        ScheduledSequence([9], 11, [1, 2, 3], True, SamplingParams(), (0,), 0),
    ]
    views = buffers.send(inputs.plan(shares), InputLayout(6, 2, 3), stream)
    stream.record().synchronize()
    assert views.input_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert views.positions.tolist() == [2, 3, 4, 5, 6, 11]
    assert views.slots.tolist() == [30, 31, 20, 21, 22, 15]
    assert views.cu_seqlens.tolist() == [0, 5, 6] and views.seq_lens.tolist() == [7, 12]
    assert views.tables[0, :2].tolist() == [7, 5] and views.tables[1].tolist() == [1, 2, 3]


def test_a_buffer_is_not_written_while_a_copy_out_of_it_is_queued() -> None:
    """Nothing runs by itself here: what is sent again and again has to wait for its turn."""
    device, stream, inputs, buffers = made()
    for number in range(3 * NUM_BUFFERS):
        buffers.send(inputs.plan([share(number, 0, [1])]), InputLayout(1, 1, 1), stream)
        assert len(stream.queue) <= NUM_BUFFERS
    device.run_all()  # a copy of a buffer that was overwritten would be noticed
    assert buffers.on_device(InputLayout(1, 1, 1)).input_ids.tolist() == [3 * NUM_BUFFERS - 1]


def test_padding_alone_can_be_sent() -> None:
    device, stream, _, buffers = made()
    views = buffers.send(NOTHING, InputLayout(4, 4, 16), stream)
    device.run_all()
    assert views.seq_lens.tolist() == [1] * 4
    assert (views.slots >= NUM_BLOCKS * SIZE).all()
