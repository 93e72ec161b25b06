"""``cache.kv_dtype: int8`` with nothing replaced: what is served, and what ``status`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.client import Client, Completion
from kvferry.engine.weights.store import ModelFolder
from tests.cluster import documents
from tests.golden.prompts import PASSAGE
from tests.system.processes import Command, Served

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

# Chunks of 32 tokens: the passage takes several, and fills several blocks.
CONFIG = """
cache: {num_blocks: 96, kv_dtype: int8}
scheduler: {max_num_batched_tokens: 64, chunk_tokens: 32}
"""
COLOCATED = """
prefill: {replicas: 0}
decode: {replicas: 0}
colocated: {replicas: 1}
"""
PROMPTS = ("a b c d e f g h i j k l m", PASSAGE)


def answers(served: Served) -> list[Completion]:
    with Client(served.endpoint) as client:
        return [
            client.generate_text(prompt, temperature=0.0, max_tokens=24, ignore_eos=True)
            for prompt in PROMPTS
        ]


def test_blocks_of_int8_that_travelled_give_the_tokens_of_a_colocated_worker(
    default_model: ModelFolder, tmp_path: Path
) -> None:
    with Served(tmp_path, CONFIG) as served:
        travelled = answers(served)
        with Command("status", "--endpoint", served.endpoint, "--json", folder=tmp_path) as command:
            status = documents.parse(command.wait().out)
    model = status["model"]
    assert (model["dtype"], model["kv_dtype"], model["block_size"]) == ("float32", "int8", 16)
    heads = model["num_layers"] * 2 * model["num_kv_heads"]
    assert model["block_bytes"] == heads * 16 * (model["head_dim"] + 4)
    for completion in travelled:
        transfer = completion.transfer
        assert transfer.blocks_moved == -(-completion.usage.prompt_tokens // 16)
        assert transfer.bytes_moved == transfer.blocks_moved * model["block_bytes"]
        assert completion.finished.recomputed_prompt_tokens == 0
    with Served(tmp_path, CONFIG + COLOCATED) as served:
        stayed = answers(served)
    assert [c.output_token_ids for c in travelled] == [c.output_token_ids for c in stayed]
    assert [c.text for c in travelled] == [c.text for c in stayed]
