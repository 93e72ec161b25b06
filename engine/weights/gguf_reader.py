"""A GGUF file seen as a Hugging Face checkpoint: configuration, chat template, named tensors.

Owns the translation of keys and tensor names, and undoes the permutation that GGUF applies to the
rows of Llama's q and k projections. Does not write files (``convert``) and does not build
tokenizers (``gguf_tokenizer``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.models.checkpoint import shown
from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.weights.gguf_file import GGUFFile, read_gguf
from kvferry.engine.weights.gguf_rope import FREQUENCIES_TENSOR, UntranslatableRope, rope_scaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Keys that change the result, with the values that do not.
_NEUTRAL = {"logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1)}
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(?P<index>[0-9]{1,6})\.(?P<part>[a-z_]+)")


class GGUFModel:
    """The checkpoint inside one GGUF file. Nothing is dequantised before it is asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.path = file.path
        self._architecture = self._text("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path}: is a {shown(self._architecture)}, which KVFerry does not run from "
                f"GGUF; it runs: {', '.join(_ARCHITECTURES)}"
            )
        named = [name for name in file.tensors if name != FREQUENCIES_TENSOR]
        self._gguf_names = {_hf_name(self.path, name): name for name in named}
        if len(self._gguf_names) != len(named):
            raise DamagedModel(f"{self.path}: two tensors have the same meaning")

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, if the file has one."""
        value = self.file.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        num_heads = self._int("attention.head_count")
        hidden_size = self._int("embedding_length")
        head_dim = self._int("attention.key_length", hidden_size // max(num_heads, 1))
        if self._int("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{self.path}: keys and values of different lengths")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self._int("feed_forward_length"),
            "num_hidden_layers": self._int("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._int("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": self.tensor_shape("model.embed_tokens.weight")[0],
            "max_position_embeddings": self._int("context_length"),
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._float("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._gguf_names,
            "dtype": "float32",
            "bos_token_id": self.token_id("bos"),
            "eos_token_id": self.token_id("eos"),
            "pad_token_id": self.token_id("padding"),
        }
        rotated = self._int("rope.dimension_count", head_dim)
        if rotated != head_dim:
            config["partial_rotary_factor"] = rotated / max(head_dim, 1)
        biases = {name.split(".")[-3] for name in self._gguf_names if name.endswith(".bias")}
        if "self_attn" in biases:
            config["attention_bias"] = True
        if "mlp" in biases:
            config["mlp_bias"] = True
        self._refuse_other_results(config["max_position_embeddings"])
        scaling = self._rope_scaling(config["max_position_embeddings"])
        if scaling is not None:
            config["rope_scaling"] = scaling
        return config

    def generation_config(self) -> dict[str, Any]:
        """The content of ``generation_config.json``: the ids that begin, end and pad."""
        ends = [self.token_id("eos"), self.token_id("eot")]
        return {
            "bos_token_id": self.token_id("bos"),
            "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
            "pad_token_id": self.token_id("padding"),
        }

    def token_id(self, role: str) -> int | None:
        """Id of the ``bos``, ``eos``, ``eot``, ``unknown`` or ``padding`` token, if any."""
        value = self.file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def tensor_names(self) -> list[str]:
        """Hugging Face names, in the order of the file."""
        return list(self._gguf_names)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor by its Hugging Face name, outermost dimension first."""
        if name not in self._gguf_names:
            raise DamagedModel(f"{self.path}: no tensor for {name!r}")
        return self.file.tensors[self._gguf_names[name]].shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor by its Hugging Face name as contiguous float32, rope permutation undone."""
        shape = self.tensor_shape(name)
        values = self.file.dequantised(self._gguf_names[name])
        num_heads = self._permuted_heads(name)
        if num_heads is not None:
            if num_heads <= 0 or shape[0] % (2 * num_heads):
                raise DamagedModel(
                    f"{self.path}: {name} has {shape[0]} rows, wanted a multiple of two per head "
                    f"for {num_heads} heads"
                )
            values = unpermute(values, num_heads)
        return np.ascontiguousarray(values.reshape(shape), dtype=np.float32)

    def _rope_scaling(self, context_length: int) -> dict[str, Any] | None:
        prefix = f"{self._architecture}.rope.scaling."
        scaling = {
            key.removeprefix(prefix): value
            for key, value in self.file.metadata.items()
            if key.startswith(prefix)
        }
        divisors = None
        if FREQUENCIES_TENSOR in self.file.tensors:
            divisors = self.file.dequantised(FREQUENCIES_TENSOR).ravel().tolist()
        try:
            return rope_scaling(scaling, context_length, divisors)
        except UntranslatableRope as error:
            raise UnsupportedModel(
                f"{self.path}: has {error}, which KVFerry does not run"
            ) from None

    def _refuse_other_results(self, context_length: int) -> None:
        """Raise UnsupportedModel for keys of variations that the architecture's name hides."""
        for key, neutral in _NEUTRAL.items():
            value = self.file.metadata.get(f"{self._architecture}.{key}", neutral[0])
            if value not in neutral:
                raise UnsupportedModel(f"{self.path}: has {key} {value}, wanted 1 or none")
        window = self._int("attention.sliding_window", 0)
        if 0 < window < context_length:
            raise UnsupportedModel(
                f"{self.path}: has a sliding window of {window} positions, wanted full attention; "
                "a safetensors folder says which layers it is for"
            )

    def _permuted_heads(self, name: str) -> int | None:
        """Heads of a projection whose rows GGUF permutes, else None."""
        if self._architecture == "llama" and ".self_attn.q_proj." in name:
            return self._int("attention.head_count")
        if self._architecture == "llama" and ".self_attn.k_proj." in name:
            return self._int("attention.head_count_kv", self._int("attention.head_count"))
        return None

    def _text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise DamagedModel(f"{self.path}: {key} is {shown(value)}, wanted a string")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise DamagedModel(f"{self.path}: {key} is {shown(value)}, wanted an integer")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, float):
            raise DamagedModel(f"{self.path}: {key} is {shown(value)}, wanted a number")
        return value


def open_gguf(path: str | Path) -> GGUFModel:
    """Open a GGUF file as a checkpoint. Raises DamagedModel or UnsupportedModel."""
    return GGUFModel(read_gguf(Path(path)))


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of the rows of q and k.

    GGUF keeps the two elements that a rotary frequency turns side by side, Hugging Face half a
    head apart: ``[heads, half, 2, …] -> [heads, 2, half, …]``.
    """
    half = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _hf_name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = _LAYER_TENSOR.fullmatch(stem)
    if kind in ("weight", "bias") and stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    if kind in ("weight", "bias") and layer and layer["part"] in _LAYER_NAMES:
        return f"model.layers.{int(layer['index'])}.{_LAYER_NAMES[layer['part']]}.{kind}"
    raise UnsupportedModel(
        f"{path}: tensor {name!r} belongs to something that KVFerry does not run (experts, rope "
        "that changes with the length, or another architecture)"
    )
