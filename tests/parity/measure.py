"""What is compared with transformers: logits, greedy tokens, the likelihood of a text.

The same functions serve the tests and the table. Ours always goes through a paged pool: logits and
likelihood in odd chunks and single steps, tokens through scheduler, workers and hand-off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch

from kvferry.engine.models.llama import LlamaModel
from tests.engine.paged_model import PagedSequences
from tests.golden.cluster import RealCluster, greedy
from tests.golden.reference import generate
from tests.parity.variants import VOCAB_SIZE

BLOCK_SIZE = 16
CHUNKS = (5, 1, 17, 2, 13, 31, 16, 1, 1, 1)  # then 29 at a time; the last positions one by one
NUM_DECODE_STEPS = 9
LENGTHS = (7, 33, 48, 90)  # of prompts: in a block, behind a chunk, whole blocks, several chunks
NUM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class LogitsCompared:
    """Largest difference of two logits, and the largest logit of the reference."""

    difference: float
    largest: float


@dataclass(frozen=True, slots=True)
class TokensCompared:
    """How many greedy tokens there are, and how many are equal on each way.

    ``passed_over`` counts prompts that were not used: the reference itself came close to a tie.
    """

    compared: int
    colocated: int
    disaggregated: int
    passed_over: int


def random_ids(seed: int, length: int) -> list[int]:
    """Token ids of the random models, a function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def random_prompts() -> Iterator[list[int]]:
    """Prompts of the random models, one length after the other, without end."""
    for seed, length in enumerate(chain.from_iterable(repeat(LENGTHS))):
        yield random_ids(1000 + seed, length)


def paged_logits(model: LlamaModel, ids: list[int], kv_dtype: str) -> torch.Tensor:
    """Our logits of all positions: odd chunks, then single steps.  [len(ids), vocab_size]"""
    run = PagedSequences(model, BLOCK_SIZE, seed=1, kv_dtype=kv_dtype)
    parts: list[torch.Tensor] = []
    first, prefill = 0, len(ids) - NUM_DECODE_STEPS
    for size in chain(CHUNKS, repeat(29)):
        last = min(first + size, prefill) if first < prefill else first + 1
        if first == len(ids):
            break
        parts += run.step([(0, ids[first:last])])
        first = last
    return torch.cat(parts)


def reference_logits(theirs: Any, ids: list[int]) -> torch.Tensor:
    """Logits of transformers for all positions at once, in float32.  [len(ids), vocab_size]"""
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([ids])).logits[0].float()
    return logits


def compare_logits(theirs: Any, model: LlamaModel, ids: list[int]) -> LogitsCompared:
    """Both models over ``ids`` in float32."""
    expected = reference_logits(theirs, ids)
    found = paged_logits(model, ids, "float32")
    return LogitsCompared(float((found - expected).abs().max()), float(expected.abs().max()))


def nll_per_token(logits: torch.Tensor, ids: list[int]) -> float:
    """Mean negative log-likelihood, in nats, of every token but the first."""
    log_probabilities = logits[:-1].double().log_softmax(-1)
    chosen = log_probabilities.gather(1, torch.tensor(ids[1:])[:, None])
    return -float(chosen.mean())


def compare_tokens(
    theirs: Any, model: LlamaModel, prompts: Iterable[list[int]], num_prompts: int = len(LENGTHS)
) -> TokensCompared:
    """Greedy tokens of the first ``num_prompts`` prompts without a near tie, on both ways."""
    golden: dict[str, list[int]] = {}
    used: dict[str, list[int]] = {}
    passed_over = 0
    for ids in prompts:
        answer = generate(theirs, ids, NUM_TOKENS)
        if answer is None:
            passed_over += 1
            continue
        used[f"prompt {len(used)}"] = ids
        golden[f"prompt {len(golden)}"] = answer
        if len(used) == num_prompts:
            break
    colocated = RealCluster(model=model, num_prefill=0, num_decode=0, num_colocated=1)
    disaggregated = RealCluster(model=model)
    disaggregated.named("decode").runner.forbid_prompt = True
    equal = [_count_equal(_serve(way, used), golden) for way in (colocated, disaggregated)]
    return TokensCompared(sum(map(len, golden.values())), equal[0], equal[1], passed_over)


def _serve(cluster: RealCluster, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tokens of all prompts, served at once, with nothing left behind."""
    cluster.run(1.5)
    for name, ids in prompts.items():
        cluster.submit(greedy(name, ids, NUM_TOKENS))
    cluster.run_until_ended(600)
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    tokens = {name: listener.tokens for name, listener in cluster.listeners.items()}
    cluster.close()
    return tokens


def _count_equal(found: dict[str, list[int]], expected: dict[str, list[int]]) -> int:
    return sum(
        a == b
        for name, tokens in expected.items()
        for a, b in zip(tokens, found[name], strict=True)
    )
