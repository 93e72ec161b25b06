"""The kept block tables equal those written anew, however sequences come, grow and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.table_rows import BlockOutOfRange, TableRows

MAX_ROWS, MAX_BLOCKS, NUM_BLOCKS = 4, 9, 50


@settings(deadline=None)
@given(st.data())
def test_rows_are_those_of_the_tables_shown(data: st.DataObject) -> None:
    rows = TableRows(MAX_ROWS, MAX_BLOCKS, NUM_BLOCKS)
    tables: list[list[int]] = [[i] for i in range(7)]
    out = np.zeros((MAX_ROWS, MAX_BLOCKS), dtype=np.int32)
    block = st.integers(0, NUM_BLOCKS - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        for place in data.draw(st.lists(st.integers(0, 6), max_size=4)):
            match data.draw(st.sampled_from(["grow", "change", "free"])):
                case "grow" if len(tables[place]) < MAX_BLOCKS:
                    tables[place].append(data.draw(block))
                case "change":
                    tables[place] = [data.draw(block) for _ in tables[place]]
                case "free":
                    tables[place] = [data.draw(block)]
        batch = data.draw(st.permutations(tables))[: data.draw(st.integers(1, MAX_ROWS))]
        used = [data.draw(st.integers(1, len(table))) for table in batch]
        rows.make_room(batch)
        found = [rows.row(table, count) for table, count in zip(batch, used, strict=True)]
        rows.gather(found, max(used), out)
        for place, (table, count) in enumerate(zip(batch, used, strict=True)):
            assert out[place, :count].tolist() == table[:count]


@pytest.mark.parametrize(("table", "count"), [([3, 50], 2), ([3, -1], 2), ([3], 2)])
def test_a_bad_table_is_refused_and_takes_no_row(table: list[int], count: int) -> None:
    rows = TableRows(1, MAX_BLOCKS, NUM_BLOCKS)
    with pytest.raises(BlockOutOfRange):
        rows.row(table, count)
    assert rows.row([1, 2], 2) == 0


def test_a_table_that_has_grown_past_the_pool_is_refused() -> None:
    rows = TableRows(1, MAX_BLOCKS, NUM_BLOCKS)
    table = [1, 2]
    rows.row(table, 2)
    table.append(NUM_BLOCKS)
    with pytest.raises(BlockOutOfRange, match="50"):
        rows.row(table, 3)


def test_only_the_end_of_a_known_table_is_read() -> None:
    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            reads.append(key)
            return super().__getitem__(key)

    reads: list[object] = []
    rows = TableRows(2, MAX_BLOCKS, NUM_BLOCKS)
    table = Watched([1, 2, 3])
    rows.row(table, 3)
    table.append(4)
    rows.row(table, 3)
    rows.row(table, 4)
    assert reads == [slice(0, 3), slice(3, 4)]
