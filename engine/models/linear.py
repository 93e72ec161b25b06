"""What a model knows of its matrices: something to call. A family of kernels makes them."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

ModelDtype = Literal["float32", "bfloat16", "int8"]
"""Of a model's matrices. Activations of int8 are float32."""


class Linear(Protocol):
    """A weight ``[out, in]`` with or without a bias, in whatever form a family of kernels wants."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[rows, in]`` to ``[rows, out]``, in ``out_dtype`` or that of ``x``."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds; may share memory with others."""
        ...
