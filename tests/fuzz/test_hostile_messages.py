"""Hostile messages to every party, among those that belong there: refused, never a crash or a leak.

The short form of ``make fuzz``.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.arena import Arena


@pytest.mark.parametrize("as_bytes", [False, True], ids=["values", "bytes"])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_arrives_nothing_raises_and_nothing_is_held_in_the_end(
    as_bytes: bool, seed: int
) -> None:
    arena = Arena(Random(seed))
    arena.play(60, as_bytes)
    assert arena.outcomes.total() >= 60
