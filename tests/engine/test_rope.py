from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.models.frequencies import inverse_frequencies
from kvferry.engine.models.rope import Rope, read_rope

MAX_LEN = 4096


def read(config: dict[str, Any], head_dim: int = 16, max_len: int = MAX_LEN) -> Rope:
    return read_rope(config, "m", "LlamaForCausalLM", head_dim, max_len)


def theirs(section: dict[str, Any], head_dim: int) -> Any:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_LEN,
        rope_parameters=dict(section),
    )
    return LlamaRotaryEmbedding(config)


factors = st.floats(1.0, 64.0)
optional = st.one_of(st.none(), st.floats(0.1, 4.0))
originals = st.integers(32, MAX_LEN)


@st.composite
def sections(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A ``rope_parameters`` of any kind that runs, with a head size."""
    head_dim = 2 * draw(st.sampled_from([2, 3, 4, 16, 32, 64]))
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]))
    section: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(100.0, 1e7))}
    if kind != "default":
        section["factor"] = draw(factors)
    if kind in ("llama3", "yarn", "longrope"):
        section["original_max_position_embeddings"] = draw(originals)
    if kind == "llama3":
        section["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        section["high_freq_factor"] = draw(st.floats(3.0, 9.0))
    if kind == "yarn":
        names = ("mscale", "mscale_all_dim", "attention_factor")
        section |= {name: draw(optional) for name in names}
        section["beta_fast"] = draw(st.one_of(st.none(), st.floats(8.0, 64.0)))
        section["beta_slow"] = draw(st.one_of(st.none(), st.floats(0.5, 4.0)))
        section["truncate"] = draw(st.booleans())
    if kind == "longrope":
        divisors = draw(
            st.lists(st.floats(1.0, 60.0), min_size=head_dim // 2, max_size=head_dim // 2)
        )
        section |= {"short_factor": divisors, "long_factor": divisors}
        section["attention_factor"] = draw(optional)
    return section, head_dim


@settings(max_examples=150)
@given(sections())
def test_frequencies_and_attention_factor_equal_those_of_transformers(
    case: tuple[dict[str, Any], int],
) -> None:
    section, head_dim = case
    rope = read({"rope_parameters": section}, head_dim)
    found, expected = inverse_frequencies(rope, head_dim), theirs(section, head_dim)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected.inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)


@settings(max_examples=50)
@given(sections())
def test_the_older_form_says_the_same(case: tuple[dict[str, Any], int]) -> None:
    section, head_dim = case
    old = {key: value for key, value in section.items() if key not in ("rope_theta", "rope_type")}
    old["type"] = section["rope_type"]
    config = {"rope_theta": section["rope_theta"], "rope_scaling": old}
    assert read(config, head_dim) == read({"rope_parameters": section}, head_dim)


def test_dynamic_keeps_the_plain_frequencies_up_to_the_length_of_the_model() -> None:
    section = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    found = inverse_frequencies(read({"rope_parameters": section}), 16)
    reference = theirs(section, 16)
    reference(torch.zeros(1), torch.tensor([[MAX_LEN - 1]]))
    assert torch.allclose(found, reference.inv_freq, rtol=1e-6)
    reference(torch.zeros(1), torch.tensor([[MAX_LEN]]))  # one more, and they differ
    assert not torch.allclose(found, reference.inv_freq, rtol=1e-6)


def test_theta_inside_the_section_wins_and_the_older_section_wins() -> None:
    inner, outer = {"rope_type": "default", "rope_theta": 3e4}, {"rope_theta": 2e4}
    assert read({**outer, "rope_parameters": inner}) == Rope(3e4)
    assert read({**outer, "rope_scaling": inner}) == Rope(3e4)
    assert read({**outer, "rope_scaling": None}) == Rope(2e4)
    assert read({}) == Rope(1e4)
    linear = {"type": "linear", "factor": 2.0}
    assert read({**outer, "rope_scaling": linear, "rope_parameters": inner}).kind == "linear"


def test_the_original_length_is_the_outer_one_then_the_inner_one_then_that_of_the_model() -> None:
    inner = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    outer = {"original_max_position_embeddings": 1024}
    assert read({"rope_scaling": inner, **outer}).original_len == 1024
    assert read({"rope_scaling": inner}).original_len == 512
    del inner["original_max_position_embeddings"]
    assert read({"rope_scaling": inner}).original_len == MAX_LEN


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0.0}, "factor"),
        ({"type": "linear", "factor": True}, "factor"),
        ({"type": "linear", "factor": float("inf")}, "factor"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor",
        ),
        ({"type": "yarn", "original_max_position_embeddings": "64"}, "original_max_position"),
        ({"type": "yarn", "original_max_position_embeddings": 1}, "original_max_position"),
        ({"type": "yarn", "rope_theta": 1.0}, "rope_theta"),
        ({"type": "yarn", "beta_fast": -1}, "beta_fast"),
        ({"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8}, "long_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 7, "long_factor": []}, "7 numbers, wanted 8"),
        ({"type": "longrope", "short_factor": [0.0] * 8, "long_factor": []}, "short_factor"),
        ("yarn", "rope_scaling"),
    ],
)
def test_an_impossible_value_is_named(section: object, named: str) -> None:
    with pytest.raises(DamagedModel, match=named):
        read({"rope_scaling": section})
