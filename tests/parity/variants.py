"""One small model with random weights for everything the decoder can be configured to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

VOCAB_SIZE = 97
MAX_MODEL_LEN = 256
TRAINED_LEN = 64  # what scaled rope was made for; prompts are longer
HEAD_DIM = 8  # of the shape below
WINDOW = 21  # no multiple of a block, shorter than the prompts

Family = Literal["Llama", "Mistral", "Qwen2", "Qwen3"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the parity table: a family of transformers and what its configuration changes."""

    title: str
    family: Family
    changes: Mapping[str, Any]


_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(kind: str, **section: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **section}}


_DIVISORS = [1.0 + 0.7 * pair for pair in range(HEAD_DIM // 2)]
_YARN = {"factor": 4.0, "original_max_position_embeddings": TRAINED_LEN}
_EVERY_SECOND = ["full_attention", "sliding_attention", "full_attention"]

VARIANTS: Mapping[str, Variant] = {
    "llama": Variant("Llama, GQA", "Llama", {}),
    "llama-mha": Variant("Llama, MHA (as Llama 2)", "Llama", {"num_key_value_heads": 6}),
    "llama-tied": Variant(
        "Llama, tied head, head_dim ≠ hidden/heads",
        "Llama",
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama-biases": Variant(
        "Llama, attention and MLP biases", "Llama", {"attention_bias": True, "mlp_bias": True}
    ),
    "rope-linear": Variant("Llama, rope linear", "Llama", _rope("linear", factor=3.0)),
    "rope-dynamic": Variant("Llama, rope dynamic", "Llama", _rope("dynamic", factor=4.0)),
    "rope-llama3": Variant(
        "Llama, rope llama3 (as Llama 3.1)",
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=TRAINED_LEN,
        ),
    ),
    "rope-yarn": Variant("Llama, rope yarn", "Llama", _rope("yarn", **_YARN)),
    "rope-yarn-mscale": Variant(
        "Llama, rope yarn, mscale, not truncated",
        "Llama",
        _rope(
            "yarn",
            **_YARN,
            mscale=1.2,
            mscale_all_dim=0.7,
            beta_fast=16,
            beta_slow=2,
            truncate=False,
        ),
    ),
    "rope-longrope": Variant(
        "Llama, rope longrope, one set of factors",
        "Llama",
        _rope("longrope", **_YARN, short_factor=_DIVISORS, long_factor=_DIVISORS),
    ),
    "mistral": Variant("Mistral", "Mistral", {"sliding_window": None}),
    "mistral-window": Variant(
        "Mistral, sliding window in every layer", "Mistral", {"sliding_window": WINDOW}
    ),
    "qwen2": Variant("Qwen2", "Qwen2", {}),
    "qwen2-windows": Variant(
        "Qwen2, sliding window in every second layer",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _EVERY_SECOND},
    ),
    "qwen3": Variant("Qwen3, head_dim ≠ hidden/heads", "Qwen3", {"head_dim": 16}),
    "qwen3-tied": Variant(
        "Qwen3, tied head, attention biases",
        "Qwen3",
        {"head_dim": HEAD_DIM, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def random_reference(kind: str) -> Any:
    """The transformers model of a variant, eager, random in weights, biases and norms alike."""
    variant = VARIANTS[kind]
    config = getattr(transformers, f"{variant.family}Config")(
        **{**_SHAPE, **variant.changes}, attn_implementation="eager"
    )
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{variant.family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.eval()
