"""How much a model is: what a step of it reads, and how much it computes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvferry.engine.models.tensors import layer_shapes

if TYPE_CHECKING:  # a front door describes a model without loading torch
    from kvferry.engine.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What bounds a step.

    Attributes:
        weight_bytes: weights that a decode step reads, as they lie in memory; of an embedding that
            is not the head it reads a few rows, which do not count.
        num_layer_parameters: of all layers together; each token meets each once.
        num_head_parameters: of the head, met only where logits are needed.
    """

    weight_bytes: int
    num_layer_parameters: int
    num_head_parameters: int

    @classmethod
    def of(cls, model: LlamaModel) -> ModelSize:
        """That of a loaded model."""
        weights, config = model.weights, model.config
        embedding = weights.embedding.untyped_storage().data_ptr()
        shared = any(t.untyped_storage().data_ptr() == embedding for t in weights.head.tensors())
        return cls(
            weights.num_bytes() - (0 if shared else weights.embedding.nbytes),
            config.num_layers * sum(map(prod, layer_shapes(config).values())),
            config.vocab_size * config.hidden_size,
        )

    def prompt_flops(self, num_tokens: int) -> float:
        """Operations of the matrices for a prompt, whose last position alone needs the head."""
        return 2.0 * (self.num_layer_parameters * num_tokens + self.num_head_parameters)
