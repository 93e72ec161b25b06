"""The Triton kernels on a GPU, beside float64 and the reference: run by ``scripts/gpu_check``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.kernels.reference.scaled import quantised, row_scales
from tests.kernels.dense import LAYER, Batch, Case, build, dense_attention, soft_capped_attention
from tests.kernels.scaled_pools import SCALED, in_scaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MIXED = ((0, 130), (700, 1), (65, 33), (2000, 1), (5, 1))
DECODE = tuple((context, 1) for context in (1, 15, 16, 500, 3000))
SHAPES = ((64, 3), (128, 8), (80, 1), (96, 4))


def on_gpu(batch: Batch) -> Batch:
    """The tensors of a call, moved."""
    scaled = batch.pool.dtype in SCALED
    pool = batch.pool.cuda()
    if scaled:  # with the scales behind the rows
        storage = batch.pool.untyped_storage()
        held = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
        pool = held.view(batch.pool.dtype).as_strided(
            batch.pool.shape, batch.pool.stride(), batch.pool.storage_offset()
        )
    return replace(
        batch,
        q=batch.q.cuda(),
        pool=pool,
        block_tables=batch.block_tables.cuda(),
        cu_seqlens_q=batch.cu_seqlens_q.cuda(),
        seq_lens=batch.seq_lens.cuda(),
    )


def error(batch: Batch, expected: torch.Tensor, window: int | None, cap: float | None) -> float:
    from kvferry.kernels import triton as kernels

    moved = on_gpu(batch)
    found = kernels.paged_attention(
        moved.q,
        moved.pool,
        LAYER,
        moved.block_tables,
        moved.cu_seqlens_q,
        moved.seq_lens,
        batch.q.shape[2] ** -0.5,
        window,
        cap,
    )
    return float((found.cpu().double() - expected).abs().max())


@pytest.mark.parametrize("chunks", [MIXED, DECODE])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "window", "cap"),
    [
        (torch.float32, 64, 3, None, None),
        (torch.float16, 128, 8, None, None),
        *((torch.bfloat16, *shape, None, None) for shape in SHAPES),
        *((torch.bfloat16, 64, 3, *option) for option in ((100, None), (None, 5.0), (40, 5.0))),
    ],
)
def test_attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    chunks: tuple[tuple[int, int], ...],
    window: int | None,
    cap: float | None,
) -> None:
    batch = build(Case(chunks, 16, 2, group, head_dim, dtype, seed=3))
    scale = head_dim**-0.5
    if cap is None:
        expected = dense_attention(batch, group, scale, window)
    else:
        expected = soft_capped_attention(batch, group, scale, window, cap)
    assert error(batch, expected, window, cap) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", SCALED)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunks", [MIXED, DECODE])
def test_attention_over_pools_with_scales(
    kv_dtype: torch.dtype, dtype: torch.dtype, chunks: tuple[tuple[int, int], ...]
) -> None:
    batch = in_scaled(build(Case(chunks, 16, 2, 4, 128, dtype, seed=4)), kv_dtype)
    expected = dense_attention(batch, 4, 128**-0.5, None)
    assert error(batch, expected, None, None) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_stored_rows_have_the_bits_of_the_reference(kv_dtype: torch.dtype) -> None:
    from kvferry.kernels import triton as kernels

    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, 2, 64, generator=generator).bfloat16() for _ in range(2))
    batch = in_scaled(build(Case(((0, 48),), 16, 2, 1, 64, torch.float32, seed=1)), kv_dtype)
    pool = on_gpu(batch).pool
    slots = torch.randperm(48, generator=generator)[:40]
    kernels.write_kv(pool, LAYER, k.cuda(), v.cuda(), slots.cuda())
    for plane, rows in ((0, k), (1, v)):
        elements, scales = quantised(rows, kv_dtype)
        blocks, offsets = slots // 16, slots % 16
        held = pool.view(torch.int8)[:, LAYER, plane].cpu()[blocks, :, offsets]
        assert torch.equal(held, elements.view(torch.int8))
        assert torch.equal(row_scales(pool)[:, LAYER, plane].cpu()[blocks, :, offsets], scales)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    from kvferry.kernels import reference
    from kvferry.kernels import triton as kernels

    torch.manual_seed(0)
    x, residual = (torch.randn(33, 4096, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(4096, device="cuda").to(dtype)

    def close(found: torch.Tensor, wide: torch.Tensor) -> bool:
        """The wanted result is the reference's in float32, rounded once."""
        return torch.allclose(found.float(), wide, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    assert close(
        kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5)
    )
    mine, total = residual.clone(), residual + x
    found = kernels.add_rms_norm(x, mine, weight, 1e-5)
    assert torch.equal(mine, total)
    assert close(found, reference.rms_norm(total.float(), weight.float(), 1e-5))
    assert close(kernels.silu_mul(x), reference.silu_mul(x.float()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotary_embedding_with_the_write_into_the_pool(dtype: torch.dtype, head_dim: int) -> None:
    from kvferry.kernels import reference
    from kvferry.kernels import triton as kernels

    torch.manual_seed(1)
    fused = torch.randn(20, 10, head_dim, device="cuda").to(dtype)  # 6 queries, 2 keys, 2 values
    angles = torch.randn(20, 1, head_dim, device="cuda")
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = torch.full((4, 3, 2, 2, 8, head_dim), torch.nan, device="cuda", dtype=dtype)
    slots = torch.randperm(32, device="cuda")[:20]
    slots[7] = -1
    q = kernels.rope_write_kv(fused[:, :8], fused[:, 8:], cos, sin, pool, LAYER, slots)
    turned = reference.rope(fused[:, :8].float(), cos.float(), sin.float())
    assert torch.allclose(q.float(), turned[:, :6], atol=3 * TOLERANCE[dtype])
    written = slots >= 0
    blocks, offsets = slots[written] // 8, slots[written] % 8
    held = pool[:, LAYER].float()
    assert torch.allclose(
        held[blocks, 0, :, offsets], turned[written][:, 6:], atol=3 * TOLERANCE[dtype]
    )
    assert torch.equal(held[blocks, 1, :, offsets], fused[written][:, 8:].float())
    assert int(pool.isfinite().sum()) == 19 * 2 * 2 * head_dim


def test_blocks_are_copied_gathered_and_scattered() -> None:
    from kvferry.kernels import triton as kernels

    pool = torch.randint(256, (9, 5000), dtype=torch.uint8, device="cuda")
    before = pool.clone()
    kernels.copy_blocks(pool, [(0, 1), (1, 2), (4, 8)])
    assert torch.equal(pool[[1, 2, 8]], before[[0, 1, 4]])
    ids = torch.tensor([3, 3, 7], device="cuda")
    out = torch.empty(3, 5000, dtype=torch.uint8, device="cuda")
    kernels.gather_blocks(pool, ids, out)
    assert torch.equal(out, pool[ids])
    kernels.scatter_blocks(out, pool, torch.tensor([0, 5, 6], device="cuda"))
    assert torch.equal(pool[[0, 5, 6]], out)
