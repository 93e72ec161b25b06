"""Checks of what the kernels are given, and its translation into numbers.

A refusal names the argument, what it is and what was wanted.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from kvferry.kernels.cpu.errors import InvalidKernelArgument
from kvferry.kernels.reference.scaled import run_bytes

ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1}
POOLS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The numbers that kernels.h gives the dtypes."""


def refuse(name: str, found: object, wanted: str) -> NoReturn:
    """Raise InvalidKernelArgument."""
    raise InvalidKernelArgument(f"{name} is {found}, wanted {wanted}")


def raise_refusal(refusal: str | None) -> None:
    """Raise what the extension refused, if it did."""
    if refusal is not None:
        raise InvalidKernelArgument(refusal)


def activation(name: str, tensor: torch.Tensor) -> int:
    """The number of an activation's dtype; its elements must be dense in the last dimension."""
    number = ACTIVATIONS.get(tensor.dtype)
    if number is None:
        refuse(name, tensor.dtype, "torch.float32 or torch.bfloat16")
    if not tensor.is_cpu:
        refuse(name, f"on {tensor.device}", "on the CPU")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        refuse(name, f"of strides {tensor.stride()}", "1 as the last")
    return number


def like(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """A contiguous tensor on the CPU of this dtype and shape."""
    if tensor.dtype != dtype:
        refuse(name, tensor.dtype, f"{dtype}")
    if tensor.shape != shape:
        refuse(name, f"of shape {list(tensor.shape)}", f"{list(shape)}")
    if not tensor.is_cpu:
        refuse(name, f"on {tensor.device}", "on the CPU")
    if not tensor.is_contiguous():
        refuse(name, f"of strides {tensor.stride()}", "a contiguous tensor")


def heads_of(name: str, tensor: torch.Tensor, *shape: int | None) -> tuple[int, int]:
    """Strides of tokens and heads of ``[tokens, heads, dim]``; None in ``shape`` for any size."""
    found = tensor.shape
    if len(found) != 3 or any(
        size is not None and size != have for size, have in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        refuse(name, f"of shape {list(found)}", f"[{wanted}]")
    return tensor.stride(0), tensor.stride(1)


def indices(name: str, tensor: torch.Tensor, dtype: torch.dtype, num_dims: int) -> torch.Tensor:
    """Integers in ``dtype``, contiguous: the tensor itself where it already is that."""
    if tensor.dtype != dtype:
        if tensor.dtype not in (torch.int32, torch.int64):
            refuse(name, tensor.dtype, "torch.int32 or torch.int64")
        tensor = tensor.to(dtype)
    if tensor.dim() != num_dims:
        refuse(name, f"of shape {list(tensor.shape)}", f"{num_dims} dimensions")
    if not tensor.is_cpu:
        refuse(name, f"on {tensor.device}", "on the CPU")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def pool_layer(
    pool: torch.Tensor, layer: int, num_kv_heads: int | None, head_dim: int
) -> tuple[int, int, int, int, int, int, int]:
    """Pointer, blocks, block size, strides of block, plane and head, dtype of one layer."""
    number = POOLS.get(pool.dtype)
    if number is None:
        refuse("pool", pool.dtype, ", ".join(map(str, POOLS)))
    if not pool.is_cpu:
        refuse("pool", f"on {pool.device}", "on the CPU")
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
    if pool.dtype == torch.int8:
        _check_scales(pool)
    base = pool.data_ptr() + layer * stride[1] * pool.element_size()
    return base, shape[0], shape[4], stride[0], stride[2], stride[3], number


def _check_scales(pool: torch.Tensor) -> None:
    """That every run of an int8 pool has its scales behind it, the last one too."""
    shape, stride = pool.shape, pool.stride()
    run = run_bytes(shape[4], shape[5])
    if stride[3] < run:
        refuse("pool", f"of strides {stride}", f"at least {run} from head to head, for the scales")
    last = sum((size - 1) * step for size, step in zip(shape[:4], stride[:4], strict=True))
    held, wanted = pool.untyped_storage().nbytes(), pool.storage_offset() + last + run
    if pool.numel() and held < wanted:
        refuse("pool", f"in {held} bytes", f"at least {wanted}, for the scales")
