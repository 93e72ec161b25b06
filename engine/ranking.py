"""Who comes first: by arrival, or by priority with ageing."""

from __future__ import annotations


def rank(priority: int, arrived_at: float, ageing: float | None) -> float:
    """How late a request stands in a line: the lowest first, of equal ones the first to arrive.

    A lower priority comes earlier. One level of it is worth ``ageing`` seconds of waiting, so that
    the order of two requests never changes, and one that arrives now is overtaken by none that
    arrives more than ``ageing`` seconds per level later. None: by arrival alone.
    """
    return 0.0 if ageing is None else arrived_at + priority * ageing
