"""Beam search beside transformers' own, where none of its choices is a near tie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from kvferry.engine.beam_search import BeamSearch, Continuation
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import load_model
from kvferry.engine.request import EarlyStopping, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from kvferry.kernels import reference
from tests.golden.cluster import RealCluster
from tests.golden.prompts import PASSAGE
from tests.golden.reference import MARGIN
from tests.kernels.families import compiled

pytestmark = pytest.mark.model

NUM_BEAMS = 4
NUM_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """A part of the passage, and what ends an output."""

    first: int
    length: int
    end: str


CASES = {
    "chunk + 1": Case(0, 33, "<|im_end|>"),
    "ends early": Case(0, 14, "."),
    "ends at a comma": Case(5, 41, ","),
}


@pytest.fixture(scope="module")
def model(default_model: ModelFolder) -> LlamaModel:
    return load_model(default_model.path, "float32")


@pytest.fixture(scope="module")
def specs(default_model: ModelFolder) -> list[RequestSpec]:
    tokenizer = Tokenizer(default_model.path)
    ids = tokenizer.encode(PASSAGE)
    return [
        RequestSpec(
            RequestId(name),
            tuple(ids[case.first : case.first + case.length]),
            sampling=SamplingParams(
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                num_beams=NUM_BEAMS,
                length_penalty=1.0,
                early_stopping=EarlyStopping.TRUE,
            ),
            eos_token_ids=tuple(tokenizer.encode(case.end)),
            max_model_len=8192,
        )
        for name, case in CASES.items()
    ]


@pytest.fixture(scope="module")
def golden(reference_model: Any, specs: list[RequestSpec]) -> dict[str, list[int]]:
    """What transformers finds."""
    answers: dict[str, list[int]] = {}
    for spec in specs:
        margin = narrowest(reference_model, spec)
        assert margin > MARGIN, f"{spec.request_id}: a near tie ({margin:.1e})"
        (eos,) = spec.eos_token_ids
        out = reference_model.generate(
            torch.tensor([spec.prompt_token_ids]),
            attention_mask=torch.ones(1, len(spec.prompt_token_ids), dtype=torch.int64),
            generation_config=GenerationConfig(
                num_beams=NUM_BEAMS,
                length_penalty=1.0,
                early_stopping=True,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=eos,
            ),
        )
        answers[spec.request_id] = out[0, len(spec.prompt_token_ids) :].tolist()
    return answers


def narrowest(model: Any, spec: RequestSpec) -> float:
    """How near the search comes to another choice: in the sum of log-probabilities."""
    (eos,) = spec.eos_token_ids
    search = BeamSearch(
        NUM_BEAMS,
        1,
        NUM_TOKENS,
        lambda index, token_id: token_id == eos or index + 1 == NUM_TOKENS,
        early_stopping=EarlyStopping.TRUE,
    )
    least = float("inf")
    cache: Any = DynamicCache()
    fed = torch.tensor([spec.prompt_token_ids])
    while not search.is_over:
        with torch.inference_mode():
            logits = model(fed, cache=cache).logits[:, -1]
        logprobs = logits.double().log_softmax(-1)
        scores = logprobs + torch.tensor([[b.score] for b in search.beams], dtype=torch.float64)
        scores[:, eos] = -torch.inf  # what ends is no beam
        best = scores.flatten().topk(NUM_BEAMS + 1).values
        least = min(least, float(best[-2] - best[-1]))
        top = logprobs.topk(search.num_continuations)
        search.advance(
            [
                [Continuation(*pair) for pair in zip(ids, values, strict=True)]
                for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        )
        if not search.is_over:
            cache.reorder_cache(torch.tensor([beam.parent for beam in search.beams]))
            fed = torch.tensor([beam.token_ids[-1:] for beam in search.beams])
    first, second = search.hypotheses[:2]
    return min(least, first.score - second.score)


@pytest.mark.parametrize(
    ("roles", "family"),
    [("disaggregated", "cpu"), ("colocated", "cpu"), ("few blocks", "cpu"), ("few", "reference")],
)
def test_the_output_is_that_of_transformers(
    model: LlamaModel,
    specs: list[RequestSpec],
    golden: dict[str, list[int]],
    roles: str,
    family: str,
) -> None:
    kernels = reference if family == "reference" else compiled()
    apart = roles != "colocated"
    cluster = RealCluster(
        model=LlamaModel(model.config, model.weights, kernels),
        decode_blocks=6 if roles == "few blocks" else 128,
        scheduler=SchedulerConfig(24, 64, 32, watermark=0.0),
        num_prefill=int(apart),
        num_decode=int(apart),
        num_colocated=int(not apart),
    )
    cluster.run(1.5)
    assert cluster.router is not None
    requests = []
    served = specs[:2] if roles == "few" else specs
    for spec in served:
        cluster.submit(spec)
        requests.append(cluster.router.requests[spec.request_id])
    cluster.run_until_ended(600)
    assert {name: x.tokens for name, x in cluster.listeners.items()} == {
        spec.request_id: golden[spec.request_id] for spec in served
    }
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()
    for request in requests:
        assert request.num_prefill_chunks == -(-len(request.spec.prompt_token_ids) // 32)
        if roles == "disaggregated":
            assert request.decode_stats is not None and request.decode_stats.transfer is not None
            blocks = -(-len(request.spec.prompt_token_ids) // 16)
            assert request.decode_stats.transfer.blocks_moved == blocks, "moved once"
            assert request.recomputed_prompt_tokens == 0
    preempted = sum(request.num_preemptions for request in requests)
    assert (preempted > 0) == (roles == "few blocks")
    cluster.close()


def test_some_output_ends_before_its_limit(golden: dict[str, list[int]]) -> None:
    assert min(map(len, golden.values())) < NUM_TOKENS == max(map(len, golden.values()))
