"""Which captured graph serves a step, as plain data.

A graph is recorded for a number of rows and a width of block tables, and serves every decode step
of no more than these. Its further rows are *padding*: each computes one token of its own at
position 0, writes its KV to a slot of the runner's scratch blocks, which no sequence has, and
attends to one slot of these. So padding writes to nobody's block and reads nobody's; and since the
rows of a step meet in attention only, through their block tables, what a padding row computes
reaches no other row.

Numbers of rows double, and widths grow fourfold: a step computes at most twice as many rows as it
has, and there are few graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.batch import ScheduledSequence

LEAST_WIDTH = 32


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Rows of a graph, and blocks that each of them may have."""

    num_rows: int
    width: int


def row_counts(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, … and ``max_num_seqs``."""
    return _up_to(max_num_seqs, 1, 2)


def widths(max_blocks: int) -> tuple[int, ...]:
    """32, 128, 512, … and ``max_blocks``, in blocks."""
    return _up_to(max_blocks, LEAST_WIDTH, 4)


def graph_keys(max_num_seqs: int, max_blocks: int) -> tuple[GraphKey, ...]:
    """Every graph that there may be."""
    return tuple(
        GraphKey(rows, width) for rows in row_counts(max_num_seqs) for width in widths(max_blocks)
    )


def is_decode(sequences: Sequence[ScheduledSequence]) -> bool:
    """Whether a step is one that graphs serve: a token of each sequence, sampled, and nothing else
    is wanted of it.
    """
    return bool(sequences) and all(
        len(seq.token_ids) == 1 and seq.sample and not seq.prompt_targets for seq in sequences
    )


def graph_key(
    sequences: Sequence[ScheduledSequence], num_blocks: int, max_num_seqs: int, max_blocks: int
) -> GraphKey | None:
    """The least graph that serves a step; None for one that has to be computed without.

    ``num_blocks`` are those of the longest sequence after the step.
    """
    if not is_decode(sequences) or len(sequences) > max_num_seqs or num_blocks > max_blocks:
        return None
    rows = next(count for count in row_counts(max_num_seqs) if count >= len(sequences))
    width = next(width for width in widths(max_blocks) if width >= num_blocks)
    return GraphKey(rows, width)


def _up_to(most: int, least: int, factor: int) -> tuple[int, ...]:
    found = []
    while least < most:
        found.append(least)
        least *= factor
    return (*found, most)
