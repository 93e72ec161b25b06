from __future__ import annotations

import mmap
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvferry.engine.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from kvferry.engine.model_runner import (
    InvalidStep,
    PoolBuffer,
    PoolMismatch,
    TorchModelRunner,
    pool_tensor,
)
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout
from kvferry.engine.request import SamplingParams
from kvferry.engine.sampling.sampler import InvalidLogits, uniform
from kvferry.kernels.reference.scaled import row_scales
from tests.engine.generation import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Generation,
    advance_together,
    model_config,
    prompt,
    runner,
    sequence,
    small_model,
    step,
)
from tests.engine.paged_model import PagedSequences
from tests.parity.variants import VOCAB_SIZE


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_copies_are_made_before_the_step_writes(kv_dtype: str) -> None:
    model = small_model()
    plain, copied = Generation(7, 12, [1, 2, 3], []), Generation(7, 12, [1, 2, 3], [])
    first, second = runner(model, kv_dtype=kv_dtype), runner(model, kv_dtype=kv_dtype)
    advance_together(first, [plain])
    advance_together(second, [copied])
    block_2 = second.pool[2].clone()
    advance_together(first, [plain])
    scheduled = copied.schedule()
    moved = replace(scheduled, block_table=[1, 9, 3])
    (token,) = second.execute(SchedulerOutput((moved,), copies=((2, 9),))).token_ids
    copied.advance(scheduled, token)
    assert copied.output == plain.output
    assert torch.equal(second.pool[2], block_2)
    assert torch.equal(second.pool[9], first.pool[2])


def test_a_step_of_copies_alone_gives_no_tokens() -> None:
    own = runner()
    own.pool[3] = 1.5
    assert own.execute(SchedulerOutput((), copies=((3, 5),))) == RunnerOutput(())
    assert (own.pool[5] == 1.5).all()


def test_a_step_writes_its_own_slots_and_no_other() -> None:
    own = runner()
    own.pool.fill_(torch.nan)
    step(own, sequence(prompt(1, 11), 0, [7, 3, 12]), sequence(prompt(2, 3), 0, [20], False))
    written = own.pool.isfinite().all(dim=-1).all(dim=3).all(dim=2).all(dim=1)
    expected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    expected[7], expected[3, :3], expected[20, :3] = True, True, True
    assert torch.equal(written, expected)
    assert own.pool.isnan().sum() == (~expected).sum() * own.pool[0, ..., 0, :].numel()


