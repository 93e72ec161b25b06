"""Linears in plain torch; see ``kernels.cpu.linear`` for the packed ones."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

LinearDtype = Literal["float32", "bfloat16", "int8"]

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LARGEST = 127.0


class DenseLinear:
    """``F.linear``, bit for bit; shares ``weight``."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``, computed in the dtype of ``x``."""
        return F.linear(x, self.weight, self.bias).to(out_dtype or x.dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class QuantisedLinear:
    """int8 weights, symmetric per output, times rows of activations quantised per row.

    The integers are held and multiplied as float32: exact while a sum stays below 2^24.
    """

    __slots__ = ("bias", "factors", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.factors = _quantised(weight.float())
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        integers, factors = _quantised(x.float())
        out = F.linear(integers, self.weight) * (factors * self.factors.T)
        return (out if self.bias is None else out + self.bias).to(out_dtype or x.dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds."""
        held = (self.weight, self.factors)
        return held if self.bias is None else (*held, self.bias)


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers -127 to 127 in float32, and the factor of each row.  [rows, size], [rows, 1]"""
    most = rows.abs().amax(1, keepdim=True)
    largest = torch.full_like(most, _LARGEST)  # as a number, torch would multiply it with 1 / most
    inverse = (largest / most).masked_fill_(~(most > 0), 0.0)  # nothing comes from the host
    return (rows * inverse).round(), most / _LARGEST


def linear(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: LinearDtype
) -> DenseLinear | QuantisedLinear:
    """``x @ weight.T + bias`` of ``weight`` ``[out, in]``, held in ``dtype``."""
    if dtype == "int8":
        return QuantisedLinear(weight, bias)
    wanted = _FLOATS[dtype]
    return DenseLinear(weight.to(wanted), None if bias is None else bias.to(wanted))
