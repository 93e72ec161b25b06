"""Lines that strangers cause: a burst, then few, and none is forgotten in the number left out."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_cache.line_limit import MAX_LINE_CHARS, LineLimit

BURST, PER_S = 5, 2.0


class Clock:
    """Told what time it is."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def said(line: str | None) -> int:
    """How many lines a line stands for."""
    if line is None:
        return 0
    found = re.search(r"\((\d+) more were not logged\)", line)
    return 1 + (int(found[1]) if found else 0)


@given(pauses=st.lists(st.floats(0.0, 3.0), max_size=60))
def test_no_more_than_a_burst_and_a_rate_and_all_are_accounted_for(pauses: list[float]) -> None:
    clock = Clock()
    limit = LineLimit(clock, BURST, PER_S)
    logged = accounted = 0
    for pause in pauses:
        clock.now += pause
        line = limit.line("kind", "text")
        logged += line is not None
        accounted += said(line)
        assert logged <= BURST + (clock.now - 100.0) * PER_S + 1e-6
    clock.now += 1 / PER_S
    assert accounted + said(limit.line("kind", "text")) == len(pauses) + 1


def test_kinds_do_not_silence_each_other() -> None:
    limit = LineLimit(Clock(), BURST, PER_S)
    flood = [limit.line(("http", "tls"), "x") for _ in range(100)]
    assert sum(line is not None for line in flood) == BURST
    assert limit.line(("metrics", "tls"), "y") == "y"


def test_after_a_silence_the_next_line_says_how_many_there_were() -> None:
    clock = Clock()
    limit = LineLimit(clock, BURST, PER_S)
    for _ in range(BURST + 7):
        limit.line("kind", "x")
    clock.now += 0.5
    assert limit.line("kind", "x") == "x (7 more were not logged)"
    clock.now += 0.5
    assert limit.line("kind", "x") == "x"


@given(text=st.text(), times=st.integers(1, 5000))
def test_a_line_is_one_and_short(text: str, times: int) -> None:
    line = LineLimit(Clock()).line("kind", text * times)
    assert line is not None and line.isprintable() and len(line) <= MAX_LINE_CHARS + 3


def test_a_clock_that_goes_back_gives_nothing() -> None:
    clock = Clock()
    limit = LineLimit(clock, 1, PER_S)
    assert limit.line("kind", "x") == "x"
    clock.now -= 50.0
    assert limit.line("kind", "x") is None
