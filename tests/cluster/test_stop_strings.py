"""Stop strings are found as in the whole text, wherever its pieces begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.stop_strings import StopStrings


def naive(stops: Sequence[str], text: str, after: int = 0) -> tuple[str, str | None]:
    """Read the text character by character; the first moment at which it ends with a stop.

    What ends within the first ``after`` characters does not count.
    """
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """What is shown of the pieces, and what was found."""
    search = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stop = search.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + search.finish(), None


few = st.text(alphabet="ab", min_size=1, max_size=5)
some_stops = st.lists(few, max_size=4)
pieces_of_text = st.lists(st.text(alphabet="abc", max_size=6), max_size=10)


@given(some_stops, pieces_of_text)
def test_any_splitting_finds_what_the_whole_text_holds(stops: list[str], pieces: list[str]) -> None:
    assert streamed(stops, pieces) == naive(stops, "".join(pieces))


@given(st.lists(st.text(min_size=1, max_size=3), max_size=3), st.text(max_size=20), st.data())
def test_any_alphabet_and_any_splitting(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    borders = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert streamed(stops, pieces) == naive(stops, text)


@given(some_stops, pieces_of_text, st.integers(0, 10))
def test_a_stop_string_counts_where_it_becomes_complete(
    stops: list[str], pieces: list[str], num_early: int
) -> None:
    search = StopStrings(stops)
    shown, found = "", None
    for place, piece in enumerate(pieces):
        text, found = search.push(piece, may_stop=place >= num_early)
        shown += text
        if found is not None:
            break
    else:
        shown += search.finish()
    early = len("".join(pieces[:num_early]))
    assert (shown, found) == naive(stops, "".join(pieces), early)


@given(some_stops, pieces_of_text)
def test_the_string_found_is_shown_if_asked_for(stops: list[str], pieces: list[str]) -> None:
    search = StopStrings(stops, include=True)
    shown, found = "", None
    for piece in pieces:
        text, found = search.push(piece)
        shown += text
        if found is not None:
            break
    else:
        shown += search.finish()
    before, wanted = naive(stops, "".join(pieces))
    assert (shown, found) == (before + (wanted or ""), wanted)


@given(some_stops, pieces_of_text)
def test_nothing_is_shown_that_may_belong_to_a_stop_and_nothing_is_held_in_vain(
    stops: list[str], pieces: list[str]
) -> None:
    search = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        text, stop = search.push(piece)
        seen, shown = seen + piece, shown + text
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        longest = max((b for b in beginnings if seen.endswith(b)), key=len, default="")
        assert held == longest


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["abcEND"], ("abc", "END")),
        (["END"], ["abcE", "N", "Dxyz"], ("abc", "END")),
        (["END"], ["abcEN", "x"], ("abcENx", None)),
        (["END"], ["abcEN"], ("abcEN", None)),
        (["END"], ["EEND"], ("E", "END")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["b", "abc"], ["abc"], ("a", "b")),  # complete first, though it begins later
        (["bc", "abcd"], ["abcd"], ("a", "bc")),
        (["bc", "abcd"], ["ab", "cd"], ("a", "bc")),
        (["bc", "abc"], ["abc"], ("", "abc")),  # of those complete at once, the longest
        (["x", "y"], ["1y2x"], ("1", "y")),
        ([], ["anything"], ("anything", None)),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", "\n\n")),
        (["é"], ["caf", "é!"], ("caf", "é")),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert streamed(stops, pieces) == expected


def test_a_stop_string_that_does_not_count_is_not_held_back_whole() -> None:
    search = StopStrings(["ab", "xyzw"])
    assert search.push("ab", may_stop=False) == ("ab", None)


def test_what_was_held_back_is_given_out_once() -> None:
    search = StopStrings(["END"])
    assert search.push("xEN") == ("x", None)
    assert search.finish() == "EN"
    assert search.finish() == ""
