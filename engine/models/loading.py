"""From a checkpoint to a model: shapes, fusing, dtype; and the KV layout that it needs.

Does not know where a checkpoint comes from (``engine.weights``), which tensors it should hold
(``tensors``) or how the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import ModelError
from kvferry.engine.models.llama import Kernels, LayerWeights, LlamaModel, LlamaWeights
from kvferry.engine.models.tensors import EMBEDDING, FINAL_NORM, HEAD, check_names, tensor_shapes
from kvferry.engine.weights.reader import open_weights
from kvferry.kernels import reference
from kvferry.kv_cache.layout import KVCacheLayout, KVGroup

ModelDtype = Literal["float32", "bfloat16"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TensorSource = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Gives the tensor of a name, in the shape wanted."""

_VECTOR_STD = 0.2  # of random norms and biases; matrices have 1 / sqrt(inputs)


class MisshapedTensor(ModelError):
    """A tensor's shape is not what the configuration says; names the tensor and both shapes."""


def load_model(folder: Path, dtype: ModelDtype, kernels: Kernels = reference) -> LlamaModel:
    """Load a folder in Hugging Face layout and fuse its weights.

    Fused matrices are copies; the others stay views of the mapped file where the dtype agrees. A
    stored head that differs from the embedding is used even where the configuration ties them, as
    transformers does.

    Raises ModelError: UnsupportedModel, DamagedModel, MissingTensor, or MisshapedTensor.
    """
    config = ModelConfig.from_folder(folder)
    wanted_dtype = TORCH_DTYPES[dtype]
    with open_weights(folder) as reader:
        check_names(config, reader.names())
        if config.tie_word_embeddings and HEAD in reader:
            same = torch.equal(reader.tensor(HEAD), reader.tensor(EMBEDDING))
            config = replace(config, tie_word_embeddings=same)

        def stored(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if reader.shape(name) != shape:
                raise MisshapedTensor(
                    f"tensor {name!r} has shape {list(reader.shape(name))}, wanted {list(shape)} "
                    f"by the configuration of model {config.name!r}; the two do not belong together"
                )
            return reader.tensor(name).to(wanted_dtype)

        return LlamaModel(config, _assemble(config, stored), kernels)


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
    shapes = tensor_shapes(config)
    embedding = source(EMBEDDING, shapes[EMBEDDING])
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_layer(index, shapes, source) for index in range(config.num_layers)),
        final_norm=source(FINAL_NORM, shapes[FINAL_NORM]),
        head=embedding if config.tie_word_embeddings else source(HEAD, shapes[HEAD]),
    )


def _layer(index: int, shapes: Mapping[str, tuple[int, ...]], source: TensorSource) -> LayerWeights:
    def part(*names: str, kind: str = "weight") -> torch.Tensor:
        """One tensor, or several fused by rows."""
        full = [f"model.layers.{index}.{name}.{kind}" for name in names]
        tensors = [source(name, shapes[name]) for name in full]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def optional(*names: str, kind: str = "bias") -> torch.Tensor | None:
        announced = f"model.layers.{index}.{names[0]}.{kind}" in shapes
        return part(*names, kind=kind) if announced else None

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        qkv_bias=optional(*qkv),
        input_norm=part("input_layernorm"),
        qkv=part(*qkv),
        q_norm=optional("self_attn.q_norm", kind="weight"),
        k_norm=optional("self_attn.k_norm", kind="weight"),
        output=part("self_attn.o_proj"),
        output_bias=optional("self_attn.o_proj"),
        post_attention_norm=part("post_attention_layernorm"),
        gate_up=part(*gate_up),
        gate_up_bias=optional(*gate_up),
        down=part("mlp.down_proj"),
        down_bias=optional("mlp.down_proj"),
    )
