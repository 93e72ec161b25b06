"""Steps of a model of a billion parameters on a GPU, by graph and without, beside their floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from benchmarks.gpu.work import BLOCK_SIZE, Roofs, Row, middle, step_row
from kvferry.engine.batch import ScheduledSequence, SchedulerOutput
from kvferry.engine.device.cuda import CudaDevice
from kvferry.engine.device.runner import DeviceModelRunner, num_scratch_blocks
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.llama import Kernels
from kvferry.engine.models.loading import kv_layout, random_model
from kvferry.engine.request import SamplingParams
from kvferry.kernels import triton as kernels

BATCHES = (1, 64)
CONTEXT = 1024
REPEATS = 30
_GREEDY = SamplingParams(temperature=0.0)
_BILLION = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def decode_steps(found: Roofs) -> Iterator[Row]:
    """A decode step of one sequence and of many: as graph, and launched kernel by kernel."""
    device = CudaDevice()
    config = ModelConfig.from_dict(dict(_BILLION), name="a billion", revision="random")
    model = random_model(config, 0, "bfloat16", cast(Kernels, kernels), device=device.torch_device)
    layout = kv_layout(config, BLOCK_SIZE, "bfloat16")
    most = max(BATCHES)
    per_sequence = layout.num_blocks_for(CONTEXT)
    num_blocks = most * per_sequence
    memory = device.zeros(
        (num_blocks + num_scratch_blocks(most, BLOCK_SIZE)) * layout.block_bytes()
    )
    runner = DeviceModelRunner(device, model, memory, layout, num_blocks, most, most)
    kv_row_bytes = layout.block_bytes() // BLOCK_SIZE
    for graphs in (False, True):
        if graphs:
            runner.capture_graphs()
        for batch in BATCHES:
            output = _decode_step(batch, per_sequence)
            took_s = _time(lambda: runner.execute(output))  # noqa: B023
            num_bytes = model.weights.num_bytes() + batch * CONTEXT * kv_row_bytes
            how = "as a graph" if graphs else "kernel by kernel"
            what = f"decode step, 1.1 billion parameters, {batch} at {CONTEXT}, {how}"
            yield step_row(what, took_s, num_bytes, found.copy_rate)


def _decode_step(batch: int, per_sequence: int) -> SchedulerOutput:
    sequences = tuple(
        ScheduledSequence(
            token_ids=(7 + place,),
            start=CONTEXT - 1,
            block_table=list(range(place * per_sequence, (place + 1) * per_sequence)),
            sample=True,
            sampling=replace(_GREEDY),
            branches=(0,),
            output_index=1,
        )
        for place in range(batch)
    )
    return SchedulerOutput(sequences)


def _time(step: Callable[[], object]) -> float:
    """Seconds, as the engine sees them: the step returns when the device is done."""
    times = []
    for _ in range(REPEATS + 3):
        before = time.perf_counter()
        step()
        times.append(time.perf_counter() - before)
    return middle(times[3:])
