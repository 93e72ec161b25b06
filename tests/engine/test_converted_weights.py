from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.weights.reader import open_weights
from kvferry.engine.weights.store import ModelFolder

pytestmark = pytest.mark.model


def test_converted_tensors_equal_those_that_transformers_reads_bit_for_bit(
    default_model: ModelFolder, reference_model: Any
) -> None:
    wanted = dict(reference_model.named_parameters())
    with open_weights(default_model.path) as weights:
        assert weights.names() == sorted(wanted)
        for name, values in wanted.items():
            found = weights.tensor(name)
            assert found.dtype == values.dtype == torch.float32
            assert torch.equal(found.view(torch.int32), values.view(torch.int32)), name


def test_the_converted_configuration_equals_that_of_transformers(
    default_model: ModelFolder, reference_model: Any
) -> None:
    ours, theirs = ModelConfig.from_folder(default_model.path), reference_model.config
    assert ours.name == "smollm2-135m-instruct"
    assert ours.architecture == type(reference_model).__name__
    assert ours.num_layers == theirs.num_hidden_layers == 30
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.ffn_size == theirs.intermediate_size
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] == 100000.0
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