class FlatModel(LlamaModel):
    """Every token is equally likely, so that a token shows the uniform number that chose it."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)


def test_the_number_is_drawn_for_the_branch_and_output_index_of_the_sequence() -> None:
    plain = small_model()
    own = runner(FlatModel(plain.config, plain.weights))
    for seed, branch, index in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (7, 2, 40)]:
        one = sequence([1], 0, [0], True, SamplingParams(seed=seed), index)
        expected = int(uniform(seed, branch, index) * VOCAB_SIZE)
        assert step(own, replace(one, branches=(branch,))) == (expected,)


class CountingModel(LlamaModel):
    """Counts the rows for which logits are computed."""

    rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows += len(hidden)
        return super().logits(hidden)


def test_logits_are_computed_only_for_sequences_that_sample() -> None:
    plain = small_model()
    model = CountingModel(plain.config, plain.weights)
    own = runner(model)
    tables = [[0, 1], [2, 3], [4, 5]]
    batch = [sequence(prompt(i, 9), 0, table, i == 1) for i, table in enumerate(tables)]
    tokens = step(own, *batch)
    assert model.rows == 1
    assert tokens[0] is None and tokens[2] is None and tokens[1] is not None
    assert step(runner(plain), batch[1]) == (tokens[1],)
    step(own, replace(batch[0], sample=False))
    assert model.rows == 1


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "mmap", "tensor"])
def test_the_pool_is_the_buffer_itself(kind: str) -> None:
    layout = kv_layout(model_config(), BLOCK_SIZE, "float32")
    size = NUM_BLOCKS * layout.block_bytes()
    plain, mapped = bytearray(size), mmap.mmap(-1, size)
    tensor = torch.zeros(size, dtype=torch.uint8)
    buffers: dict[str, tuple[PoolBuffer, memoryview]] = {
        "bytearray": (plain, memoryview(plain)),
        "memoryview": (memoryview(plain), memoryview(plain)),
        "mmap": (mapped, memoryview(mapped)),
        "tensor": (tensor, tensor.numpy().data),
    }
    buffer, raw = buffers[kind]
    own = runner(buffer=buffer)
    step(own, sequence(prompt(1, 10), 0, [33, 6]))
    block = bytes(raw[33 * layout.block_bytes() : 34 * layout.block_bytes()])
    assert any(block) and block == own.pool[33].numpy().tobytes()


def test_the_same_step_gives_the_same_bytes() -> None:
    model = small_model()
    pools = []
    for _ in range(2):
        own = runner(model)
        step(own, sequence(prompt(1, 30), 0, [1, 2, 3, 4]), sequence(prompt(2, 5), 0, [9]))
        pools.append(own.pool)
    assert torch.equal(pools[0].view(torch.int32), pools[1].view(torch.int32))


def test_a_large_step_leaves_nothing_behind_for_a_small_one() -> None:
    model = small_model()
    small = sequence(prompt(3, 4), 0, [60])
    used = runner(model)
    step(used, *[sequence(prompt(i, 15), 0, [2 * i, 2 * i + 1]) for i in range(6)])
    assert step(used, small) == step(runner(model), small)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_a_narrower_pool_serves_a_float32_model(kv_dtype: str) -> None:
    model = small_model()
    ids = prompt(8, 20)
    own = runner(model, kv_dtype=kv_dtype)
    step(own, sequence(ids[:19], 0, [1, 2, 3], False))
    step(own, sequence(ids[19:], 19, [1, 2, 3]))
    assert own.pool.dtype == getattr(torch, kv_dtype)
    exact = PagedSequences(model, BLOCK_SIZE, 0)
    exact.step([(0, ids)])
    key = own.pool[1, 2, 0].float()
    if kv_dtype == "int8":
        key *= row_scales(own.pool)[1, 2, 0].unsqueeze(-1)
    table = exact._tables[0][0]
    assert torch.allclose(key, exact.pool[table, 2, 0], atol=0.05)


def test_the_memory_of_an_int8_pool_holds_the_scales_of_every_block() -> None:
    model = small_model()
    layout = kv_layout(model.config, BLOCK_SIZE, "int8")
    buffer = bytearray(NUM_BLOCKS * layout.block_bytes())
    own = runner(model, buffer, kv_dtype="int8")
    ids = prompt(1, 13)
    (wanted,) = step(own, sequence(ids, 0, [33, 6]))
    step(own, sequence(ids[:12], 0, [33, 6], False))
    other = runner(model, kv_dtype="int8")
    for source, target in ((33, 4), (6, 9)):  # as blocks arrive from another worker
        begin = source * layout.block_bytes()
        block = bytes(buffer[begin : begin + layout.block_bytes()])
        other.pool_bytes[target] = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    assert step(other, sequence(ids[12:], 12, [4, 9])) == (wanted,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([sequence([1] * 97, 0, list(range(13)))], r"97 tokens in 1 .* at most 96 in 6"),
        ([sequence([1], 0, [0])] * 7, r"7 tokens in 7 .* at most 96 in 6"),
        ([sequence([], 3, [0])], "at least one position"),
        ([sequence([1, 2], 255, list(range(40)))], r"positions 255 to 257, .* within 0 to 256"),
        ([sequence([1] * 9, 0, [4])], r"\[4\], wanted 2 blocks for 9 positions"),
        ([sequence([1], 0, [0]), sequence([1], 0, [64])], r"sequence 1 .* ids below 64"),
        ([sequence([1], 0, [-1])], "ids below 64"),
    ],
)
def test_an_impossible_step_is_refused_before_anything_is_written(
    bad: list[ScheduledSequence], message: str
) -> None:
    own = runner()
    own.pool.normal_()
    before = own.pool.clone()
    with pytest.raises(InvalidStep, match=message):
        own.execute(SchedulerOutput(tuple(bad), copies=((0, 1),)))
    assert torch.equal(own.pool, before)


def test_invalid_logits_name_the_places_in_the_batch() -> None:
    model = small_model()
    poison = 50
    model.weights.embedding[poison] = torch.nan
    own = runner(model)
    fine = sequence([1, 2], 0, [3])
    with pytest.raises(InvalidLogits) as caught:
        step(own, sequence([1], 0, [0], False), fine, sequence([poison], 0, [1]))
    assert caught.value.rows == (2,)
    assert step(own, replace(fine)) == step(runner(model), fine)


def test_a_prompt_position_without_log_probabilities_names_its_place() -> None:
    """The last row alone may be sound: then nothing else would tell."""
    model = small_model()
    own = runner(model)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    logits = model.logits

    def first_is_nan(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden).clone()
        if len(hidden) > 1:
            found[0] = torch.nan
        return found

    model.logits = first_is_nan  # type: ignore[method-assign]
    fine = sequence([1, 2], 0, [3], sample=False)
    asking = replace(sequence([1, 2, 3], 0, [4], sampling=sampling), prompt_targets=(2, 3))
    with pytest.raises(InvalidLogits) as caught:
        step(own, fine, asking)
    assert caught.value.rows == (1,)


def test_a_pool_that_does_not_fit_is_an_error_naming_both_values() -> None:
    layout = kv_layout(model_config(), BLOCK_SIZE, "float32")
    size = NUM_BLOCKS * layout.block_bytes()
    with pytest.raises(PoolMismatch, match=f"has {size - 1} bytes, wanted {size} for 64 blocks"):
        runner(buffer=bytearray(size - 1))
    with pytest.raises(PoolMismatch, match="read-only"):
        pool_tensor(memoryview(bytes(size)), layout, NUM_BLOCKS)
    other = kv_layout(model_config(num_kv_heads=3), BLOCK_SIZE, "float32")
    buffer = bytearray(NUM_BLOCKS * other.block_bytes())
    with pytest.raises(PoolMismatch, match=r"\(3, 2, 3, 8\), wanted 1 group of \(3, 2, 2, 8\)"):
        model = small_model()
        TorchModelRunner(model, buffer, other, NUM_BLOCKS, 96, 6)


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak bytes of tensors alive that were made while this mode was active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves(args) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"ffn_size": 2000},
        {"ffn_size": 2000, "mlp_bias": True},
        {"vocab_size": 5000},
        {"max_model_len": 2000},
        {"max_model_len": 2000, "layer_windows": (1900, None, 50)},
        {"qk_norm": True, "head_dim": 64},
    ],
)
def test_a_maximal_step_stays_below_the_profiled_peak(shape: dict[str, Any]) -> None:
    model = small_model(**shape)
    layout = kv_layout(model.config, BLOCK_SIZE, "float32")
    blocks = layout.num_blocks_for(model.config.max_model_len)
    buffer = bytearray(blocks * layout.block_bytes())
    own = TorchModelRunner(model, buffer, layout, blocks, 200, 6)
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    batch = [
        sequence(prompt(i, n), 0, list(range(blocks)), True, sampling)
        for i, n in enumerate([160, 8, 8, 8, 8, 8])
    ]
    batch[0] = replace(batch[0], start=model.config.max_model_len - 160)
    with PeakMemory() as memory:
        step(own, *batch)
    bound = own.profile_peak_bytes()
    assert bound / 8 < memory.peak < bound
