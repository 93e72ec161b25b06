"""What a checkpoint is: shapes and constants read from a folder in Hugging Face layout.

Owns the reading of ``config.json`` and ``generation_config.json`` and the refusal of what the
decoder cannot compute. Does not know weights beyond their identity; imports no torch.

Errors::

    KVFerryError
      ModelError
        UnsupportedModel   the checkpoint is whole, but asks for something we do not compute
        DamagedModel       a file is missing, truncated, or holds what it must not
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvferry.kv_cache.errors import KVFerryError

MANIFEST_FILE = "kvferry-manifest.json"
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")

_ARCHITECTURE_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SAMPLES_PER_TENSOR = 16
_SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 100_000_000


class ModelError(KVFerryError):
    """A model's files cannot be used; names the file."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something the decoder does not compute; names what is supported."""


class DamagedModel(ModelError):
    """A model file is missing, truncated or holds impossible values; names file and place."""


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
        manifest = _read_json(folder / MANIFEST_FILE, optional=True)
        generation = _read_json(folder / "generation_config.json", optional=True)
        return cls.from_dict(
            _read_json(folder / "config.json"),
            generation,
            name=str(manifest.get("name") or folder.resolve().name),
            revision=str(manifest.get("revision") or content_revision(folder)),
        )

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
        return cls(
            name=name,
            revision=revision,
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_positive(config, "head_dim", hidden_size // num_heads),
            ffn_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            max_model_len=max_model_len,
            rope_theta=_rope_theta(config, name, architecture),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            eos_token_ids=_eos_token_ids(config, generation or {}),
            bos_token_id=_optional_id(config, "bos_token_id"),
        )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end the output of the model in ``folder``, without reading the rest."""
    generation = _read_json(folder / "generation_config.json", optional=True)
    return _eos_token_ids(_read_json(folder / "config.json"), generation)


def content_revision(folder: Path) -> str:
    """Identity of a folder's content: ``sha256:`` and 32 hex digits.

    Covers ``config.json`` and, of every safetensors file, the name, the size, the header and
    evenly spaced samples of each tensor: two checkpoints whose tensors differ as a whole (another
    training run, a merged adapter) differ here, without reading gigabytes at every start. It is
    no proof against an edit of a few chosen bytes.
    """
    digest = hashlib.sha256()
    digest.update(_read_bytes(folder / "config.json"))
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        _sample_safetensors(file, digest.update)
    return f"sha256:{digest.hexdigest()[:32]}"


def _sample_safetensors(file: Path, update: Any) -> None:
    with file.open("rb") as handle:
        size = handle.read(8)
        length = struct.unpack("<Q", size)[0] if len(size) == 8 else 0
        if length > _MAX_HEADER_BYTES:
            raise DamagedModel(f"{file}: header of {length} bytes; not a safetensors file")
        header = handle.read(length)
        update(header)
        try:
            tensors = json.loads(header)
            spans = [t["data_offsets"] for n, t in tensors.items() if n != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedModel(f"{file}: unreadable safetensors header ({error})") from error
        for begin, end in spans:
            step = max((end - begin) // _SAMPLES_PER_TENSOR, _SAMPLE_BYTES)
            for offset in range(begin, end, step):
                handle.seek(8 + length + offset)
                update(handle.read(min(_SAMPLE_BYTES, end - offset)))


def _architecture(config: Mapping[str, Any], name: str) -> str:
    declared = config.get("architectures") or []
    found = declared[0] if isinstance(declared, list) and declared else None
    if found is None:
        found = _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), config.get("model_type"))
    if found not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(name, str(found), "this architecture")
    return str(found)


def _refuse_unsupported(
    config: Mapping[str, Any], name: str, architecture: str, num_layers: int, max_model_len: int
) -> None:
    act = config.get("hidden_act") or "silu"
    if act != "silu":
        raise _unsupported(name, architecture, f"hidden_act {act!r} (wanted 'silu')")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not (key == "attention_bias" and architecture.startswith("Qwen2")):
            raise _unsupported(name, architecture, f"{key} true (wanted false)")
    if config.get("quantization_config"):
        raise _unsupported(name, architecture, "quantization_config (wanted plain weights)")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = config["partial_rotary_factor"]
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
        used = any(kind != "full_attention" for kind in layer_types)
    else:
        first = config.get("max_window_layers", num_layers)
        used = bool(config.get("use_sliding_window")) and first < num_layers
    return int(config.get("sliding_window") or 0) if used else None


def _rope_theta(config: Mapping[str, Any], name: str, architecture: str) -> float:
    """The base: the old top-level key, or inside the newer ``rope_parameters``."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise DamagedModel(f"config.json: {key} is {section!r}, wanted an object")
        kind = section.get("rope_type", section.get("type", "default"))
        nested = any(isinstance(value, Mapping) for value in section.values())
        if kind != "default" or nested:
            found = "rope per layer type" if nested else f"{key} of type {kind!r}"
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
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise DamagedModel(f"eos_token_id is {found!r}, wanted an id or a list of ids")
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
        raise DamagedModel(f"config.json: {key} is {value!r}, wanted a positive integer")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise DamagedModel(f"config.json: {key} is {value!r}, wanted a positive number")
    return float(value)


def _optional_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not file.exists():
        return {}
    try:
        value = json.loads(_read_bytes(file))
    except ValueError as error:
        raise DamagedModel(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedModel(f"{file}: holds {type(value).__name__}, wanted a JSON object")
    return value


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DamagedModel(f"{file}: {error.strerror}; a model folder needs this file") from error
