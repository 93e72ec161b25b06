from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import reference


@settings(max_examples=40, deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_write_kv_fills_the_mapped_slots_and_no_other(
    num_blocks: int, block_size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    layers, heads, dim, layer = 3, 2, 4, 2
    slots = data.draw(
        st.lists(st.integers(0, num_blocks * block_size - 1), unique=True, min_size=1)
    )
    pool = torch.full((num_blocks, layers, 2, heads, block_size, dim), -1.0, dtype=dtype)
    expected = pool.clone()
    k = torch.arange(len(slots) * heads * dim, dtype=torch.float32).view(len(slots), heads, dim)
    v = k + 0.5
    for token, slot in enumerate(slots):
        for plane, values in enumerate((k, v)):
            block, offset = divmod(slot, block_size)
            expected[block, layer, plane, :, offset] = values[token].to(dtype)
    reference.write_kv(pool, layer, k, v, torch.tensor(slots))
    assert torch.equal(pool, expected)


def test_copy_blocks_copies_all_layers_and_reads_before_it_writes() -> None:
    pool = torch.randn(5, 2, 2, 3, 4, 8)
    before = pool.clone()
    reference.copy_blocks(pool, [(0, 1), (1, 2), (4, 0)])
    assert torch.equal(pool, before[[4, 0, 1, 3, 4]])


def test_copy_blocks_without_pairs_changes_nothing() -> None:
    pool = torch.randn(2, 1, 2, 1, 2, 2)
    before = pool.clone()
    reference.copy_blocks(pool, [])
    assert torch.equal(pool, before)
