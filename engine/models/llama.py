"""The Llama family of decoders (Llama, Mistral, Qwen) over a paged KV pool, in torch.

Owns the order of operations of one forward pass. Knows neither sequences nor requests: it sees
flat tokens, their positions and slots, and calls a family of kernels for everything else. Weights
come fused from ``engine.models.loading``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.frequencies import inverse_frequencies
from kvferry.engine.models.linear import Linear, ModelDtype
from kvferry.kernels import reference


class Kernels(Protocol):
    """What a family of kernels provides; ``kvferry.kernels.reference`` says what each does."""

    def rope_write_kv(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Rotary embedding of queries and keys, which go to the pool with the values."""
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of a batch of chunks through block tables."""
        ...

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks inside the pool, which may be given as its bytes."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Root-mean-square norm of a sum, which takes the residual's place."""
        ...

    def rope_tables(
        self,
        positions: torch.Tensor,
        inv_freq: torch.Tensor,
        attention_factor: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary embedding."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gated activation."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: ModelDtype) -> Linear:
        """The form in which this family holds a matrix."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. What the model lacks is None; biases belong to their linears.

    Attributes:
        input_norm, post_attention_norm: ``[hidden_size]``.
        qkv: ``hidden_size`` to ``(num_heads + 2 * num_kv_heads) * head_dim``, in this order.
        q_norm, k_norm: ``[head_dim]``, applied to each head.
        output: ``num_heads * head_dim`` to ``hidden_size``.
        gate_up: ``hidden_size`` to ``2 * ffn_size``, gate first.
        down: ``ffn_size`` to ``hidden_size``.
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``, of any dtype.
        layers: one per decoder layer.
        final_norm: ``[hidden_size]``; norms have the dtype of activations.
        head: ``hidden_size`` to ``vocab_size``; may share the embedding's memory when tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear

    def num_bytes(self) -> int:
        """Bytes of all weights; what is shared counts once."""
        tensors = [self.embedding, self.final_norm, *self.head.tensors()]
        for layer in self.layers:
            for held in (getattr(layer, part.name) for part in fields(layer)):
                if isinstance(held, torch.Tensor):
                    tensors.append(held)
                elif held is not None:
                    tensors += held.tensors()
        sizes = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}
        return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of one step stand, and where their KV lies.

    Attributes:
        slot_mapping: slot of each token, ``block_id * block_size + offset``.  [num_tokens] int64
        block_tables: [num_seqs, max_blocks]; see ``kernels.reference.paged_attention``.
        cu_seqlens_q: cumulative query lengths from 0.  [num_seqs + 1]
        seq_lens: valid positions of each sequence, this step's tokens included.  [num_seqs]
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor


class LlamaModel:
    """A decoder: token ids in, hidden states out, KV written into the pool on the way."""

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, kernels: Kernels = reference
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        device = weights.final_norm.device
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.weights.final_norm.dtype

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and write its KV.

        Args:
            input_ids: [num_tokens] integers, the sequences one after the other.
            positions: [num_tokens] integers.
            attention: where the tokens stand.
            pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

        Returns:
            Hidden states before the final norm.  [num_tokens, hidden_size]
        """
        config, kernels = self.config, self.kernels
        cos, sin = kernels.rope_tables(
            positions, self._inv_freq, config.rope.attention_factor, self.dtype
        )
        hidden = F.embedding(input_ids, self.weights.embedding).to(self.dtype)
        layers, eps = self.weights.layers, config.rms_norm_eps
        normed = kernels.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(index, normed, cos, sin, attention, pool)
            normed = kernels.add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            fed = self._feed_forward(layer, normed)
            if index + 1 < len(layers):
                normed = kernels.add_rms_norm(fed, hidden, layers[index + 1].input_norm, eps)
        return hidden + fed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32  [num_rows, vocab_size], of rows of ``forward``'s result."""
        normed = self.kernels.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.weights.head(normed, torch.float32)

    def _attention(
        self,
        index: int,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionInputs,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """The attention half of layer ``index``: [num_tokens, hidden_size] to the same."""
        config, kernels, layer = self.config, self.kernels, self.weights.layers[index]
        num_tokens = normed.shape[0]
        heads = layer.qkv(normed).view(num_tokens, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        q = kernels.rope_write_kv(
            self._normed_heads(layer, heads[:, :num_rotated]),
            heads[:, num_rotated:],
            cos,
            sin,
            pool,
            index,
            attention.slot_mapping,
        )
        attended = kernels.paged_attention(
            q,
            pool,
            index,
            attention.block_tables,
            attention.cu_seqlens_q,
            attention.seq_lens,
            config.head_dim**-0.5,
            config.layer_windows[index],
        )
        return layer.output(attended.view(num_tokens, -1))

    def _normed_heads(self, layer: LayerWeights, heads: torch.Tensor) -> torch.Tensor:
        """Queries, then keys, each head normalised if the model does so."""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        num_heads, eps = self.config.num_heads, self.config.rms_norm_eps
        q = self.kernels.rms_norm(heads[:, :num_heads], layer.q_norm, eps)
        k = self.kernels.rms_norm(heads[:, num_heads:], layer.k_norm, eps)
        return torch.cat((q, k), dim=1)

    def _feed_forward(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        """The feed-forward half of a layer: [num_tokens, hidden_size] to the same."""
        return layer.down(self.kernels.silu_mul(layer.gate_up(normed)))
