"""What a checkpoint is: shapes and constants read from a folder in Hugging Face layout.

Owns the reading of ``config.json`` and ``generation_config.json`` and the refusal of what the
decoder cannot compute. Does not know weights (``identity`` samples them) and imports no torch.
Errors are those of ``errors``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvferry.engine.models.checkpoint import read_object, shown
from kvferry.engine.models.errors import DamagedModel, ModelError, UnsupportedModel
from kvferry.engine.models.identity import MANIFEST_FILE, identify

__all__ = [
    "MANIFEST_FILE",
    "SUPPORTED_ARCHITECTURES",
    "DamagedModel",
    "ModelConfig",
    "ModelError",
    "UnsupportedModel",
    "read_eos_token_ids",
]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")

_ARCHITECTURE_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
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
}
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_END_IDS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder.

    Attributes:
        name: the model's name, for people and for the handshake.
        revision: identity of the content; equal revisions may share KV blocks.
        architecture: Hugging Face class name, one of ``SUPPORTED_ARCHITECTURES``.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, vocab_size: shapes.
        max_model_len: positions the model was made for.
        rope_theta: base of the rotary embedding, unscaled, over the whole ``head_dim``.
        rms_norm_eps: added to the mean square in every norm.
        tie_word_embeddings: the head is the embedding matrix.
        qkv_bias: q, k and v projections have a bias (Qwen2); the output projection never does.
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
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
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
        architecture = _architecture(config, name)
        max_model_len = _positive(config, "max_position_embeddings")
        num_layers = _positive(config, "num_hidden_layers")
        _refuse_unsupported(config, name, architecture, num_layers, max_model_len)
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise DamagedModel(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise DamagedModel(
                f"config.json: no head_dim, and hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {num_heads}"
            )
        head_dim = _positive(config, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise DamagedModel(f"config.json: head_dim is {head_dim}, wanted an even number")
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
            rope_theta=_rope_theta(config, name, architecture),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            eos_token_ids=_eos_token_ids(config, generation or {}),
            bos_token_id=_optional_id(config, "bos_token_id"),
        )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end the output of the model in ``folder``, without reading the rest."""
    generation = read_object(folder / "generation_config.json", optional=True)
    return _eos_token_ids(read_object(folder / "config.json"), generation)


def _architecture(config: Mapping[str, Any], name: str) -> str:
    declared = config.get("architectures") or []
    found = declared[0] if isinstance(declared, list) and declared else None
    if found is None:
        found = _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), config.get("model_type"))
    if found not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(name, shown(found).strip("'"), "this architecture")
    return str(found)


def _refuse_unsupported(
    config: Mapping[str, Any], name: str, architecture: str, num_layers: int, max_model_len: int
) -> None:
    act = config.get("hidden_act") or "silu"
    if act != "silu":
        raise _unsupported(name, architecture, f"hidden_act {shown(act)} (wanted 'silu')")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not (key == "attention_bias" and architecture.startswith("Qwen2")):
            raise _unsupported(name, architecture, f"{key} true (wanted false)")
    if config.get("quantization_config"):
        raise _unsupported(name, architecture, "quantization_config (wanted plain weights)")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = shown(config["partial_rotary_factor"])
        raise _unsupported(name, architecture, f"partial_rotary_factor {factor} (wanted 1)")
    window = _window_in_use(config, num_layers)
    if window is not None and window < max_model_len:
        raise _unsupported(
            name,
            architecture,
            f"a sliding window of {window} positions (wanted full attention in every layer)",
        )


def _window_in_use(config: Mapping[str, Any], num_layers: int) -> int | None:
    """The sliding window in positions if some layer uses it, else None."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise DamagedModel(f"config.json: layer_types is {shown(layer_types)}, wanted a list")
        used = any(kind != "full_attention" for kind in layer_types)
    else:
        first = _count(config, "max_window_layers", num_layers)
        used = _flag(config, "use_sliding_window") and first < num_layers
    return _count(config, "sliding_window", 0) if used else None


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DamagedModel(f"config.json: {key} is {shown(value)}, wanted a count")
    return value


def _rope_theta(config: Mapping[str, Any], name: str, architecture: str) -> float:
    """The base: the old top-level key, or inside the newer ``rope_parameters``."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise DamagedModel(f"config.json: {key} is {shown(section)}, wanted an object")
        kind = section.get("rope_type", section.get("type", "default"))
        nested = any(isinstance(value, Mapping) for value in section.values())
        if kind != "default" or nested:
            found = "rope per layer type" if nested else f"{key} of type {shown(kind)}"
            raise _unsupported(name, architecture, f"{found} (wanted 'default', unscaled)")
        if section.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _unsupported(name, architecture, f"a partial rotary embedding in {key}")
        merged.update(section)
    if "rope_theta" in merged:
        return _number(merged, "rope_theta", 0.0)
    return _number(config, "rope_theta", 10000.0)


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


def _unsupported(name: str, architecture: str, found: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model {name!r} ({architecture}) uses {found}, which is not supported; supported "
        f"architectures: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


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
