"""Blocks of different sizes with nothing replaced: what is served, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.client import Client
from tests.cluster import documents
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.system.pools import assert_quiet
from tests.system.processes import Command, Served

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
cache: {block_size: auto, num_blocks: 64, prefix_caching: false}
scheduler: {max_num_batched_tokens: 64, chunk_tokens: 32}
"""
DECODE = "decode: {block_size: 4}\n"
PROMPTS = ("ab", "abc " * 9, "a b c d e f g h i j k l m n o p q r s t u v w x y z")


def tokens(served: Served) -> list[list[int]]:
    with Client(served.endpoint) as client:
        answers = [
            client.generate_text(prompt, temperature=0.0, max_tokens=20, ignore_eos=True)
            for prompt in PROMPTS
        ]
        assert_quiet(client)
    for answer in answers:
        assert answer.transfer.blocks_moved == -(-answer.usage.prompt_tokens // 128)
        assert answer.finished.recomputed_prompt_tokens == 0
    return [list(answer.output_token_ids) for answer in answers]


def test_an_auto_size_at_prefill_and_another_at_decode(tmp_path: Path) -> None:
    model = tmp_path / "random.gguf"
    write_tiny_gguf(model)
    with Served(tmp_path, CONFIG + DECODE, "--model", str(model)) as served:
        apart = tokens(served)
        said = served.err
        with Command("status", "--endpoint", served.endpoint, "--json", folder=tmp_path) as command:
            status = documents.parse(command.wait().out)
        with Command("status", "--endpoint", served.endpoint, folder=tmp_path) as command:
            shown = command.wait().out
    assert "block size: 128 positions of" in said and "auto: the least of" in said
    assert "block sizes: 128 (prefill), 4 (decode); hashes every 4 tokens" in said
    sizes = {w["worker_id"]: w["kv"]["block_size"] for w in status["workers"]}
    assert sizes == {"prefill-0": 128, "decode-0": 4}
    assert status["model"]["block_size"] == 128
    assert "blocks of 128 (prefill-0), 4 (decode-0) positions" in shown
    with Served(tmp_path, CONFIG, "--model", str(model)) as served:
        assert tokens(served) == apart
