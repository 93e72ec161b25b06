"""Norm and gated activation on a GPU; see ``kernels.reference.layers``.

float32 inside, one rounding at the end: results of 16 bits differ from the reference's, which
rounds in between as transformers does, in the last bit.
"""

from __future__ import annotations

import torch

from kvferry.kernels.triton.arguments import activation, like, refuse
from kvferry.kernels.triton.layer_kernels import rms_norm_rows, silu_mul_rows
from kvferry.kernels.triton.tuning import power_of_two

SILU_LANES = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of ``[rows, size]`` or ``[rows, n, size]``."""
    if x.dim() not in (2, 3):
        refuse("x", f"of shape {list(x.shape)}", "2 or 3 dimensions")
    activation("x", x, x.dim())
    like("weight", weight, x, x.shape[-1])
    return _norm(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm`` of ``residual + x``, which becomes the new ``residual``, in place."""
    activation("x", x, 2)
    like("residual", residual, x, *x.shape)
    like("weight", weight, x, x.shape[-1])
    return _norm(x, residual, weight, eps)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    size = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        padded = power_of_two(size)
        rms_norm_rows[(rows,)](
            out,
            x,
            x if residual is None else residual,
            weight,
            inner,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            eps,
            SIZE=size,
            PADDED=padded,
            ADD=residual is not None,
            num_warps=norm_warps(padded),
        )
    return out


def norm_warps(padded: int) -> int:
    """Warps for a row: about eight elements a lane."""
    return min(16, max(1, padded // 256))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[num_tokens, 2 * ffn_size]``, gate first."""
    activation("gate_up", gate_up, 2)
    if gate_up.shape[1] % 2:
        refuse("gate_up", f"of shape {list(gate_up.shape)}", "[num_tokens, 2 * ffn_size]")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        lanes = min(SILU_LANES, power_of_two(size))
        silu_mul_rows[(rows, -(-size // lanes))](
            out, gate_up, gate_up.stride(0), SIZE=size, LANES=lanes, num_warps=4
        )
    return out
