"""What an owner's lists omit is let go after two in a row, and never by a list older than it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.request import Attempt, RequestId
from kvferry.worker.wanted import MISSES_TO_RELEASE, EndedAttempts, WantedMark


def released_at(mark: WantedMark, lists: list[tuple[bool, int]]) -> int | None:
    """Place of the first list that releases the thing."""
    for place, (named, speaks_up_to) in enumerate(lists):
        if mark.judge(named, speaks_up_to):
            return place
    return None


def test_two_lists_in_a_row_without_it_release_a_thing_and_one_does_not() -> None:
    assert MISSES_TO_RELEASE == 2
    mark = WantedMark(since=4)
    assert not mark.judge(named=False, speaks_up_to=4)
    assert mark.judge(named=False, speaks_up_to=5)


def test_a_list_that_names_it_begins_the_count_anew() -> None:
    mark = WantedMark(since=4)
    lists = [(False, 5), (True, 6), (False, 7), (True, 8), (False, 9), (False, 10)]
    assert released_at(mark, lists) == 5


@pytest.mark.parametrize("num_lists", [1, 2, 3, 50])
def test_a_list_older_than_the_thing_does_not_judge_it(num_lists: int) -> None:
    mark = WantedMark(since=4)
    assert released_at(mark, [(False, 3)] * num_lists) is None
    assert not mark.judge(named=False, speaks_up_to=4), "what was not judged was no miss"


def test_a_thing_asked_for_again_is_not_judged_by_lists_before_that() -> None:
    mark = WantedMark(since=4)
    mark.judge(named=False, speaks_up_to=5)
    mark.since = 9
    assert not mark.judge(named=False, speaks_up_to=8)


@given(st.integers(0, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 10))))
def test_release_equals_two_judging_lists_without_a_naming_one_between(
    since: int, lists: list[tuple[bool, int]]
) -> None:
    judging = [
        (place, named) for place, (named, up_to) in enumerate(lists) if named or up_to >= since
    ]
    expected = next(
        (later[0] for earlier, later in pairwise(judging) if not earlier[1] and not later[1]),
        None,
    )
    assert released_at(WantedMark(since), lists) == expected


def attempt(number: int, router_epoch: int = 1) -> Attempt:
    return Attempt(router_epoch, number)


A, B = RequestId("a"), RequestId("b")


def test_an_ended_attempt_covers_itself_and_older_ones_only() -> None:
    ended = EndedAttempts()
    ended.add(A, attempt(3))
    assert [ended.covers(A, attempt(n)) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not ended.covers(A, attempt(1, router_epoch=2)), "a later router's attempt is newer"
    assert not ended.covers(B, attempt(1))


def test_an_older_attempt_that_ends_later_takes_nothing_back() -> None:
    ended = EndedAttempts()
    ended.add(A, attempt(3))
    ended.add(A, attempt(1))
    assert ended.covers(A, attempt(3))


def test_memory_of_ended_attempts_is_bounded_and_keeps_the_latest() -> None:
    ended = EndedAttempts(capacity=3)
    for name in "abc":
        ended.add(RequestId(name), attempt(1))
    ended.add(A, attempt(2))  # "a" is the latest now, "b" the oldest
    for name in "de":
        ended.add(RequestId(name), attempt(1))
    known = [name for name in "abcde" if ended.covers(RequestId(name), attempt(1))]
    assert known == ["a", "d", "e"]


def test_asking_about_a_request_creates_no_memory_of_it() -> None:
    ended = EndedAttempts(capacity=1)
    ended.add(A, attempt(1))
    for number in range(100):
        assert not ended.covers(RequestId(f"r{number}"), attempt(1))
    assert ended.covers(A, attempt(1))
