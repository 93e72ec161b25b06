"""The small operations between the matrix products: norm, rotary embedding, gated activation.

In the order of operations, and with the roundings, of the ``transformers`` Llama model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, normalised in float32.

    Args:
        x: ``[num_tokens, hidden_size]``.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def rope_tables(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for ``rope``, one row per token, angles computed in float32.

    Args:
        positions: ``[num_tokens]`` integers.
        head_dim: even; the embedding covers all of it.
        theta: base of the frequencies ``theta ** (-2i / head_dim)``.
        dtype: of the result.

    Returns:
        cos and sin, ``[num_tokens, 1, head_dim]`` in ``dtype``; both halves hold the same angles.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / (theta ** (exponents / head_dim))
    half = positions[:, None].float() * frequencies
    angles = torch.cat((half, half), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


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
