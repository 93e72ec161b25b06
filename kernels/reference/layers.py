"""The small operations between the matrix products: norm, rotary embedding, gated activation.

In the order of operations, and with the roundings, of the ``transformers`` Llama model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, normalised in float32.

    Args:
        x: ``[..., size]``: hidden states, or the heads of each token.
        weight: ``[size]``.
        eps: added to the mean square.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm`` of ``residual + x``, which becomes the new ``residual``, in place.

    Args:
        x: ``[num_tokens, size]``.
        residual: the same shape, written.
        weight: ``[size]``.
        eps: added to the mean square.
    """
    residual += x
    return rms_norm(residual, weight, eps)


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for ``rope``, one row per token, angles computed in float32.

    Args:
        positions: ``[num_tokens]`` integers.
        inv_freq: ``[head_dim / 2]`` float32, radians per position of each pair of dimensions.
        attention_factor: multiplies cosines and sines.
        dtype: of the result.

    Returns:
        cos and sin, ``[num_tokens, 1, head_dim]`` in ``dtype``; both halves hold the same angles.
    """
    half = positions[:, None].float() * inv_freq
    angles = torch.cat((half, half), dim=-1)[:, None]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return cos.to(dtype), sin.to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension ``i`` against ``i + head_dim / 2`` (the half-split convention).

    Args:
        x: ``[num_tokens, num_heads, head_dim]``.
        cos: from ``rope_tables``.
        sin: from ``rope_tables``.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[num_tokens, 2 * ffn_size]``, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
