from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_cache.layout import DTYPE_BYTES, KVCacheLayout, KVGroup

SCALED = {"int8": "float32"}


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    group = KVGroup(
        first_layer=0,
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 20)),
        dtype=dtype,
        num_planes=draw(st.integers(1, 2)),
        scales=draw(st.sampled_from(["", SCALED.get(dtype, "")])),
    )
    return KVCacheLayout(draw(st.integers(1, 20)), (group,))


@given(layouts())
def test_rows_and_scales_fill_a_block_and_do_not_overlap(layout: KVCacheLayout) -> None:
    group, size = layout.groups[0], layout.block_size
    row_bytes = group.head_dim * DTYPE_BYTES[group.dtype]
    scale_bytes = DTYPE_BYTES[group.scales] if group.scales else 0
    *outer, _, _ = layout.block_shape()
    taken: list[int] = []
    for layer, plane, head in product(*map(range, outer)):
        run = layout.byte_offset(layer, plane, head, 0)
        for slot in range(size):
            row = layout.byte_offset(layer, plane, head, slot)
            assert row == run + slot * row_bytes  # each run is contiguous
            taken += range(row, row + row_bytes)
            scale = run + group.scales_offset(size) + slot * scale_bytes
            assert not scale_bytes or scale % scale_bytes == 0
            taken += range(scale, scale + scale_bytes)
    assert len(set(taken)) == len(taken) and min(taken) == 0
    padding = (layout.block_bytes() - len(taken)) / prod(outer)
    assert max(taken) < layout.block_bytes() and padding in range(max(scale_bytes, 1))


def test_a_block_without_scales_has_nothing_but_elements() -> None:
    group = KVGroup(0, 30, 3, 64, "bfloat16")
    assert KVCacheLayout(16, (group,)).block_bytes() == 30 * 2 * 3 * 16 * 64 * 2


def test_a_scale_per_row_costs_a_sixteenth_of_rows_of_64() -> None:
    group = KVGroup(0, 30, 3, 64, "int8", scales="float32")
    assert KVCacheLayout(16, (group,)).block_bytes() == 30 * 2 * 3 * 16 * (64 + 4)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_blocks_of_16_keep_rows_and_scales_on_cache_lines(head_dim: int) -> None:
    group = KVGroup(0, 2, 2, head_dim, "int8", scales="float32")
    assert group.scales_offset(16) % 64 == 0 and group.run_bytes(16) % 64 == 0
