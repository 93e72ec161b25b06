"""The device's runner computes what the CPU's does, by graph and without, and waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.batch import ScheduledSequence, SchedulerOutput
from kvferry.engine.device.graph_keys import GraphKey, graph_keys
from kvferry.engine.device.runner import DeviceModelRunner, num_scratch_blocks
from kvferry.engine.model_runner import InvalidStep, TorchModelRunner
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout
from kvferry.engine.request import SamplingParams
from kvferry.engine.sampling.sampler import InvalidLogits
from tests.engine.generation import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Generation,
    prompt,
    runner,
    sequence,
    small_model,
)
from tests.fake_device import FakeDevice

MAX_TOKENS, MAX_SEQS = 96, 6


def device_runner(
    model: LlamaModel, device: FakeDevice, kv_dtype: str = "float32", graphs: bool = True
) -> DeviceModelRunner:
    layout = kv_layout(model.config, BLOCK_SIZE, kv_dtype)
    blocks = NUM_BLOCKS + num_scratch_blocks(MAX_SEQS, BLOCK_SIZE)
    memory = device.zeros(blocks * layout.block_bytes())
    made = DeviceModelRunner(device, model, memory, layout, NUM_BLOCKS, MAX_TOKENS, MAX_SEQS)
    if graphs:
        made.capture_graphs()
    return made


def launches(device: FakeDevice) -> int:
    return sum(graph.num_launches for graph in device.graphs)


def advance(plain: TorchModelRunner, own: DeviceModelRunner, generations: list[Generation]) -> None:
    """One step of both; they must agree, and the pool's blocks too."""
    scheduled = [g.schedule() for g in generations]
    output = SchedulerOutput(tuple(scheduled))
    wanted, found = plain.execute(output), own.execute(output)
    assert found == wanted
    for generation, share, token in zip(generations, scheduled, found.token_ids, strict=True):
        generation.advance(share, token)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_prompts_and_decode_steps_give_the_tokens_and_the_kv_of_the_cpu(kv_dtype: str) -> None:
    model, device = small_model(), FakeDevice(seed=1)
    plain, own = runner(model, kv_dtype=kv_dtype), device_runner(model, device, kv_dtype)
    generations = [
        Generation(i, length, list(range(8 * i, 8 * i + 8)), [5, 9], **sampling)
        for i, (length, sampling) in enumerate(
            [(17, {}), (3, {"temperature": 1.0, "top_p": 0.9}), (30, {"repetition_penalty": 1.3})]
        )
    ]
    for _ in range(3):  # chunks, and decode steps of whoever is done with them
        advance(plain, own, generations)
    assert launches(device) == 0
    for step in range(8):
        advance(plain, own, generations[: 1 + step % 3])
    assert launches(device) == 8
    assert torch.allclose(own.pool[:NUM_BLOCKS].float(), plain.pool.float(), atol=1e-5)
    assert device.num_queued == 0


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=MAX_SEQS), st.integers(0, 2**16))
def test_a_decode_step_writes_its_sequences_slots_and_besides_only_scratch(
    lengths: list[int], seed: int
) -> None:
    model, device = MODEL, FakeDevice(seed)
    own = device_runner(model, device)
    own.pool.fill_(0.25)
    tables = [list(range(10 * i, 10 * i + 10)) for i in range(len(lengths))]
    shares = [
        sequence([1 + i], length - 1, table)
        for i, (length, table) in enumerate(zip(lengths, tables, strict=True))
    ]
    own.execute(SchedulerOutput(tuple(shares)))
    assert launches(device) == 1
    written = (own.pool != 0.25).flatten(1, 3).any(-1).any(1)  # [blocks, slots]
    expected = {
        (table[(length - 1) // BLOCK_SIZE], (length - 1) % BLOCK_SIZE)
        for length, table in zip(lengths, tables, strict=True)
    }
    found = {(block, slot) for block, slot in written.nonzero().tolist() if block < NUM_BLOCKS}
    assert found == expected


MODEL = small_model()


def test_capturing_touches_no_block_and_every_key_has_a_graph() -> None:
    device = FakeDevice()
    own = device_runner(MODEL, device, graphs=False)
    own.pool[:NUM_BLOCKS] = 0.5
    own.capture_graphs()
    assert (own.pool[:NUM_BLOCKS] == 0.5).all()
    assert set(own.graphs) == set(graph_keys(MAX_SEQS, 256 // BLOCK_SIZE))
    assert max(own.graphs) == GraphKey(MAX_SEQS, 256 // BLOCK_SIZE)
    assert device.num_queued == 0


def test_rows_of_padding_change_nobody_s_token() -> None:
    """Their scratch may hold anything, NaN even, and so may what their attention finds."""
    device = FakeDevice(seed=3)
    own, plain = device_runner(MODEL, device), runner(MODEL)
    own.pool[NUM_BLOCKS:] = torch.nan
    generations = [
        Generation(i, 9, list(range(4 * i, 4 * i + 4)), []) for i in range(3)
    ]  # 3 rows of 4
    for _ in range(6):
        advance(plain, own, generations)
    assert launches(device) == 5


def test_without_graphs_decode_steps_are_computed_too() -> None:
    device = FakeDevice(seed=4)
    own, plain = device_runner(MODEL, device, graphs=False), runner(MODEL)
    generations = [Generation(i, 9, list(range(4 * i, 4 * i + 4)), []) for i in range(2)]
    for _ in range(4):
        advance(plain, own, generations)
    assert not device.graphs


def test_copies_are_made_before_the_step_and_are_done_when_it_returns() -> None:
    device = FakeDevice()
    own = device_runner(MODEL, device)
    own.pool[3] = 1.5
    own.execute(SchedulerOutput((), copies=((3, 5),)))
    assert (own.pool[5] == 1.5).all() and device.num_queued == 0
    plain, generation = runner(MODEL), Generation(7, 12, [1, 2, 3], [])
    advance(plain, own, [generation])
    share = replace(generation.schedule(), block_table=[1, 9, 3])
    output = SchedulerOutput((share,), copies=((2, 9),))
    assert own.execute(output) == plain.execute(output)


def test_what_is_asked_of_prompt_positions_and_branches_is_the_same() -> None:
    device = FakeDevice(seed=5)
    own, plain = device_runner(MODEL, device), runner(MODEL)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3)
    ids = prompt(3, 10)
    asking = replace(
        sequence(ids, 0, [1, 2], sampling=sampling), prompt_targets=tuple(ids[1:]), branches=(0, 2)
    )
    other = sequence(prompt(4, 5), 0, [4], sample=False)
    output = SchedulerOutput((other, asking))
    found, wanted = own.execute(output), plain.execute(output)
    assert found.token_ids == wanted.token_ids and found.further == wanted.further
    assert found == wanted and found.prompt_logprobs and launches(device) == 0


@pytest.mark.parametrize("by_graph", [True, False])
def test_invalid_logits_name_the_place_and_leave_nothing_queued(by_graph: bool) -> None:
    model = small_model()
    model.weights.embedding[50] = torch.nan
    device = FakeDevice()
    own = device_runner(model, device, graphs=by_graph)
    batch = (sequence([1], 0, [3]), sequence([50], 0, [1]))
    with pytest.raises(InvalidLogits) as caught:
        own.execute(SchedulerOutput(batch))
    assert caught.value.rows == (1,) and device.num_queued == 0
    assert launches(device) == by_graph
    assert own.execute(SchedulerOutput(batch[:1])).token_ids[0] is not None


@pytest.mark.parametrize(
    "bad", [sequence([1], 0, [NUM_BLOCKS]), sequence([1], 0, [-1]), sequence([], 3, [0])]
)
def test_an_impossible_step_is_refused_before_anything_is_queued(bad: ScheduledSequence) -> None:
    """Scratch blocks are nobody's to name."""
    device = FakeDevice()
    own = device_runner(MODEL, device, graphs=False)
    with pytest.raises(InvalidStep):
        own.execute(SchedulerOutput((bad,), copies=((0, 1),)))
    assert device.num_queued == 0 and device.num_copies == 0


def test_a_step_that_raises_has_been_waited_for() -> None:
    """What it queued must not run into the next one."""
    device = FakeDevice()
    own = device_runner(MODEL, device, graphs=False)

    def fail(*_: object) -> None:
        raise ArithmeticError("told to")

    stream = device.streams[0]
    stream.launch(lambda: None)
    own._forward = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ArithmeticError):
        own.execute(SchedulerOutput((sequence([1], 0, [0]),)))
    assert device.num_queued == 0
