"""Tiny batches for the interpreter, and the attention of the Triton kernels over them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from kvferry.kernels import triton as kernels
from kvferry.kernels.triton.tuning import Tile
from tests.kernels.dense import LAYER, Batch, Case

SMALL = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE)) -> Case:
    """Chunks of few tokens behind short contexts: an inner tile takes milliseconds here."""
    start = st.one_of(st.integers(0, 20), st.sampled_from([15, 16, 31, 32, 47]))
    length = st.one_of(st.just(1), st.integers(2, 12))
    return Case(
        chunks=tuple(draw(st.lists(st.tuples(start, length), min_size=1, max_size=3))),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 32])),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([2, 8, 16, 24, 64])),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**31)),
        window=draw(st.one_of(st.none(), st.integers(1, 24), st.just(100))),
    )


def attend(batch: Batch, scale: float, window: int | None = None, **options: Any) -> torch.Tensor:
    """In small tiles unless told otherwise."""
    return kernels.paged_attention(
        batch.q,
        batch.pool,
        LAYER,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        scale,
        window,
        **{"tile": SMALL, **options},
    )


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; NaN where anything is."""
    return float((found.double() - expected).abs().max())
