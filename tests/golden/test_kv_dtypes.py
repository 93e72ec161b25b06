"""Whatever the element type of the KV: blocks that travelled give the tokens of those that did not.

A small random model, so that this needs nothing fetched; both families of kernels, real pools and
real connectors.
"""

from __future__ import annotations

import pytest

from kvferry.engine.models.loading import kv_layout, random_model
from kvferry.kernels import reference
from tests.engine.generation import model_config
from tests.golden.cluster import RealCluster, greedy
from tests.kernels.families import compiled
from tests.parity.measure import random_ids

NUM_TOKENS = 24
# blocks of 16, chunks of 32: within a block, whole blocks, several chunks
PROMPTS = {f"prompt of {length}": random_ids(length, length) for length in (1, 15, 16, 48, 90)}


def served(cluster: RealCluster) -> dict[str, list[int]]:
    """The tokens of all prompts, served at once, with nothing left behind."""
    cluster.run(1.5)
    for name, ids in PROMPTS.items():
        cluster.submit(greedy(name, ids, NUM_TOKENS))
    cluster.run_until_ended(600)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    return {name: listener.tokens for name, listener in cluster.listeners.items()}


@pytest.mark.parametrize("connector", ["shm", "tcp"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("family", ["reference", "cpu"])
def test_tokens_are_those_of_a_colocated_worker_with_the_same_kv(
    family: str, kv_dtype: str, connector: str
) -> None:
    kernels = reference if family == "reference" else compiled()
    model = random_model(model_config(), 7, "float32", kernels)
    colocated = RealCluster(
        model=model, kv_dtype=kv_dtype, num_prefill=0, num_decode=0, num_colocated=1
    )
    wanted = served(colocated)
    colocated.close()
    assert len({token for tokens in wanted.values() for token in tokens}) > 10
    cluster = RealCluster(model=model, kv_dtype=kv_dtype, connector=connector)
    cluster.named("decode").runner.forbid_prompt = True
    assert served(cluster) == wanted
    source = cluster.memories[cluster.named("prefill").ref]
    assert source.block_bytes == kv_layout(model.config, 16, kv_dtype).block_bytes()
    cluster.close()
