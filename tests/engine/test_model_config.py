from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2Config

from kvferry.engine.models.config import (
    SUPPORTED_ARCHITECTURES,
    DamagedModel,
    ModelConfig,
    UnsupportedModel,
)
from kvferry.engine.models.identity import content_revision

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12345.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_dict(config, generation, name="m", revision="r")


def test_shapes_and_constants_are_read() -> None:
    assert read(LLAMA) == ModelConfig(
        name="m",
        revision="r",
        architecture="LlamaForCausalLM",
        num_layers=3,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=96,
        vocab_size=320,
        max_model_len=256,
        rope_theta=12345.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_qwen2_is_llama_with_bias() -> None:
    qwen = read(QWEN2)
    assert qwen.qkv_bias
    assert qwen.architecture == "Qwen2ForCausalLM"


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    assert read(LLAMA | {"head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_theta_inside_the_newer_section_wins(key: str) -> None:
    config = LLAMA | {key: {"rope_type": "default", "rope_theta": 100000.0}}
    assert read(config).rope_theta == 100000.0
    del config["rope_theta"]
    assert read(config).rope_theta == 100000.0


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_what_transformers_saves_is_read_back(kind: Any, tmp_path: Path) -> None:
    kind(
        num_hidden_layers=2,
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=80,
        vocab_size=100,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 77777.0},
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
    ).save_pretrained(tmp_path)
    found = ModelConfig.from_folder(tmp_path)
    assert found.rope_theta == 77777.0
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 3, 8)
    assert found.qkv_bias == (kind is Qwen2Config)
    assert found.name == tmp_path.name


def test_generation_config_decides_the_end_tokens() -> None:
    assert read(LLAMA, {"eos_token_id": [7, 9, 7]}).eos_token_ids == (7, 9)
    assert read(LLAMA, {}).eos_token_ids == (2,)
    assert read(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_an_unknown_architecture_is_named_with_those_supported() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(LLAMA | {"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in str(caught.value)
    for supported in SUPPORTED_ARCHITECTURES:
        assert supported in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, "32"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "32"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(LLAMA | change)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 1},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 32},
    ],
)
def test_a_window_that_no_position_feels_is_accepted(change: dict[str, Any]) -> None:
    assert read(QWEN2 | change).max_model_len == 256


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", 1.5, True])
def test_an_impossible_value_is_named(key: str, value: object) -> None:
    with pytest.raises(DamagedModel, match=key):
        read(LLAMA | {key: value})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(DamagedModel, match="3"):
        read(LLAMA | {"num_key_value_heads": 3})


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_a_missing_or_malformed_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DamagedModel, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def folder_with(path: Path, last: float = 0.0, config: dict[str, Any] = LLAMA) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = {"a": torch.zeros(4096), "b": torch.full((3, 5), last)}
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_revision_follows_the_content_not_the_place(tmp_path: Path) -> None:
    first = content_revision(folder_with(tmp_path / "one"))
    assert content_revision(folder_with(tmp_path / "two")) == first
    assert content_revision(folder_with(tmp_path / "three", last=1.0)) != first
    other = LLAMA | {"rope_theta": 5.0}
    assert content_revision(folder_with(tmp_path / "four", config=other)) != first


def test_a_truncated_shard_header_is_a_typed_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DamagedModel, match=r"model\.safetensors"):
        content_revision(folder)


def test_the_front_door_modules_load_no_torch() -> None:
    modules = "models.config", "weights.store", "tokenizer", "detokenizer", "chat"
    imports = "; ".join(f"import kvferry.engine.{module}" for module in modules)
    check = f"{imports}; import sys; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
