from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models.loading import load_model
from kvferry.engine.weights.store import ModelFolder
from tests.engine.generation import Generation, advance_together, prompt, runner, small_model
from tests.parity.variants import random_reference


def mixed_requests() -> list[Generation]:
    return [
        Generation(1, 21, [5, 40, 2, 33, 17], [7, 6]),
        Generation(2, 1, [9, 11], []),
        Generation(3, 16, [0, 1, 63, 62], [8]),
        Generation(4, 30, [50, 20, 21, 19, 8, 7], [1, 9, 13], temperature=0.8, top_p=0.9),
        Generation(5, 8, [30, 3, 4], [], temperature=1.0, top_k=9),
    ]


def test_generation_does_not_depend_on_chunks_blocks_or_the_rest_of_the_batch() -> None:
    model = small_model()
    together, alone = mixed_requests(), mixed_requests()
    shared = runner(model)
    for round_number in range(14):  # the batch grows by one request per round
        advance_together(shared, together[: round_number + 1])
    assert len({token for generation in together for token in generation.output}) > 10
    for number, generation in enumerate(alone):
        generation.chunks = []
        generation.table = list(range(8))
        own = runner(model)
        expected = together[number].output
        while len(generation.output) < len(expected):
            advance_together(own, [generation])
        assert generation.output == expected


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_greedy_tokens_equal_transformers_generate(kind: str, tmp_path: Path) -> None:
    theirs = random_reference(kind)
    theirs.save_pretrained(tmp_path)
    generation = Generation(6, 37, [4, 8, 15, 16, 23, 42, 1, 2, 3], [10, 10, 10])
    ids = torch.tensor([generation.tokens])
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    own = runner(load_model(tmp_path, "float32"))
    while len(generation.output) < 16:
        advance_together(own, [generation])
    assert generation.output == expected[0, 37:].tolist()


@pytest.mark.model
def test_real_greedy_tokens_equal_transformers_loaded_from_the_gguf(
    default_model: ModelFolder, reference_model: Any
) -> None:
    own = runner(load_model(default_model.path, "float32"), max_tokens=64)
    for text_ids in ([504, 2365, 6354, 16438, 27003], prompt(9, 45)):
        ids = torch.tensor([text_ids])
        expected = reference_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        top_two = torch.cat(expected.scores).topk(2).values
        assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-3
        generation = Generation(0, 0, list(range(20, 32)), [11, 16, 3])
        generation.tokens, generation.length = list(text_ids), len(text_ids)
        while len(generation.output) < 32:
            advance_together(own, [generation])
        assert generation.output == expected.sequences[0, len(text_ids) :].tolist()
