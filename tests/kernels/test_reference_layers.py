from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kvferry.kernels import reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    theirs.weight = nn.Parameter(torch.randn(96).to(dtype))
    x = (torch.randn(17, 96) * 3).to(dtype)
    assert torch.equal(reference.rms_norm(x, theirs.weight, 1e-5), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_is_that_of_each_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8).to(dtype)
    heads = (torch.randn(5, 3, 8) * 3).to(dtype)
    found = reference.rms_norm(heads, weight, 1e-5)
    for head in range(3):
        assert torch.equal(found[:, head], reference.rms_norm(heads[:, head], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", [10000.0, 100000.0])
def test_rope_has_the_bits_of_transformers(dtype: torch.dtype, theta: float) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    x = torch.randn(5, 2, 64).to(dtype)
    positions = torch.tensor([0, 1, 77, 4095, 8191])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    heads_first = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    inv_freq = 1.0 / (theta ** (torch.arange(0, 64, 2).float() / 64))
    tables = reference.rope_tables(positions, inv_freq, 1.0, dtype)
    assert torch.equal(reference.rope(x, *tables), expected[0].transpose(0, 1))


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rope_rotates_each_pair_by_its_angle_and_stretches_it(factor: float) -> None:
    x = torch.zeros(1, 1, 8)
    x[0, 0, 1] = 1.0
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.03])
    tables = reference.rope_tables(torch.tensor([3]), inv_freq, factor, torch.float32)
    expected = torch.zeros(8)
    expected[1], expected[5] = factor * math.cos(0.9), factor * math.sin(0.9)
    assert torch.allclose(reference.rope(x, *tables)[0, 0], expected, atol=1e-6)


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    gate, up = torch.tensor([[-1.0, 2.0]]), torch.tensor([[3.0, -4.0]])
    expected = gate / (1 + (-gate).exp()) * up
    assert torch.allclose(reference.silu_mul(torch.cat((gate, up), dim=-1)), expected)
