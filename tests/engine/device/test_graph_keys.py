"""Graph keys are data: which step has which, and that every step that may have one has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.batch import ScheduledSequence
from kvferry.engine.device.graph_keys import (
    GraphKey,
    graph_key,
    graph_keys,
    is_decode,
    row_counts,
    widths,
)
from kvferry.engine.request import SamplingParams

DECODE = ScheduledSequence([5], 9, [1, 2], True, SamplingParams(), (0,), 3)


def test_rows_double_and_widths_grow_fourfold_up_to_the_most_there_are() -> None:
    assert row_counts(32) == (1, 2, 4, 8, 16, 32)
    assert row_counts(24) == (1, 2, 4, 8, 16, 24)
    assert row_counts(1) == (1,)
    assert widths(512) == (32, 128, 512)
    assert widths(600) == (32, 128, 512, 600)
    assert widths(20) == (20,)
    assert graph_keys(2, 64) == (
        GraphKey(1, 32),
        GraphKey(1, 64),
        GraphKey(2, 32),
        GraphKey(2, 64),
    )


@given(
    st.integers(1, 300).flatmap(lambda most: st.tuples(st.integers(1, most), st.just(most))),
    st.integers(1, 3000).flatmap(lambda most: st.tuples(st.integers(1, most), st.just(most))),
)
def test_the_least_graph_that_has_the_rows_and_the_width_serves_a_decode_step(
    seqs: tuple[int, int], blocks: tuple[int, int]
) -> None:
    (num_seqs, max_seqs), (num_blocks, max_blocks) = seqs, blocks
    key = graph_key([DECODE] * num_seqs, num_blocks, max_seqs, max_blocks)
    fitting = [
        each
        for each in graph_keys(max_seqs, max_blocks)
        if each.num_rows >= num_seqs and each.width >= num_blocks
    ]
    assert key == min(fitting)
    assert key.num_rows < 2 * num_seqs or key.num_rows == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(DECODE, token_ids=[5, 6]),
        replace(DECODE, sample=False),
        replace(DECODE, prompt_targets=(7,)),
    ],
)
def test_a_step_with_anything_but_decode_in_it_has_no_graph(other: ScheduledSequence) -> None:
    assert is_decode([DECODE, DECODE])
    assert graph_key([DECODE, other, DECODE], 2, 8, 64) is None


def test_an_empty_step_and_one_beyond_the_limits_have_no_graph() -> None:
    assert graph_key([], 0, 8, 64) is None
    assert graph_key([DECODE] * 9, 2, 8, 64) is None
    assert graph_key([DECODE], 65, 8, 64) is None


def test_several_branches_of_one_sequence_are_sampled_behind_the_graph() -> None:
    branched = replace(DECODE, branches=(0, 1, 2))
    assert graph_key([branched], 2, 8, 64) == GraphKey(1, 32)
