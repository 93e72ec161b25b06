"""Hostile messages to every party, among those that belong there: refused, never a crash or a leak.

The short form of ``make fuzz``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.arena import Arena
from tests.fuzz.handshakes import knock_at_locked_tcp, knock_at_shared_memory, knock_at_tcp


@pytest.mark.parametrize("as_bytes", [False, True], ids=["values", "bytes"])
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_arrives_nothing_raises_and_nothing_is_held_in_the_end(
    as_bytes: bool, seed: int
) -> None:
    arena = Arena(Random(seed))
    arena.play(50, as_bytes)
    assert arena.outcomes.total() >= 50


@pytest.mark.parametrize("knock", [knock_at_shared_memory, knock_at_tcp, knock_at_locked_tcp])
def test_damaged_handshakes_are_counted_and_the_door_stays_open(
    knock: Callable[[int, Random], Counter[str]],
) -> None:
    outcomes = knock(200, Random(1))
    assert outcomes["malformed"] + outcomes["unauthenticated"] > 100
    # over TCP some hang up before a word
    assert outcomes.total() == 200 or knock is not knock_at_shared_memory
