"""Prompts of the golden tests: one of each awkward length.

Chosen so that the reference's two best tokens differ by more than 1e-3 at each of 32 steps, which
the tests assert: then equal tokens are what a correct engine must give.
"""

from __future__ import annotations

PASSAGE = (
    "The ferry leaves the north bank at seven in the morning. Its hold is divided into numbered "
    "blocks, and every block has a tag that says who packed it, when it was sealed and for whom "
    "it waits. The clerk on the south bank keeps the same list. He opens nothing that he did not "
    "expect, signs for what is whole, and sends back a note for what is torn. When the river is "
    "high the ferry waits; when the clerk is ill another takes his list and goes on where he "
    "stopped. Nobody unpacks a block twice, and nobody packs one again while it is on the water. "
)


def long_text(num_items: int) -> str:
    """A list of numbered lines, as long as wanted, that does not repeat exactly."""
    return "".join(
        f"{i}. Block {i * 37 % 101} holds {i * 13 % 29 + 2} letters for pier {i % 7 + 1}.\n"
        for i in range(1, num_items + 1)
    )
