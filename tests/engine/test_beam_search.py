"""Beam search beside transformers' own, over a model of random weights."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvferry.engine.beam_search import BeamSearch, Continuation
from kvferry.engine.request import EarlyStopping

VOCAB = 40
PAD = 39
THEIRS = {EarlyStopping.TRUE: True, EarlyStopping.FALSE: False, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
        eos_token_id=None,
    )
    made: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return made


def search(
    model: LlamaForCausalLM,
    prompt: list[int],
    num_beams: int,
    max_tokens: int,
    eos: list[int],
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> list[tuple[int, ...]]:
    """Ours, each beam computed whole in every step."""
    beams = BeamSearch(
        num_beams,
        len(eos),
        max_tokens,
        lambda index, token_id: token_id in eos or index + 1 == max_tokens,
        length_penalty,
        early_stopping,
    )
    while not beams.is_over:
        continuations = []
        for beam in beams.beams:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *beam.token_ids]])).logits[0, -1]
            top = logits.log_softmax(-1).topk(min(VOCAB, beams.num_continuations))
            continuations.append(
                [
                    Continuation(*pair)
                    for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
            )
        beams.advance(continuations)
    return [beam.token_ids for beam in beams.hypotheses]


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("num_beams", [2, 3, 4])
@pytest.mark.parametrize("eos", [[], [7], [7, 11, 30]])
def test_hypotheses_are_those_of_transformers(
    model: LlamaForCausalLM,
    eos: list[int],
    num_beams: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    for seed in range(4):
        prompt = [(seed * 17 + i * 5) % VOCAB for i in range(3 + seed)]
        with torch.inference_mode():
            theirs = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                generation_config=GenerationConfig(
                    num_beams=num_beams,
                    num_return_sequences=num_beams,
                    max_new_tokens=10,
                    do_sample=False,
                    length_penalty=length_penalty,
                    early_stopping=THEIRS[early_stopping],
                    eos_token_id=eos or None,
                    pad_token_id=PAD,
                ),
            )
        ours = search(model, prompt, num_beams, 10, eos, length_penalty, early_stopping)
        for mine, their in zip(ours, theirs.tolist(), strict=False):
            tail = their[len(prompt) :]
            assert list(mine) == tail[: len(mine)], (seed, ours, theirs)
            assert set(tail[len(mine) :]) <= {PAD}
