"""What a checkpoint is: shapes and constants read from a folder in Hugging Face layout.

Owns the reading of ``config.json`` and ``generation_config.json``; ``refusals`` says what the
decoder cannot compute, ``rope`` reads the rotary embedding. Does not know weights beyond their
identity; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvferry.engine.models.checkpoint import read_object, shown
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.models.identity import identify
from kvferry.engine.models.refusals import (
    architecture_of,
    has_attention_bias,
    refuse_unsupported,
    unsupported,
)
from kvferry.engine.models.rope import Rope, read_rope

# The most that a shape may be: several times the largest model known, so that a wrong number is
# refused here and not by the allocation that it would cause.
_LIMITS = {
    "num_hidden_layers": 4096,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_END_IDS = 1024

# What transformers assumes where a configuration is silent.
_QWEN3_HEAD_DIM = 128
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder.

    Attributes:
        name: the model's name, for people and for the handshake.
        revision: identity of the content; equal revisions may share KV blocks.
        architecture: Hugging Face class name, one of ``SUPPORTED_ARCHITECTURES``.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, vocab_size: shapes.
        max_model_len: positions the model was made for.
        rope: the rotary embedding, over the whole ``head_dim``.
        layer_windows: per layer, how many positions a query sees, its own included; None for all.
        rms_norm_eps: added to the mean square in every norm.
        tie_word_embeddings: the head is the embedding matrix.
        qkv_bias: the q, k and v projections have a bias.
        output_bias: attention's output projection has a bias.
        mlp_bias: the three projections of the feed-forward half have a bias.
        qk_norm: queries and keys are normalised per head before they are rotated (Qwen3).
        eos_token_ids: ids that end the output.
        bos_token_id: id that begins a document, if any; nothing here prepends it.
    """

    name: str
    revision: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_model_len: int
    rope: Rope
    layer_windows: tuple[int | None, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read a folder in Hugging Face layout.

        Raises UnsupportedModel for what the decoder cannot compute, DamagedModel for files that
        are missing or malformed.
        """
        folder = Path(path)
        generation = read_object(folder / "generation_config.json", optional=True)
        config = read_object(folder / "config.json")
        identity = identify(folder)
        return cls.from_dict(config, generation, name=identity.name, revision=identity.revision)

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        name: str,
        revision: str,
    ) -> Self:
        """Read the dictionaries of ``config.json`` and ``generation_config.json``."""
        architecture = architecture_of(config, name)
        refuse_unsupported(config, name, architecture)
        max_model_len = _positive(config, "max_position_embeddings")
        num_layers = _positive(config, "num_hidden_layers")
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise DamagedModel(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = _head_dim(config, architecture, num_heads)
        attention_bias = has_attention_bias(config, architecture)
        return cls(
            name=name,
            revision=revision,
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            max_model_len=max_model_len,
            rope=read_rope(config, name, architecture, head_dim, max_model_len),
            layer_windows=_layer_windows(config, name, architecture, num_layers, max_model_len),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=_flag(config, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_token_ids=_eos_token_ids(config, generation or {}),
            bos_token_id=_optional_id(config, "bos_token_id"),
        )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end the output of the model in ``folder``, without reading the rest."""
    generation = read_object(folder / "generation_config.json", optional=True)
    return _eos_token_ids(read_object(folder / "config.json"), generation)


def _head_dim(config: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    """As configured; else what transformers assumes: 128 for Qwen3, a share for the others."""
    if architecture == "Qwen3ForCausalLM":
        share = _QWEN3_HEAD_DIM
    else:
        hidden_size = _positive(config, "hidden_size")
        share = hidden_size // num_heads
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise DamagedModel(
                f"config.json: no head_dim, and hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {num_heads}"
            )
    head_dim = _positive(config, "head_dim", share)
    if head_dim % 2:
        raise DamagedModel(f"config.json: head_dim is {head_dim}, wanted an even number")
    return head_dim


def _layer_windows(
    config: Mapping[str, Any], name: str, architecture: str, num_layers: int, max_model_len: int
) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it would hide no position."""
    enabled = config.get("sliding_window", _DEFAULT_WINDOW) is not None
    if architecture != "MistralForCausalLM":
        enabled = enabled and _flag(config, "use_sliding_window")
    slides = _sliding_layers(config, name, architecture, num_layers, enabled)
    if not any(slides):
        return (None,) * num_layers
    window = _positive(config, "sliding_window", _DEFAULT_WINDOW)
    if window >= max_model_len:
        return (None,) * num_layers
    if architecture == "LlamaForCausalLM" or not enabled:
        found = f"a sliding window of {window} positions that its configuration does not enable"
        raise unsupported(name, architecture, f"{found} (wanted full attention)")
    return tuple(window if slide else None for slide in slides)


def _sliding_layers(
    config: Mapping[str, Any], name: str, architecture: str, num_layers: int, enabled: bool
) -> list[bool]:
    """Which layers slide: ``layer_types`` where it is given, else all behind the first few."""
    types = config.get("layer_types")
    if types is None:
        if architecture == "MistralForCausalLM" or not enabled:
            return [enabled] * num_layers
        first = config.get("max_window_layers", _DEFAULT_FULL_LAYERS)
        if not isinstance(first, int) or isinstance(first, bool):
            raise DamagedModel(
                f"config.json: max_window_layers is {shown(first)}, wanted an integer"
            )
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise DamagedModel(f"config.json: layer_types is {shown(types)}, wanted {num_layers} names")
    other = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if other or (architecture == "MistralForCausalLM" and len(set(types)) > 1):
        found = other[0] if other else "that differ"
        raise unsupported(name, architecture, f"layer_types {shown(found)}")
    if architecture == "MistralForCausalLM":
        return [enabled] * num_layers
    return [kind == "sliding_attention" for kind in types]


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """``generation_config.json`` decides, as it does for ``generate``; else ``config.json``."""
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if len(ids) > _MAX_END_IDS or not all(map(_is_id, ids)):
        raise DamagedModel(f"eos_token_id is {shown(found)}, wanted an id or a list of ids")
    return tuple(dict.fromkeys(ids))


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted a positive integer")
    if value > _LIMITS[key]:
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted at most {_LIMITS[key]}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        value = default
    right = isinstance(value, int | float) and not isinstance(value, bool)
    # An int is compared before it is converted: one of a thousand digits is no float.
    if not right or not 0 < value < 1e30 or not math.isfinite(value):
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted true or false")
    return bool(value)


def _optional_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if not _is_id(value):
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted an id")
    return int(value)


def _is_id(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value <= _MAX_TOKEN_ID  # type: ignore[operator]
