"""Norm, gated activation and rotary embedding; see ``kernels.reference.layers``.

float32 inside, one rounding at the end: bfloat16 results differ from the reference's, which rounds
in between as transformers does, in the last bit.
"""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.arguments import (
    ACTIVATIONS,
    activation,
    heads_of,
    indices,
    like,
    raise_refusal,
    refuse,
)
from kvferry.kernels.cpu.extension import native

NO_POOL = (0, 0, 1, 0, 0, 0, 0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of ``[rows, size]`` or ``[rows, n, size]``."""
    dtype = activation("x", x)
    size = x.shape[-1]
    if x.dim() == 2:
        outer, inner, strides = x.shape[0], 1, (x.stride(0), 0)
    elif x.dim() == 3:
        outer, inner, strides = x.shape[0], x.shape[1], (x.stride(0), x.stride(1))
    else:
        refuse("x", f"of shape {list(x.shape)}", "2 or 3 dimensions")
    like("weight", weight, x.dtype, size)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        0,
        weight.data_ptr(),
        outer,
        inner,
        size,
        *strides,
        eps,
        dtype,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm`` of ``residual + x``, which becomes the new ``residual``, in place."""
    dtype = activation("x", x)
    if x.dim() != 2:
        refuse("x", f"of shape {list(x.shape)}", "2 dimensions")
    rows, size = x.shape
    like("residual", residual, x.dtype, rows, size)
    like("weight", weight, x.dtype, size)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        rows,
        1,
        size,
        x.stride(0),
        0,
        eps,
        dtype,
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[num_tokens, 2 * ffn_size]``, gate first."""
    dtype = activation("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        refuse("gate_up", f"of shape {list(gate_up.shape)}", "[num_tokens, 2 * ffn_size]")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    native.silu_mul(
        out.data_ptr(),
        gate_up.data_ptr(),
        rows,
        size,
        gate_up.stride(0),
        dtype,
        torch.get_num_threads(),
    )
    return out


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for ``rope``, one row per token."""
    number = ACTIVATIONS.get(dtype)
    if number is None:
        refuse("dtype", dtype, "torch.float32 or torch.bfloat16")
    places = indices("positions", positions, torch.int64, 1)
    half = inv_freq.shape[0]
    like("inv_freq", inv_freq, torch.float32, half)
    cos = torch.empty(len(places), 1, 2 * half, dtype=dtype)
    sin = torch.empty_like(cos)
    native.rope_tables(
        cos.data_ptr(),
        sin.data_ptr(),
        places.data_ptr(),
        inv_freq.data_ptr(),
        len(places),
        half,
        attention_factor,
        number,
        torch.get_num_threads(),
    )
    return cos, sin


def check_tables(
    x: torch.Tensor, num_tokens: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """That ``cos`` and ``sin`` belong to heads of ``x``."""
    if head_dim % 2:
        refuse("head_dim", head_dim, "an even number")
    like("cos", cos, x.dtype, num_tokens, 1, head_dim)
    like("sin", sin, x.dtype, num_tokens, 1, head_dim)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension ``i`` of ``[num_tokens, num_heads, head_dim]`` against its counterpart."""
    dtype = activation("x", x)
    strides = heads_of("x", x, None, None, None)
    num_tokens, num_heads, head_dim = x.shape
    check_tables(x, num_tokens, head_dim, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype)
    raise_refusal(
        native.rope(
            out.data_ptr(),
            x.data_ptr(),
            0,
            cos.data_ptr(),
            sin.data_ptr(),
            0,
            num_tokens,
            num_heads,
            0,
            head_dim,
            *strides,
            0,
            0,
            head_dim,
            *NO_POOL,
            dtype,
            torch.get_num_threads(),
        )
    )
    return out
