"""Golden tokens: greedy fp32 output equals transformers' own, wherever the KV has travelled.

The reference is transformers' model, read by transformers from the GGUF itself, run in this
suite. Ours goes through scheduler, paged pool, shared memory and hand-off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import load_model
from kvferry.engine.request import RequestId
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels import reference
from kvferry.worker.messages import Announce, Envelope
from tests.golden.cluster import RealCluster, greedy
from tests.golden.prompts import PASSAGE, long_text
from tests.golden.reference import generate
from tests.kernels.families import compiled

pytestmark = pytest.mark.model

NUM_TOKENS = 32

# name: (source, first token, length); chunks of 32 tokens, blocks of 16
PROMPTS = {
    "one token": ("passage", 2, 1),
    "block - 1": ("passage", 9, 15),
    "block": ("passage", 27, 16),
    "block + 1": ("passage", 27, 17),
    "chunk - 1": ("passage", 26, 31),
    "chunk + 1": ("passage", 0, 33),
    "three chunks": ("passage", 27, 90),
    "700 tokens": ("list", 300, 700),
}


@pytest.fixture(scope="module")
def model(default_model: ModelFolder) -> LlamaModel:
    return load_model(default_model.path, "float32")


@pytest.fixture(params=["reference", "cpu"])
def model_of_family(request: pytest.FixtureRequest, model: LlamaModel) -> LlamaModel:
    """The model on each family of kernels."""
    kernels = reference if request.param == "reference" else compiled()
    return LlamaModel(model.config, model.weights, kernels)


@pytest.fixture(scope="module")
def prompts(default_model: ModelFolder) -> dict[str, list[int]]:
    tokenizer = Tokenizer(default_model.path)
    sources = {"passage": tokenizer.encode(PASSAGE), "list": tokenizer.encode(long_text(80))}
    cut = {
        name: sources[source][first : first + length]
        for name, (source, first, length) in PROMPTS.items()
    }
    assert [len(ids) for ids in cut.values()] == [length for _, _, length in PROMPTS.values()]
    return cut


@pytest.fixture(scope="module")
def golden(reference_model: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """transformers' greedy tokens; fails where the reference itself is a near tie."""
    answers = {}
    for name, ids in prompts.items():
        answer = generate(reference_model, ids, NUM_TOKENS)
        assert answer is not None, f"{name}: a near tie"
        answers[name] = answer
    return answers


