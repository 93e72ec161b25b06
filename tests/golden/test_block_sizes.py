"""Golden tokens with blocks of every size, and of different sizes at prefill and decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout, load_model, random_model
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels.reference.scaled import row_scales
from kvferry.worker.messages import Announce, Envelope
from tests.engine.generation import model_config
from tests.golden.cluster import RealCluster, greedy
from tests.golden.prompts import PASSAGE
from tests.golden.reference import generate
from tests.kernels.families import compiled
from tests.parity.measure import random_ids

NUM_TOKENS = 12
SIZES = (1, 4, 8, 16, 32, 64, 128)
# name: (first token of the passage, length); chunks of 32 tokens
PROMPTS = {"one token": (2, 1), "33 tokens": (0, 33), "90 tokens": (27, 90)}


@pytest.fixture(scope="module")
def model(default_model: ModelFolder) -> LlamaModel:
    return load_model(default_model.path, "float32", compiled())


@pytest.fixture(scope="module")
def prompts(default_model: ModelFolder) -> dict[str, list[int]]:
    ids = Tokenizer(default_model.path).encode(PASSAGE)
    return {name: ids[first : first + length] for name, (first, length) in PROMPTS.items()}


@pytest.fixture(scope="module")
def golden(reference_model: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """transformers' greedy tokens; fails where the reference itself is a near tie."""
    answers = {}
    for name, ids in prompts.items():
        answer = generate(reference_model, ids, NUM_TOKENS)
        assert answer is not None, f"{name}: a near tie"
        answers[name] = answer
    return answers


def cluster_of(prefill: int, decode: int, model: LlamaModel, **options: Any) -> RealCluster:
    """Pools that hold 320 positions and some blocks each."""
    return RealCluster(
        model=model,
        prefill_block_size=prefill,
        decode_block_size=decode,
        prefill_blocks=320 // prefill + 8,
        decode_blocks=320 // decode + 8,
        **options,
    )


def serve(cluster: RealCluster, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tokens of all prompts, served at once, with nothing left behind."""
    cluster.run(1.5)
    for name, ids in prompts.items():
        cluster.submit(greedy(name, ids, NUM_TOKENS))
    cluster.run_until_ended(600)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    return {name: listener.tokens for name, listener in cluster.listeners.items()}


@pytest.mark.model
@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("prefill", "decode"), [(1, 1), (128, 128), (16, 4), (4, 16), (1, 128), (128, 1)]
)
def test_tokens_equal_the_reference_and_decode_computes_no_prompt(
    model: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    prefill: int,
    decode: int,
    connector: str,
) -> None:
    cluster = cluster_of(prefill, decode, model, connector=connector)
    cluster.named("decode").runner.forbid_prompt = True
    assert serve(cluster, prompts) == golden
    puller = cluster.named("decode").decode.puller  # type: ignore[union-attr]
    blocks = sum(-(-len(ids) // prefill) for ids in prompts.values())
    assert puller.blocks_moved == blocks
    source = kv_layout(model.config, prefill, "float32")
    assert puller.bytes_moved == blocks * source.block_bytes()
    cluster.close()


@pytest.mark.model
@pytest.mark.parametrize("block_size", [1, 128])
def test_a_colocated_worker_s_tokens_equal_the_reference(
    model: LlamaModel, prompts: dict[str, list[int]], golden: dict[str, list[int]], block_size: int
) -> None:
    cluster = RealCluster(
        model=model,
        num_prefill=0,
        num_decode=0,
        num_colocated=1,
        block_size=block_size,
        decode_blocks=320 // block_size + 8,
    )
    assert serve(cluster, prompts) == golden
    cluster.close()


@pytest.mark.model
@pytest.mark.parametrize(("prefill", "decode"), [(16, 4), (4, 16), (1, 128)])
def test_tokens_equal_the_reference_with_beginnings_cached_on_both_sides(
    model: LlamaModel,
    prompts: dict[str, list[int]],
    golden: dict[str, list[int]],
    prefill: int,
    decode: int,
) -> None:
    cluster = cluster_of(prefill, decode, model, caching=True)
    begun = {"begun": prompts["90 tokens"][:37]}
    tokens = serve(cluster, begun)
    assert serve(cluster, prompts) == golden | tokens
    cluster.close()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize(("prefill", "decode"), [(16, 4), (4, 16), (1, 128), (12, 8)])
def test_whatever_the_element_type_rows_and_their_scales_move_together(
    prefill: int, decode: int, kv_dtype: str, connector: str
) -> None:
    """Tokens, and all filled slots byte for byte, of a small random model."""
    model = random_model(model_config(), 7, "float32", compiled())
    prompts = {f"prompt of {length}": random_ids(length, length) for length in (1, 48, 77)}
    colocated = RealCluster(
        model=model, kv_dtype=kv_dtype, num_prefill=0, num_decode=0, num_colocated=1
    )
    wanted = serve(colocated, prompts)
    colocated.close()
    cluster = cluster_of(prefill, decode, model, kv_dtype=kv_dtype, connector=connector)
    cluster.named("decode").runner.forbid_prompt = True
    assert serve(cluster, prompts) == wanted
    cluster.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("decode", SIZES)
def test_kv_at_decode_equals_prefill_s_byte_for_byte_by_position(
    prefill: int, decode: int, kv_dtype: str
) -> None:
    model = random_model(model_config(), 7, "float32", compiled())
    length = 77
    cluster = cluster_of(prefill, decode, model, kv_dtype=kv_dtype)
    cluster.run(1.5)
    source, reader = cluster.named("prefill"), cluster.named("decode")
    announced: dict[int, int] = {}

    def note(envelope: Envelope) -> tuple[int, ...]:
        if isinstance(envelope.body, Announce):
            announced.update((b.start, b.ref.block_id) for b in envelope.body.blocks)
        return (0,)

    cluster.filter = note
    cluster.submit(greedy("r", random_ids(length, length), 40))
    running = reader.worker.engine.scheduler.sequences
    assert cluster.run(60, lambda: bool(running))
    (sequence,) = running.values()
    found = by_position(reader, sequence.table.block_ids, length)
    wanted = by_position(source, [announced[start] for start in sorted(announced)], length)
    assert np.array_equal(found, wanted) and found.any(axis=1).all()
    cluster.run_until_ended(60)
    cluster.close()


def by_position(sim: Any, table: list[int], length: int) -> NDArray[np.uint8]:
    """The bytes of the first positions of a table, scales with them: ``[length, bytes]``."""
    pool = sim.runner.inner.pool[table]  # [blocks, layers, planes, heads, slots, dim]
    parts = [pool]
    if pool.dtype == torch.int8:
        parts.append(row_scales(sim.runner.inner.pool)[table].unsqueeze(-1))
    rows = [part.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length].contiguous() for part in parts]
    return np.concatenate([row.numpy().view(np.uint8).reshape(length, -1) for row in rows], axis=1)
