"""Which token positions of a prompt are here, whatever blocks they came in. Pure."""

from __future__ import annotations


class Positions:
    """A set of positions, as runs ``[start, end)`` in order that neither touch nor overlap."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    @property
    def leading(self) -> int:
        """Positions from 0 on, without a gap."""
        return self._runs[0][1] if self._runs and self._runs[0][0] == 0 else 0

    def add(self, start: int, end: int) -> None:
        """These positions are here too; any of them may have been before."""
        if start >= end:
            return
        apart = []
        for first, last in self._runs:
            if last < start or first > end:
                apart.append((first, last))
            else:
                start, end = min(start, first), max(end, last)
        self._runs = sorted([*apart, (start, end)])

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of ``[start, end)`` is not here, as runs in order."""
        gaps = []
        for first, last in self._runs:
            if first > start and start < end:
                gaps.append((start, min(first, end)))
            start = max(start, last)
        if start < end:
            gaps.append((start, end))
        return gaps