def run_all(cluster: RealCluster, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Serve all prompts at once; the routed requests by name."""
    cluster.run(1.5)
    assert cluster.router is not None
    requests = {}
    for name, ids in prompts.items():
        cluster.submit(greedy(name, ids))
        requests[name] = cluster.router.requests[RequestId(name)]
    cluster.run_until_ended(600)
    return requests


def outputs(cluster: RealCluster) -> dict[str, list[int]]:
    return {name: listener.tokens for name, listener in cluster.listeners.items()}


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_disaggregated_tokens_equal_the_reference_and_decode_computes_no_prompt(
    model_of_family: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    connector: str,
) -> None:
    cluster = RealCluster(model=model_of_family, connector=connector)
    cluster.named("decode").runner.forbid_prompt = True
    requests = run_all(cluster, prompts)
    assert outputs(cluster) == golden
    block_bytes = cluster.memories[cluster.named("decode").ref].block_bytes
    for name, ids in prompts.items():
        stats = requests[name].decode_stats
        assert stats.recomputed_prompt_tokens == 0
        assert stats.transfer.connector == connector
        assert stats.transfer.blocks_moved == -(-len(ids) // 16)
        assert stats.transfer.bytes_moved == stats.transfer.blocks_moved * block_bytes
        assert requests[name].num_attempts == 1
    assert requests["three chunks"].prefill_stats.num_chunks >= 3
    assert requests["three chunks"].decode_stats.transfer.blocks_before_last_chunk > 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


def test_colocated_tokens_equal_the_reference(
    model: LlamaModel, prompts: dict[str, list[int]], golden: dict[str, list[int]]
) -> None:
    cluster = RealCluster(model=model, num_prefill=0, num_decode=0, num_colocated=1)
    run_all(cluster, prompts)
    assert outputs(cluster) == golden
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_tokens_equal_the_reference_when_a_byte_of_a_block_flips_in_flight(
    model: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    connector: str,
) -> None:
    cluster = RealCluster(model=model, connector=connector)
    flipped: list[object] = []

    def flip_once(move: object, target: Any) -> None:
        if not flipped:
            flipped.append(move)
            target[target.size // 2] ^= 0x40

    cluster.named("decode").connector.tamper = flip_once
    requests = run_all(cluster, {"three chunks": prompts["three chunks"]})
    assert flipped
    stats = requests["three chunks"].decode_stats
    assert stats.transfer.reads_failed == 1
    assert stats.recomputed_prompt_tokens == 0
    assert requests["three chunks"].num_attempts == 1
    assert outputs(cluster)["three chunks"] == golden["three chunks"]
    cluster.close()


def test_tokens_equal_the_reference_under_preemption_in_a_small_decode_pool(
    model: LlamaModel, prompts: dict[str, list[int]], golden: dict[str, list[int]]
) -> None:
    """Recomputed KV (other chunks, other batches) gives the same tokens."""
    short = {name: ids for name, ids in prompts.items() if len(ids) <= 33}
    cluster = RealCluster(model=model, decode_blocks=15)
    requests = run_all(cluster, short)
    assert outputs(cluster) == {name: golden[name] for name in short}
    assert sum(r.decode_stats.num_preemptions for r in requests.values()) >= 1
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


@pytest.mark.parametrize(
    ("model_of_family", "kept"),
    [
        ("cpu", "both"),
        ("cpu", "prefill"),
        ("cpu", "decode"),
        ("cpu", "neither"),
        ("reference", "both"),
    ],
    indirect=["model_of_family"],
)
def test_tokens_equal_the_reference_with_the_prompt_cached(
    model_of_family: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    kept: str,
) -> None:
    """Hits at none, part and all of a prompt, in the pools named, beside a run of misses."""
    short = {name: ids for name, ids in prompts.items() if len(ids) <= 90}
    cluster = RealCluster(model=model_of_family, caching=True)
    run_all(cluster, {"three chunks": prompts["three chunks"]})  # three prompts begin with it
    for side in ("prefill", "decode"):
        if kept not in ("both", side):
            cluster.named(side).worker.engine.pool.clear_cache()
    requests = run_all(cluster, {f"{name} again": ids for name, ids in short.items()})
    wanted = {f"{name} again": golden[name] for name in short}
    assert outputs(cluster) == wanted | {"three chunks": golden["three chunks"]}
    cached = {name: request.num_cached_tokens for name, request in requests.items()}
    # Decode computes less than a block; prefill knows the last, partial block; with no cache two
    # others compute the first block meanwhile.
    where_it_is = {"both": 80, "decode": 80, "prefill": 89, "neither": 16}
    assert cached["three chunks again"] == where_it_is[kept]
    assert cached["one token again"] == 0
    prefilled = requests["three chunks again"].prefill_worker
    assert prefilled.startswith("decode" if kept in ("both", "decode") else "prefill")
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


def test_four_greedy_branches_equal_the_reference_and_move_the_bytes_of_one(
    model_of_family: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
) -> None:
    cluster = RealCluster(model=model_of_family, caching=True)
    name = "three chunks"
    alone = run_all(cluster, {name: prompts[name]})[name]
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    for side in ("decode", "prefill"):
        cluster.named(side).worker.engine.pool.clear_cache()
    spec = greedy("four", prompts[name])
    spec = replace(spec, suffixes=((),) * 4, branches=(0, 1, 2, 3))
    listener = cluster.submit(spec)
    assert cluster.router is not None
    request = cluster.router.requests[spec.request_id]
    cluster.run_until_ended(60)
    assert listener.branches == dict.fromkeys(range(4), golden[name])
    moved = [
        each.decode_stats.transfer.bytes_moved
        for each in (alone, request)
        if each.decode_stats is not None and each.decode_stats.transfer is not None
    ]
    assert len(moved) == 2 and moved[0] == moved[1]
    assert request.num_delivered == 4 * len(golden[name])
    assert request.num_cached_tokens == alone.num_cached_tokens == 0
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    cluster.close()


@pytest.mark.parametrize("name", ["block + 1", "three chunks"])
def test_every_moved_block_equals_its_source_and_a_colocated_control(
    model: LlamaModel, prompts: dict[str, list[int]], name: str
) -> None:
    """Filled slots: byte for byte with the source; bit for bit with a run that moved nothing.

    The control computes the same chunks, alone in its batch, on as many threads.
    """
    ids = prompts[name]
    scheduler = SchedulerConfig(8, 32, 32, watermark=0.0)
    moved = RealCluster(model=model, scheduler=scheduler)
    moved.run(1.5)
    source: dict[int, np.ndarray[Any, Any]] = {}

    def keep_announced(envelope: Envelope) -> tuple[int, ...]:
        if isinstance(envelope.body, Announce):
            for block in envelope.body.blocks:
                at = moved.block(moved.named("prefill"), block.ref.block_id)
                source[block.start] = at[..., : block.num_tokens, :].copy()
        return (0,)

    moved.filter = keep_announced
    arrived: dict[int, np.ndarray[Any, Any]] = {}
    control: dict[int, np.ndarray[Any, Any]] = {}
    _keep_prompt_blocks(moved, moved.named("decode"), len(ids), arrived)
    moved.submit(greedy(name, ids, 3))
    moved.run_until_ended()

    alone = RealCluster(
        model=model, scheduler=scheduler, num_prefill=0, num_decode=0, num_colocated=1
    )
    alone.run(1.5)
    _keep_prompt_blocks(alone, alone.named("colocated"), len(ids), control)
    alone.submit(greedy(name, ids, 3))
    alone.run_until_ended()

    assert list(arrived) == list(source) == list(control) == list(range(0, len(ids), 16))
    for start in source:
        np.testing.assert_array_equal(arrived[start], source[start])
        np.testing.assert_array_equal(arrived[start], control[start])
    moved.close()
    alone.close()


def _keep_prompt_blocks(
    cluster: RealCluster, sim: Any, num_tokens: int, kept: dict[int, np.ndarray[Any, Any]]
) -> None:
    """Copy the prompt's filled slots when the first step after the prompt is about to run."""

    def keep(output: Any) -> None:
        share = output.sequences[0]
        if share.start != num_tokens or kept:
            return
        for index, start in enumerate(range(0, num_tokens, 16)):
            filled = min(16, num_tokens - start)
            block = cluster.block(sim, share.block_table[index])
            kept[start] = block[..., :filled, :].copy()

    sim.runner.before_step = keep
