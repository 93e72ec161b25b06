"""Linears over weights packed once: a step of a few rows reads them at the speed of memory.

See ``src/linear.cpp`` for how, ``src/linear.h`` for the layout, which every instruction set shares.
A row gets the same bits alone and in any batch, and on any number of threads; another instruction
set may round otherwise. Knows no model.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvferry.kernels.cpu.arguments import ACTIVATIONS, POOLS, activation, like, refuse
from kvferry.kernels.cpu.extension import native
from kvferry.kernels.cpu.memory import WEIGHTS

WeightKind = Literal["float32", "bfloat16", "int8"]

_KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
_PANEL = 32
_STEP_BYTES = 4
_STEP_MULTIPLE = 16
_MAX_INT8_INPUTS = 1 << 16
"""With more, the largest products of uint8 and int8 would not fit a sum of 32 bits."""


class PackedLinear:
    """``x @ weight.T + bias`` of a weight ``[out, in]`` held as panels; the weight is not kept.

    Kinds of weight, each with sums in float32 (int32 for int8) and one rounding at the end:

    - ``float32``.
    - ``bfloat16``: activations of float32 are multiplied with the weights widened, so that a weight
      that bfloat16 holds exactly gives the bits of kind ``float32`` for half of its memory.
    - ``int8``: symmetric, one factor per output; each row of activations is quantised likewise
      when it comes. NaN and infinity in a row make the whole row NaN.
    """

    __slots__ = (
        "_bias",
        "_corrections",
        "_kind",
        "_packed",
        "_scales",
        "in_features",
        "kind",
        "out_features",
    )

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: WeightKind = "float32"
    ) -> None:
        """Pack ``weight`` of any floating dtype of the pool; its last dimension must be dense.

        Raises InvalidKernelArgument.
        """
        if kind not in _KINDS:
            refuse("kind", repr(kind), ", ".join(_KINDS))
        dtype = POOLS.get(weight.dtype)
        if dtype is None:
            refuse("weight", weight.dtype, "torch.float32, torch.bfloat16 or torch.float16")
        if weight.dim() != 2 or 0 in weight.shape:
            refuse("weight", f"of shape {list(weight.shape)}", "[out, in]")
        if not weight.is_cpu:
            refuse("weight", f"on {weight.device}", "on the CPU")
        if weight.stride(1) != 1 and weight.shape[1] > 1:
            refuse("weight", f"of strides {weight.stride()}", "1 as the last")
        self.kind = kind
        self._kind = _KINDS[kind]
        self.out_features, self.in_features = weight.shape
        if kind == "int8" and self.in_features > _MAX_INT8_INPUTS:
            refuse("weight", f"of {self.in_features} inputs", f"at most {_MAX_INT8_INPUTS} in int8")
        panels = -(-self.out_features // _PANEL)
        inputs = _STEP_MULTIPLE << self._kind
        steps = -(-self.in_features // inputs) * _STEP_MULTIPLE
        padded = panels * _PANEL
        self._packed = WEIGHTS.take(padded * steps * _STEP_BYTES)
        quantised = padded if kind == "int8" else 0
        self._scales = torch.zeros(quantised, dtype=torch.float32)
        self._corrections = torch.zeros(quantised, dtype=torch.int32)
        self._bias = torch.zeros(0 if bias is None else padded, dtype=torch.float32)
        if bias is not None:
            if bias.shape != (self.out_features,):
                refuse("bias", f"of shape {list(bias.shape)}", f"[{self.out_features}]")
            self._bias[: self.out_features] = bias
        native.pack_linear(
            self._packed.data_ptr(),
            weight.data_ptr(),
            self._scales.data_ptr(),
            self._corrections.data_ptr(),
            self.out_features,
            self.in_features,
            weight.stride(0),
            self._kind,
            dtype,
            torch.get_num_threads(),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds: weights, factors, corrections and bias, empty where there are none."""
        return self._packed, self._scales, self._corrections, self._bias

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``, in the dtype of ``x`` or in ``out_dtype``.

        Into ``out``, contiguous, where that is given.

        Raises InvalidKernelArgument.
        """
        dtype = activation("x", x)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            refuse("x", f"of shape {list(x.shape)}", f"[rows, {self.in_features}]")
        wanted = x.dtype if out_dtype is None else out_dtype
        out_number = ACTIVATIONS.get(wanted)
        if out_number is None:
            refuse("out_dtype", wanted, "torch.float32 or torch.bfloat16")
        rows = x.shape[0]
        if out is None:
            out = torch.empty(rows, self.out_features, dtype=wanted)
        else:
            like("out", out, wanted, rows, self.out_features)
        if rows:
            native.linear(
                out.data_ptr(),
                x.data_ptr(),
                self._packed.data_ptr(),
                self._bias.data_ptr(),
                self._scales.data_ptr(),
                self._corrections.data_ptr(),
                rows,
                self.out_features,
                self.in_features,
                x.stride(0),
                self.out_features,
                self._kind,
                dtype,
                out_number,
                torch.get_num_threads(),
            )
        return out


def linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: WeightKind) -> PackedLinear:
    """The linear of ``weight`` for a model of ``dtype``.

    In a float32 model a weight that is stored in bfloat16 is held in bfloat16: it has no more bits.
    """
    exact = dtype == "float32" and weight.dtype == torch.bfloat16
    return PackedLinear(weight, bias, "bfloat16" if exact else dtype)
