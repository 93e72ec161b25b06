"""Golden tokens of requests that had to give up their blocks in the middle of a stream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import load_model
from kvferry.engine.offload import Offloading
from kvferry.engine.request import RequestId
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels import reference
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_transfer.memory import SharedPoolMemory
from kvferry.worker.disk_folder import DiskFolder
from kvferry.worker.host_memory import HostMemory
from tests.engine.dict_mover import FixedCosts
from tests.golden.cluster import RealCluster, greedy
from tests.golden.prompts import PASSAGE
from tests.golden.reference import generate
from tests.kernels.families import compiled

pytestmark = pytest.mark.model

NUM_TOKENS = 20
PROMPTS = {"block": (27, 16), "block + 1": (27, 17), "chunk + 1": (0, 33)}


@pytest.fixture(scope="module")
def model(default_model: ModelFolder) -> LlamaModel:
    return load_model(default_model.path, "float32")


@pytest.fixture(scope="module")
def prompts(default_model: ModelFolder) -> dict[str, list[int]]:
    ids = Tokenizer(default_model.path).encode(PASSAGE)
    return {name: ids[first : first + length] for name, (first, length) in PROMPTS.items()}


@pytest.fixture(scope="module")
def golden(reference_model: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    answers = {}
    for name, ids in prompts.items():
        answer = generate(reference_model, ids, NUM_TOKENS)
        assert answer is not None, f"{name}: a near tie"
        answers[name] = answer
    return answers


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("cpu", "recompute"),
        ("cpu", "memory"),
        ("cpu", "disk"),
        ("cpu", "damaged disk"),
        ("reference", "memory"),
    ],
)
def test_tokens_equal_the_reference_whichever_way_kv_comes_back(
    model: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    tmp_path: Path,
    way: str,
    family: str,
) -> None:
    made: list[tuple[Offloading, DiskFolder | None]] = []

    def offloading(memory: SharedPoolMemory, block_size: int) -> Offloading:
        disk = DiskFolder(tmp_path, memory.block_bytes) if "disk" in way else None
        slots, files = (1, 16) if disk is not None else (16, 0)
        offloading = Offloading(
            HostTier(slots, files, caching=False),
            HostMemory(memory.blocks, slots, disk),
            block_size,
            time.perf_counter,
            FixedCosts(way != "recompute"),
        )
        made.append((offloading, disk))
        return offloading

    kernels = reference if family == "reference" else compiled()
    cluster = RealCluster(
        model=LlamaModel(model.config, model.weights, kernels),
        offloading=offloading,
        num_prefill=0,
        num_decode=0,
        num_colocated=1,
        decode_blocks=7,
        scheduler=SchedulerConfig(8, 64, 64, watermark=0.0),
    )
    cluster.run(1.5)
    assert cluster.router is not None
    requests = []
    for name, ids in prompts.items():
        cluster.submit(greedy(name, ids, NUM_TOKENS))
        requests.append(cluster.router.requests[RequestId(name)])
    scheduler = cluster.named("colocated").worker.engine.scheduler
    assert cluster.run(600, lambda: scheduler.num_preemptions > 0)
    victim = next(s for s in scheduler.waiting if s.num_preemptions)
    assert victim.num_output_tokens > 1, "in the middle of its stream"
    ((tier, disk),) = made
    if way == "damaged disk":
        assert disk is not None
        for path in disk.folder.glob("*.block"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x40
            path.write_bytes(data)
    cluster.run_until_ended(600)
    assert {name: x.tokens for name, x in cluster.listeners.items()} == golden
    counters = scheduler.counters
    assert (counters.preemptions_offload == 0) == (way == "recompute")
    recomputed = counters.recomputed_tokens_preemption
    assert (recomputed > 0) == (way in ("recompute", "damaged disk"))
    assert (counters.host_lost_blocks > 0) == (way == "damaged disk")
    assert not tier.tier.owners and not len(tier.tier)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()
    assert not list(tmp_path.glob("*/")), "the disk was left as it was found"
