"""From a checkpoint to a model: names, shapes, fusing, dtype; and the KV layout that it needs.

Owns the names that a Hugging Face checkpoint gives to tensors. Does not know where a checkpoint
comes from (``engine.weights``) or how the model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from kvferry.engine.models.config import ModelConfig, ModelError
from kvferry.engine.models.llama import LayerWeights, LlamaModel, LlamaWeights
from kvferry.engine.weights.reader import open_weights
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup

ModelDtype = Literal["float32", "bfloat16"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TensorSource = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Gives the tensor of a name, in the shape wanted."""

_VECTOR_STD = 0.2  # of random norms and biases; matrices have 1 / sqrt(inputs)


class MisshapedTensor(ModelError):
    """A tensor's shape is not what the configuration says; names the tensor and both shapes."""


def load_model(folder: Path, dtype: ModelDtype) -> LlamaModel:
    """Load a folder in Hugging Face layout and fuse its weights.

    Fused matrices are copies; the others stay views of the mapped file where the dtype agrees.

    Raises ModelError: UnsupportedModel, DamagedModel, MissingTensor, or MisshapedTensor.
    """
    config = ModelConfig.from_folder(folder)
    wanted_dtype = TORCH_DTYPES[dtype]
    with open_weights(folder) as reader:

        def stored(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if reader.shape(name) != shape:
                raise MisshapedTensor(
                    f"tensor {name!r} has shape {list(reader.shape(name))}, wanted {list(shape)} "
                    f"by the configuration of model {config.name!r}; the two do not belong together"
                )
            return reader.tensor(name).to(wanted_dtype)

        return LlamaModel(config, _assemble(config, stored))


def random_model(config: ModelConfig, seed: int, dtype: ModelDtype) -> LlamaModel:
    """A model of normally distributed weights, a function of ``config`` and ``seed``; for tests."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        values *= shape[-1] ** -0.5 if len(shape) == 2 else _VECTOR_STD
        return (values + 1.0 if "norm" in name else values).to(TORCH_DTYPES[dtype])

    return LlamaModel(config, _assemble(config, drawn))


def kv_layout(config: ModelConfig, block_size: int, kv_dtype: str) -> KVCacheLayout:
    """The layout of a pool for ``config``: one group with every layer, one rank.

    Args:
        config: the model.
        block_size: positions per block.
        kv_dtype: element type, a key of ``kv_cache.layout.DTYPE_BYTES``.
    """
    group = KVGroup(
        first_layer=0,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
    )
    return KVCacheLayout(block_size=block_size, groups=(group,))


def _assemble(config: ModelConfig, source: TensorSource) -> LlamaWeights:
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = source("model.embed_tokens.weight", vocabulary)
    tied = config.tie_word_embeddings
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_layer(config, index, source) for index in range(config.num_layers)),
        final_norm=source("model.norm.weight", (config.hidden_size,)),
        head=embedding if tied else source("lm_head.weight", vocabulary),
    )


def _layer(config: ModelConfig, index: int, source: TensorSource) -> LayerWeights:
    prefix = f"model.layers.{index}"
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    bias = None
    if config.qkv_bias:
        bias = torch.cat(
            [source(f"{prefix}.self_attn.{n}_proj.bias", (size,)) for n, size in sizes.items()]
        )
    return LayerWeights(
        input_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=torch.cat(
            [
                source(f"{prefix}.self_attn.{name}_proj.weight", (size, hidden))
                for name, size in sizes.items()
            ]
        ),
        qkv_bias=bias,
        output=source(f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)),
        post_attention_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=torch.cat(
            [source(f"{prefix}.mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up")]
        ),
        down=source(f"{prefix}.mlp.down_proj.weight", (hidden, ffn)),
    )
