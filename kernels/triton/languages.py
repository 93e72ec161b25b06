"""Triton's names of torch's dtypes."""

from __future__ import annotations

import torch

import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
