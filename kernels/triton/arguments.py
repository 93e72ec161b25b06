"""Checks of what the kernels are given, and its translation into what they take.

A refusal names the argument, what it is and what was wanted. Nothing here waits for a device: what
lies in tensors is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from kvferry.kernels.errors import InvalidKernelArgument
from kvferry.kernels.reference.scaled import has_scales, row_scales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN, INT8, FP8 = 0, 1, 2
"""The numbers that ``numerics`` gives the formats of a pool."""
_FORMATS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


def refuse(name: str, found: object, wanted: str) -> NoReturn:
    """Raise InvalidKernelArgument."""
    raise InvalidKernelArgument(f"{name} is {found}, wanted {wanted}")


def activation(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    """Floats, dense in the last dimension."""
    if tensor.dtype not in FLOATS:
        refuse(name, tensor.dtype, ", ".join(map(str, FLOATS)))
    if tensor.dim() != num_dims:
        refuse(name, f"of shape {list(tensor.shape)}", f"{num_dims} dimensions")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        refuse(name, f"of strides {tensor.stride()}", "1 as the last")


def like(name: str, tensor: torch.Tensor, of: torch.Tensor, *shape: int) -> None:
    """A contiguous tensor of this shape, of the dtype and on the device of ``of``."""
    if tensor.dtype != of.dtype:
        refuse(name, tensor.dtype, f"{of.dtype}")
    if tensor.shape != shape:
        refuse(name, f"of shape {list(tensor.shape)}", f"{list(shape)}")
    same_device(name, tensor, of)
    if not tensor.is_contiguous():
        refuse(name, f"of strides {tensor.stride()}", "a contiguous tensor")


def same_device(name: str, tensor: torch.Tensor, of: torch.Tensor) -> None:
    """On the device of ``of``."""
    if tensor.device != of.device:
        refuse(name, f"on {tensor.device}", f"on {of.device}")


def integers(name: str, tensor: torch.Tensor, num_dims: int, of: torch.Tensor) -> torch.Tensor:
    """int32 or int64, dense in the last dimension, on the device of ``of``."""
    if tensor.dtype not in (torch.int32, torch.int64):
        refuse(name, tensor.dtype, "torch.int32 or torch.int64")
    if tensor.dim() != num_dims:
        refuse(name, f"of shape {list(tensor.shape)}", f"{num_dims} dimensions")
    same_device(name, tensor, of)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """One layer of a pool, as the kernels take it.

    Attributes:
        rows: the layer's elements from its first on; of float8 as int8.
        scales: likewise; of a pool without, ``rows`` again, which nobody reads.
        row_strides, scale_strides: elements from block to block, plane to plane, head to head.
        pool_format: of ``numerics``.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    row_strides: tuple[int, int, int]
    scale_strides: tuple[int, int, int]
    pool_format: int

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return int(self.rows.shape[3])


def pool_layer(
    pool: torch.Tensor, layer: int, num_kv_heads: int | None, head_dim: int, of: torch.Tensor
) -> PoolLayer:
    """A layer of ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``."""
    if pool.dtype not in (*FLOATS, *_FORMATS):
        refuse("pool", pool.dtype, ", ".join(map(str, (*FLOATS, *_FORMATS))))
    same_device("pool", pool, of)
    shape, stride = pool.shape, pool.stride()
    if len(shape) != 6 or shape[2] != 2 or shape[5] != head_dim:
        wanted = f"[num_blocks, num_layers, 2, num_kv_heads, block_size, {head_dim}]"
        refuse("pool", f"of shape {list(shape)}", wanted)
    if num_kv_heads is not None and shape[3] != num_kv_heads:
        refuse("pool", f"of {shape[3]} heads", f"{num_kv_heads}")
    if not 0 <= layer < shape[1]:
        refuse("layer", layer, f"0 to {shape[1] - 1}")
    if (stride[5] != 1 and shape[5] > 1) or (stride[4] != head_dim and shape[4] > 1):
        refuse("pool", f"of strides {stride}", f"{head_dim} and 1 as the last")
    strides = (stride[0], stride[2], stride[3])
    if not has_scales(pool.dtype):
        rows = pool[:, layer]
        return PoolLayer(rows, rows, strides, (0, 0, 0), PLAIN)
    try:
        scales = row_scales(pool)[:, layer]
    except (ValueError, RuntimeError) as error:
        raise InvalidKernelArgument(f"pool has no room for scales: {error}") from error
    scale_strides = (scales.stride(0), scales.stride(1), scales.stride(2))
    rows = pool.view(torch.int8)[:, layer]
    return PoolLayer(rows, scales, strides, scale_strides, _FORMATS[pool.dtype])
