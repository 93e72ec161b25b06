"""A small model on a runner, and requests that are driven through it step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvferry.engine.batch import ScheduledSequence, SchedulerOutput
from kvferry.engine.model_runner import PoolBuffer, TorchModelRunner
from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.llama import LlamaModel
from kvferry.engine.models.loading import kv_layout, random_model
from kvferry.engine.request import SamplingParams
from tests.parity.variants import VOCAB_SIZE, random_reference

NUM_BLOCKS, BLOCK_SIZE = 64, 8
GREEDY = SamplingParams(temperature=0.0)


def model_config(**changes: Any) -> ModelConfig:
    config = random_reference("llama").config.to_dict()
    return replace(ModelConfig.from_dict(config, name="small", revision="none"), **changes)


def small_model(**changes: Any) -> LlamaModel:
    """Random weights; of the first seeds the one whose greedy output varies most."""
    return random_model(model_config(**changes), 7, "float32")


def runner(
    model: LlamaModel | None = None,
    buffer: PoolBuffer | None = None,
    kv_dtype: str = "float32",
    max_tokens: int = 96,
) -> TorchModelRunner:
    model = model or small_model()
    layout = kv_layout(model.config, BLOCK_SIZE, kv_dtype)
    if buffer is None:
        buffer = bytearray(NUM_BLOCKS * layout.block_bytes())
    return TorchModelRunner(model, buffer, layout, NUM_BLOCKS, max_tokens, 6)


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def sequence(
    token_ids: list[int],
    start: int,
    table: list[int],
    sample: bool = True,
    sampling: SamplingParams = GREEDY,
    output_index: int = 0,
) -> ScheduledSequence:
    return ScheduledSequence(token_ids, start, table, sample, sampling, (0,), output_index)


def step(runner: TorchModelRunner, *sequences: ScheduledSequence) -> tuple[int | None, ...]:
    return runner.execute(SchedulerOutput(sequences)).token_ids


class Generation:
    """One request: its tokens so far, where its KV lies, and the chunk sizes still to come."""

    def __init__(
        self, seed: int, length: int, table: list[int], chunks: list[int], **sampling: Any
    ) -> None:
        self.tokens = prompt(seed, length)
        self.length = length
        self.table = table
        self.chunks = chunks
        self.sampling = SamplingParams(seed=seed, **({"temperature": 0.0} | sampling))
        self.computed = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.length :]

    def schedule(self) -> ScheduledSequence:
        size = self.chunks.pop(0) if self.chunks else len(self.tokens)
        chunk = self.tokens[self.computed : self.computed + size]
        sample = self.computed + len(chunk) == len(self.tokens)
        return sequence(chunk, self.computed, self.table, sample, self.sampling, len(self.output))

    def advance(self, scheduled: ScheduledSequence, token: int | None) -> None:
        assert (token is not None) == scheduled.sample
        self.computed += len(scheduled.token_ids)
        if token is not None:
            self.tokens.append(token)


def advance_together(runner: TorchModelRunner, generations: list[Generation]) -> None:
    scheduled = [g.schedule() for g in generations]
    for g, s, token in zip(generations, scheduled, step(runner, *scheduled), strict=True):
        g.advance(s, token)
