"""Cases of the small kernels: norm, rotary embedding, gated activation, writing and copying KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from kvferry.cluster.bench.families import AllKernels, Family
from kvferry.cluster.bench.rows import Case, Shape
from kvferry.kernels import reference

BLOCK_SIZE = 16
MAX_COPIES = 16
EPS = 1e-5
PLAIN = "reference"

Compute = Callable[[AllKernels], torch.Tensor]


def small_cases(
    num_tokens: int, hidden_size: int, ffn_size: int, heads: tuple[int, int, int]
) -> list[Case]:
    """One step's small kernels of one layer over ``num_tokens`` tokens, in float32.

    Args:
        num_tokens: decoding sequences, or the tokens of one prompt.
        hidden_size: of the model.
        ffn_size: of the model.
        heads: query heads, KV heads, head dimension.
    """
    q_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight = drawn(num_tokens, hidden_size), drawn(hidden_size)
    gate_up = drawn(num_tokens, 2 * ffn_size)
    rotated = drawn(num_tokens, q_heads + kv_heads, head_dim)
    inv_freq = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = reference.rope_tables(torch.arange(num_tokens), inv_freq, 1.0, torch.float32)
    shape = Shape(num_tokens)
    with_heads = Shape(num_tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    return [
        _case(
            "rms_norm",
            shape,
            lambda kernels: kernels.rms_norm(x, weight, EPS),
            x.double() * (x.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double(),
            2 * x.nbytes + weight.nbytes,
            4 * x.numel(),
        ),
        _case(
            "silu_mul",
            shape,
            lambda kernels: kernels.silu_mul(gate_up),
            F.silu(gate_up[:, :ffn_size].double()) * gate_up[:, ffn_size:].double(),
            gate_up.nbytes * 3 // 2,
            5 * num_tokens * ffn_size,
        ),
        _case(
            "rope",
            with_heads,
            lambda kernels: kernels.rope(rotated, cos, sin),
            reference.rope(rotated.double(), cos.double(), sin.double()),
            2 * rotated.nbytes + cos.nbytes + sin.nbytes,
            3 * rotated.numel(),
        ),
        *_pool_cases(with_heads, drawn),
    ]


def _case(
    kernel: str,
    shape: Shape,
    compute: Compute,
    exact: torch.Tensor,
    num_bytes: int,
    flops: int,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    def error(family: Family) -> float:
        return float((compute(family.kernels).double() - exact).abs().max())

    return Case(
        kernel=kernel,
        shape=shape,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        call=lambda family: lambda _: compute(family.kernels),
        baselines={PLAIN: lambda _: compute(reference)},
        error=error,
        num_bytes=num_bytes,
        flops=flops,
    )


def _pool_cases(shape: Shape, drawn: Callable[..., torch.Tensor]) -> list[Case]:
    num_tokens, kv_heads, head_dim = shape.batch, shape.kv_heads or 1, shape.head_dim or 1
    k, v = drawn(num_tokens, kv_heads, head_dim), drawn(num_tokens, kv_heads, head_dim)
    pool = torch.zeros(num_tokens + 1, 1, 2, kv_heads, BLOCK_SIZE, head_dim)
    slots = torch.arange(num_tokens) * BLOCK_SIZE + 3
    num_copies = min(num_tokens, MAX_COPIES)
    copied = drawn(2 * num_copies, 1, 2, kv_heads, BLOCK_SIZE, head_dim)
    pairs = [(source, source + num_copies) for source in range(num_copies)]

    def written(kernels: AllKernels) -> torch.Tensor:
        kernels.write_kv(pool, 0, k, v, slots)
        return pool[:num_tokens, 0, :, :, 3].transpose(0, 1)

    def copies(kernels: AllKernels) -> torch.Tensor:
        kernels.copy_blocks(copied, pairs)
        return copied[num_copies:]

    kv_bytes = k.nbytes + v.nbytes
    in_pool = Shape(num_tokens, kv_heads=kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE)
    exact_copies = copied[:num_copies].double()
    of_copies = replace(in_pool, batch=num_copies)
    return [
        _case(
            "write_kv",
            in_pool,
            written,
            torch.stack((k, v)).double(),
            2 * kv_bytes,
            0,
            torch.float32,
        ),
        _case("copy_blocks", of_copies, copies, exact_copies, copied.nbytes, 0, torch.float32),
    ]
