"""Positions are a set, however they came and were asked for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.decode_worker.positions import Positions

RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(RUNS, st.integers(0, 32), st.integers(0, 32))
def test_what_is_missing_is_what_was_never_added(
    added: list[tuple[int, int]], start: int, end: int
) -> None:
    positions, model = Positions(), set[int]()
    for first, last in added:
        positions.add(first, last)
        model.update(range(first, last))
    gaps = positions.missing(start, end)
    assert [p for gap in gaps for p in range(*gap)] == [
        p for p in range(start, end) if p not in model
    ]
    assert all(a[1] < b[0] for a, b in pairwise(gaps)), "runs are whole"
    assert positions.leading == next(p for p in range(32) if p not in model)
