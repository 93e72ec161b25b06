"""The CUDA path on a real GPU: the same that the fake device is held to, beside the CPU's results.

Skipped without a GPU. With one: ``pytest -m gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from kvferry.engine.batch import SchedulerOutput
from kvferry.engine.device.cuda import CudaDevice
from kvferry.engine.device.protocol import Device
from kvferry.engine.device.runner import DeviceModelRunner, num_scratch_blocks
from kvferry.engine.model_runner import TorchModelRunner
from kvferry.engine.models.llama import Kernels, LlamaModel
from kvferry.engine.models.loading import kv_layout, load_model
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kernels import reference
from kvferry.kv_transfer.memory import allocate_shared
from kvferry.worker.messages import NodeRef
from kvferry.worker.staging.slots import Slots
from tests.engine.generation import BLOCK_SIZE, NUM_BLOCKS, Generation, prompt
from tests.golden.cluster import RealCluster, greedy
from tests.parity.variants import random_reference
from tests.worker.staging.device_cluster import DeviceCluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]

MAX_TOKENS, MAX_SEQS = 96, 6
PROMPTS = [prompt(i, length) for i, length in enumerate([61, 8, 45, 1, 90, 17])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in Hugging Face layout."""
    path = tmp_path_factory.mktemp("model")
    random_reference("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def device() -> Device:
    """The GPU."""
    return CudaDevice()


def on_gpu(folder: Path, device: Device, kernels: Kernels) -> LlamaModel:
    return load_model(folder, "float32", kernels, device.torch_device)


def triton_kernels() -> Kernels:
    """The GPU family; the test fails without it."""
    return cast(Kernels, import_module("kvferry.kernels.triton"))


def make_runner(device: Device, model: LlamaModel) -> DeviceModelRunner:
    layout = kv_layout(model.config, BLOCK_SIZE, "float32")
    blocks = NUM_BLOCKS + num_scratch_blocks(MAX_SEQS, BLOCK_SIZE)
    memory = device.zeros(blocks * layout.block_bytes())
    return DeviceModelRunner(device, model, memory, layout, NUM_BLOCKS, MAX_TOKENS, MAX_SEQS)


def tokens_of(runner: TorchModelRunner | DeviceModelRunner, num_steps: int) -> list[list[int]]:
    """Outputs of three requests: chunks first, then decode steps of them all."""
    generations = [
        Generation(i, length, list(range(8 * i, 8 * i + 8)), [5, 9])
        for i, length in enumerate((17, 3, 30))
    ]
    for _ in range(num_steps):
        shares = [generation.schedule() for generation in generations]
        found = runner.execute(SchedulerOutput(tuple(shares))).token_ids
        for generation, share, token in zip(generations, shares, found, strict=True):
            generation.advance(share, token)
    return [generation.output for generation in generations]


def expected(folder: Path) -> list[list[int]]:
    model = load_model(folder, "float32")
    layout = kv_layout(model.config, BLOCK_SIZE, "float32")
    buffer = bytearray(NUM_BLOCKS * layout.block_bytes())
    plain = TorchModelRunner(model, buffer, layout, NUM_BLOCKS, MAX_TOKENS, MAX_SEQS)
    return tokens_of(plain, 12)


def test_plain_torch_on_the_gpu_gives_the_cpu_s_tokens(folder: Path, device: Device) -> None:
    assert tokens_of(make_runner(device, on_gpu(folder, device, reference)), 12) == expected(folder)


@pytest.mark.parametrize("graphs", [False, True])
def test_triton_gives_the_cpu_s_tokens_with_graphs_and_without(
    folder: Path, device: Device, graphs: bool
) -> None:
    runner = make_runner(device, on_gpu(folder, device, triton_kernels()))
    if graphs:
        runner.pool[:NUM_BLOCKS] = 0.5
        runner.capture_graphs()
        assert (runner.pool[:NUM_BLOCKS] == 0.5).all(), "capturing touches no block"
    assert tokens_of(runner, 12) == expected(folder)
    assert bool(runner.graphs) == graphs


def test_blocks_pass_through_pinned_memory_that_peers_can_map(device: Device) -> None:
    num_slots, block_bytes = 8, 1 << 20
    memory = allocate_shared(num_slots, block_bytes)
    pinned = device.pin(memory.blocks)
    slots = Slots(memory, pinned, range(num_slots), device.stream())
    pool = device.zeros(16 * block_bytes).view(16, block_bytes)
    pool.random_(0, 255)
    torch.cuda.synchronize()
    for block_id in range(8):
        slot = slots.take()
        assert slot is not None
        slots.copy_out(pool[block_id], slot)
        slots.wait(slot)
        assert np.array_equal(memory.blocks[slot], pool[block_id].cpu().numpy())
        slots.copy_in(slot, pool[block_id + 8])
        slots.wait(slot)
        slots.give_back(slot)
    assert torch.equal(pool[:8], pool[8:])
    slots.close()
    device.unpin(memory.blocks)
    memory.close()


class GpuCluster(DeviceCluster):
    """A prefill and a decode worker that share one GPU."""

    def make_device(self, ref: NodeRef) -> Device:
        """A handle of its own: streams and graphs are not shared."""
        return CudaDevice()


@pytest.fixture(params=["shm", "tcp"])
def clusters(folder: Path, device: Device, request: pytest.FixtureRequest) -> Iterator[RealCluster]:
    """One on the GPU, with the connector of the case."""
    cluster = GpuCluster(
        model=on_gpu(folder, device, triton_kernels()),
        block_size=8,
        connector=request.param,
        scheduler=SchedulerConfig(6, 48, 24, watermark=0.0),
    )
    yield cluster
    cluster.close()


def test_prefill_and_decode_on_a_gpu_give_the_cpu_s_tokens(
    folder: Path, clusters: RealCluster
) -> None:
    on_cpu = RealCluster(
        model=load_model(folder, "float32"),
        block_size=8,
        scheduler=SchedulerConfig(6, 48, 24, watermark=0.0),
    )
    for cluster in (on_cpu, clusters):
        for number, ids in enumerate(PROMPTS):
            cluster.submit(greedy(f"r{number}", ids, 12))
        cluster.run_until_ended(600.0)
    wanted = {name: listener.tokens for name, listener in on_cpu.listeners.items()}
    found = {name: listener.tokens for name, listener in clusters.listeners.items()}
    on_cpu.close()
    assert found == wanted
    clusters.run(10.0)
    assert clusters.leftovers() == []
