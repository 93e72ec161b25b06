"""The block tables of a batch as one matrix, of which each step writes only what is new.

A row belongs to one list of block ids for as long as the list comes back; of a list that has grown
only the end is read (``ScheduledSequence.block_table`` says when a list is another one). Knows
neither tensors nor sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockOutOfRange(ValueError):
    """A table names a block that the pool does not have, or covers too few positions."""


class TableRows:
    """Rows of block ids, kept between steps.

    Invariant: row ``r`` holds the first ``filled[r]`` ids of ``tables[r]``, all of them below
    ``num_blocks``; ``row_of`` finds the row of a table by its identity, which ``tables`` keeps
    from being given to another object.
    """

    def __init__(self, max_rows: int, max_blocks: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rows = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._tables: list[Sequence[int] | None] = [None] * max_rows
        self._filled = [0] * max_rows
        self._row_of: dict[int, int] = {}
        self._unused = list(range(max_rows))

    def row(self, table: Sequence[int], num_blocks: int) -> int:
        """The row that holds the first ``num_blocks`` (at least 1) ids of ``table``.

        Raises BlockOutOfRange, or IndexError where no row is left: ``make_room`` first.
        """
        row = self._row_of.get(id(table))
        if row is None:
            row = self._unused[-1]
            self._fill(row, table, 0, num_blocks)
            self._unused.pop()
            self._tables[row] = table
            self._row_of[id(table)] = row
        elif self._filled[row] < num_blocks:
            self._fill(row, table, self._filled[row], num_blocks)
        return row

    def make_room(self, tables: Sequence[Sequence[int]]) -> None:
        """Have a row for each of ``tables``; if need be, the rows of all others are given up."""
        missing = sum(id(table) not in self._row_of for table in tables)
        if missing <= len(self._unused):
            return
        kept = {id(table) for table in tables}
        for name in [name for name in self._row_of if name not in kept]:
            row = self._row_of.pop(name)
            self._tables[row] = None
            self._unused.append(row)

    def gather(self, rows: Sequence[int], width: int, out: NDArray[np.int32]) -> None:
        """Copy the first ``width`` ids of ``rows``, in this order, into the top left of ``out``."""
        out[: len(rows), :width] = self._rows[np.asarray(rows), :width]

    def _fill(self, row: int, table: Sequence[int], first: int, last: int) -> None:
        new = table[first:last]
        if len(new) < last - first or min(new) < 0 or max(new) >= self._num_blocks:
            raise BlockOutOfRange(f"{list(new)}, wanted {last - first} below {self._num_blocks}")
        self._rows[row, first:last] = new
        self._filled[row] = last
