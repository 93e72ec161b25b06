from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.models.identity import content_revision
from kvferry.engine.models.refusals import SUPPORTED_ARCHITECTURES
from kvferry.engine.models.rope import Rope

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
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": None, "model_type": "qwen3"}
SLIDING, FULL = "sliding_attention", "full_attention"


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
        rope=Rope(12345.0),
        layer_windows=(None, None, None),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_each_architecture_has_its_biases_and_norms() -> None:
    def parts(config: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        found = read(config)
        return found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm

    assert parts(LLAMA) == parts(MISTRAL) == (False, False, False, False)
    assert parts(LLAMA | {"attention_bias": True}) == (True, True, False, False)
    assert parts(LLAMA | {"mlp_bias": True}) == (False, False, True, False)
    assert parts(QWEN2) == parts(QWEN2 | {"attention_bias": True}) == (True, False, False, False)
    assert parts(QWEN3) == (False, False, False, True)
    assert parts(QWEN3 | {"attention_bias": True}) == (True, True, False, True)


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    assert read(LLAMA | {"head_dim": 32}).head_dim == 32
    assert read(QWEN3).head_dim == Qwen3Config().head_dim


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
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
    assert found.rope == Rope(77777.0)
    assert (found.num_heads, found.num_kv_heads) == (6, 3)
    assert found.head_dim == (128 if kind is Qwen3Config else 8)
    assert found.layer_windows == (None, None)  # a window of 4096 hides none of 512 positions
    assert (found.qkv_bias, found.qk_norm) == (kind is Qwen2Config, kind is Qwen3Config)
    assert found.name == tmp_path.name


def test_generation_config_decides_the_end_tokens() -> None:
    assert read(LLAMA, {"eos_token_id": [7, 9, 7]}).eos_token_ids == (7, 9)
    assert read(LLAMA, {}).eos_token_ids == (2,)
    assert read(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_an_unknown_architecture_is_named_with_those_that_run() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(LLAMA | {"architectures": ["GPT2LMHeadModel"]})
    assert str(caught.value) == (
        "model 'm' is a GPT2LMHeadModel, which KVFerry does not run; it runs: LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )
    with pytest.raises(UnsupportedModel, match="'m' is of no architecture that it names"):
        read({})
    with pytest.raises(UnsupportedModel, match="'m' is a mamba, which"):
        read({"model_type": "mamba"})


def longrope(**changes: Any) -> dict[str, Any]:
    section = {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **changes}
    return {"rope_scaling": {"type": "longrope", **section}}


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA, {"rope_scaling": {"type": "su", "factor": 4.0}}, "'su'"),
        (LLAMA, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "'mrope'"),
        (LLAMA, longrope(original_max_position_embeddings=64), "short and long factors differ"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts 8"),
        (QWEN3, {"num_experts": 128}, "num_experts 128"),
        (LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank 512"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (LLAMA, {"residual_multiplier": 0.22}, "residual_multiplier 0.22"),
        (LLAMA, {"embedding_multiplier": 12}, "embedding_multiplier 12"),
        (LLAMA, {"logits_scaling": 8}, "logits_scaling 8"),
        (LLAMA, {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"mlp_bias": True}, "mlp_bias"),
        (QWEN2, {"mlp_bias": True}, "mlp_bias"),
        (QWEN3, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 32}, "window of 32"),
        (LLAMA, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "32"),
        (QWEN2, {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 32}, "not enable"),
        (QWEN2, {"layer_types": [FULL, "chunked_attention", FULL]}, "chunked_attention"),
        (MISTRAL, {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 32}, "that differ"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        read(base | change)
    message = str(caught.value)
    assert message.startswith(f"model 'm' is a {read(base).architecture} with ")
    for supported in SUPPORTED_ARCHITECTURES:
        assert supported in message


@pytest.mark.parametrize(
    "change",
    [
        {"residual_multiplier": 1.0, "logits_scaling": 1, "attn_logit_softcapping": None},
        {"quantization_config": None, "num_local_experts": 0, "partial_rotary_factor": 1.0},
        {"torch_dtype": "bfloat16", "use_cache": True, "pretraining_tp": 1},
        longrope(original_max_position_embeddings=256),  # the long factors are never reached
    ],
)
def test_keys_that_change_nothing_are_accepted(change: dict[str, Any]) -> None:
    assert read(LLAMA | change).num_layers == 3


W = {"use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (None, None, None)),
        (MISTRAL | {"sliding_window": 32}, (32, 32, 32)),
        (MISTRAL | {"sliding_window": 256}, (None, None, None)),
        (MISTRAL | {"sliding_window": 255}, (255, 255, 255)),
        (QWEN2 | W, (None, None, None)),  # the first 28 layers are full
        (QWEN2 | W | {"max_window_layers": 1}, (None, 32, 32)),
        (QWEN3 | W | {"max_window_layers": 3}, (None, None, None)),
        (QWEN3 | W | {"layer_types": [SLIDING, FULL, SLIDING]}, (32, None, 32)),
        (QWEN3 | W | {"layer_types": [FULL] * 3}, (None, None, None)),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, None),
        (QWEN2 | W | {"sliding_window": 256, "max_window_layers": 1}, None),
        (LLAMA | {"layer_types": [FULL] * 3, "sliding_window": 32}, None),
        (QWEN3 | {"sliding_window": None, "max_window_layers": None}, None),
    ],
)
def test_each_layer_has_the_window_that_transformers_gives_it(
    config: dict[str, Any], windows: tuple[int | None, ...] | None
) -> None:
    assert read(config).layer_windows == (windows or (None, None, None))


def test_a_mistral_that_names_no_window_has_the_default_of_transformers() -> None:
    silent = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    found = read(silent | {"max_position_embeddings": 8192}).layer_windows
    assert found == (MistralConfig().sliding_window,) * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "32"}, "sliding_window"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": FULL}, "layer_types"),
        ({"max_window_layers": "1", **W}, "max_window_layers"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
    ],
)
def test_an_impossible_window_or_head_is_named(change: dict[str, Any], named: str) -> None:
    base = MISTRAL if named == "sliding_window" else QWEN2
    with pytest.raises(DamagedModel, match=named):
        read(base | change)


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
