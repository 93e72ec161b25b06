"""From a checkpoint to a model: shapes, fusing, dtype; and the KV layout that it needs.

Does not know where a checkpoint comes from (``engine.weights``), which tensors it should hold
(``tensors``) or how the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import ModelError
from kvferry.engine.models.linear import Linear, ModelDtype
from kvferry.engine.models.llama import Kernels, LayerWeights, LlamaModel, LlamaWeights
from kvferry.engine.models.tensors import EMBEDDING, FINAL_NORM, HEAD, check_names, tensor_shapes
from kvferry.engine.weights.reader import open_weights
from kvferry.kernels import reference
from kvferry.kv_cache.layout import SCALED_DTYPES, KVCacheLayout, KVGroup

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of files, activations and pools that need no scales."""

TensorSource = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Gives the tensor of a name, in the shape wanted and whatever floating dtype it has."""

_VECTOR_STD = 0.2  # of random norms and biases; matrices have 1 / sqrt(inputs)


class MisshapedTensor(ModelError):
    """A tensor's shape is not what the configuration says; names the tensor and both shapes."""


def load_model(
    folder: Path,
    dtype: ModelDtype,
    kernels: Kernels = reference,
    device: torch.device | None = None,
) -> LlamaModel:
    """Load a folder in Hugging Face layout, fuse its weights, and let ``kernels`` hold them.

    They go to ``device`` one by one, before they are fused; None is the CPU.

    One matrix is fused and handed over at a time, so that the peak is one copy of the model and
    one matrix. What is not copied stays a view of the mapped file. A stored head that differs from
    the embedding is used even where the configuration ties them, as transformers does.

    Raises ModelError: UnsupportedModel, DamagedModel, MissingTensor, or MisshapedTensor.
    """
    config = ModelConfig.from_folder(folder)
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
            tensor = reader.tensor(name)
            tensor = tensor if tensor.dtype in TORCH_DTYPES.values() else tensor.float()
            return tensor if device is None else tensor.to(device)

        return LlamaModel(config, _assemble(config, stored, dtype, kernels), kernels)


def random_model(
    config: ModelConfig,
    seed: int,
    dtype: ModelDtype,
    kernels: Kernels = reference,
    device: torch.device | None = None,
) -> LlamaModel:
    """A model of normally distributed weights, a function of ``config`` and ``seed``; for tests and
    measurements. ``device``: where it lies; None: in host memory.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        values *= shape[-1] ** -0.5 if len(shape) == 2 else _VECTOR_STD
        return (values + 1.0 if "norm" in name else values).to(device, _activations(dtype))

    return LlamaModel(config, _assemble(config, drawn, dtype, kernels), kernels)


def kv_layout(config: ModelConfig, block_size: int, kv_dtype: str) -> KVCacheLayout:
    """The layout of a pool for ``config``: one group with every layer, one rank.

    Args:
        config: the model.
        block_size: positions per block.
        kv_dtype: element type, a key of ``kv_cache.layout.DTYPE_BYTES``; some get scales.
    """
    group = KVGroup(
        first_layer=0,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        scales="float32" if kv_dtype in SCALED_DTYPES else "",
    )
    return KVCacheLayout(block_size=block_size, groups=(group,))


def _activations(dtype: ModelDtype) -> torch.dtype:
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _assemble(
    config: ModelConfig, source: TensorSource, dtype: ModelDtype, kernels: Kernels
) -> LlamaWeights:
    shapes = tensor_shapes(config)
    embedding = source(EMBEDDING, shapes[EMBEDDING])
    head = embedding if config.tie_word_embeddings else source(HEAD, shapes[HEAD])
    layers = (_layer(index, shapes, source, dtype, kernels) for index in range(config.num_layers))
    packed_head = kernels.linear(head, None, dtype)
    shares = head is embedding and dtype != "int8"  # whose integers are no embedding
    head_of_embedding = packed_head if shares else None
    return LlamaWeights(
        embedding=_embedding(embedding, head_of_embedding, _activations(dtype)),
        layers=tuple(layers),
        final_norm=source(FINAL_NORM, shapes[FINAL_NORM]).to(_activations(dtype)),
        head=packed_head,
    )


def _embedding(stored: torch.Tensor, head: Linear | None, wanted: torch.dtype) -> torch.Tensor:
    """The embedding: in the memory of a head tied to it where that can be, else as stored, or
    narrower.
    """
    for held in head.tensors() if head else ():
        if held.shape == stored.shape and held.dtype == wanted:
            return held
    return stored.to(wanted) if wanted.itemsize < stored.element_size() else stored


def _layer(
    index: int,
    shapes: Mapping[str, tuple[int, ...]],
    source: TensorSource,
    dtype: ModelDtype,
    kernels: Kernels,
) -> LayerWeights:
    def fused(names: Sequence[str], kind: str) -> torch.Tensor | None:
        """One tensor, or several fused by rows; None where the model has none."""
        full = [f"model.layers.{index}.{name}.{kind}" for name in names]
        if full[0] not in shapes:
            return None
        tensors = [source(name, shapes[name]) for name in full]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def linear(*names: str) -> Linear:
        weight = fused(names, "weight")
        assert weight is not None, names
        return kernels.linear(weight, fused(names, "bias"), dtype)

    def norm(name: str) -> torch.Tensor | None:
        weight = fused([name], "weight")
        return None if weight is None else weight.to(_activations(dtype))

    input_norm, post_attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
    assert input_norm is not None and post_attention_norm is not None
    return LayerWeights(
        input_norm=input_norm,
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        output=linear("self_attn.o_proj"),
        post_attention_norm=post_attention_norm,
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
