"""Prefix reuse through gRPC: what a second request with the same beginning computes and moves."""

from __future__ import annotations

import pytest

from kvferry.cluster.client import Client, Completion
from tests.system.pools import assert_quiet

BLOCK_SIZE = 16


def prompt(seed: int, length: int) -> list[int]:
    return [(i * 6997 + seed * 131) % 40_000 + 1000 for i in range(length)]


def serve(client: Client, token_ids: list[int], salt: str = "") -> Completion:
    """One request, when nothing is left of those before it."""
    assert_quiet(client)
    return client.generate_text(
        token_ids=token_ids, cache_salt=salt, temperature=0.0, max_tokens=4, ignore_eos=True
    )


def test_a_second_request_computes_the_rest_and_moves_no_shared_block(client: Client) -> None:
    shared = prompt(1, 512)
    first = serve(client, shared + prompt(2, 40))
    second = serve(client, shared + prompt(3, 40))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 512
    assert second.transfer.blocks_reused == 512 // BLOCK_SIZE
    assert second.transfer.blocks_moved == 3, "the 40 tokens that differ"
    assert first.transfer.blocks_moved == 512 // BLOCK_SIZE + 3
    assert second.finished.recomputed_prompt_tokens == 0


@pytest.mark.parametrize("salts", [("a", "b"), ("", "a")])
def test_tenants_find_nothing_of_each_other(client: Client, salts: tuple[str, str]) -> None:
    ids = prompt(10 + len(salts[0]), 100)
    one, other = (serve(client, ids, salt) for salt in salts)
    again = serve(client, ids, salts[1])
    assert one.output_token_ids == other.output_token_ids
    assert (one.usage.cached_tokens, other.usage.cached_tokens) == (0, 0)
    assert other.transfer.blocks_reused == 0
    assert again.usage.cached_tokens >= 96
