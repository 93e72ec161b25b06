"""What the decoder runs, and what it refuses to run wrongly.

A key that is not listed here and not read by ``config`` or ``rope`` is taken to change nothing, as
``transformers`` takes it; ``tensors`` refuses weights that nothing would read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.errors import UnsupportedModel

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_ATTENTION_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM")  # the key is read; covers q, k, v, o

# Keys that change the result, with the values that do not; null never does.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleave": (False,),
    "alibi": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "num_experts_per_tok": (0,),
    "kv_lora_rank": (0,),
    "q_lora_rank": (0,),
    "attention_chunk_size": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": (0,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "qk_layernorm": (False,),
}


def runs() -> str:
    """The architectures that run, for people."""
    return ", ".join(SUPPORTED_ARCHITECTURES)


def architecture_of(config: Mapping[str, Any], name: str) -> str:
    """The Hugging Face class of the decoder. Raises UnsupportedModel."""
    declared = config.get("architectures") or []
    found = declared[0] if isinstance(declared, list) and declared else None
    if found is None:
        found = _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), config.get("model_type"))
    if found not in SUPPORTED_ARCHITECTURES:
        kind = f"a {shown(found).strip(chr(39))}" if found else "of no architecture that it names"
        raise UnsupportedModel(
            f"model {name!r} is {kind}, which KVFerry does not run; it runs: {runs()}"
        )
    return str(found)


def unsupported(name: str, architecture: str, found: str) -> UnsupportedModel:
    """The error for a known architecture with ``found``, which no part of the decoder computes."""
    return UnsupportedModel(
        f"model {name!r} is a {architecture} with {found}, which KVFerry does not compute; it "
        f"runs, without this: {runs()}"
    )


def refuse_unsupported(config: Mapping[str, Any], name: str, architecture: str) -> None:
    """Raise UnsupportedModel for the first key whose value asks for another computation."""
    for key, neutral in _NEUTRAL_VALUES.items():
        value = config.get(key)
        if value is not None and value not in neutral and value not in ({}, ""):
            wanted = " or ".join(repr(v) for v in neutral) or "none"
            raise unsupported(name, architecture, f"{key} {shown(value)} (wanted {wanted})")
    if config.get("attention_bias") and architecture == "MistralForCausalLM":
        raise unsupported(name, architecture, "attention_bias true (wanted false)")
    if config.get("mlp_bias") and architecture != "LlamaForCausalLM":
        raise unsupported(name, architecture, "mlp_bias true (wanted false)")


def has_attention_bias(config: Mapping[str, Any], architecture: str) -> bool:
    """All four projections of attention have a bias."""
    return architecture in _ATTENTION_BIAS and bool(config.get("attention_bias"))
