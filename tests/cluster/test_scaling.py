"""Growing and shrinking: what is asked for can serve, and the right ones come and go."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.cli.app import main
from kvferry.cluster.client import Client
from kvferry.cluster.errors import DeadlineExceeded, InvalidRequest, NotReady
from kvferry.cluster.scaling import (
    ScaleDone,
    ScaleOrder,
    check_counts,
    names_to_add,
    names_to_drain,
)
from kvferry.worker.messages import Role
from tests.cluster import documents
from tests.stack import LONG_S, Stack, eventually


def test_roles_that_are_not_named_stay_and_what_could_not_serve_is_refused() -> None:
    present = {"prefill": 1, "decode": 2}
    assert check_counts({"decode": 5}, present) == {"prefill": 1, "decode": 5, "colocated": 0}
    for counts in ({"decode": 0}, {"prefill": 0}, {"decode": -1}, {"decode": 1025}):
        with pytest.raises(InvalidRequest, match="wanted"):
            check_counts(counts, present)
    assert check_counts({"prefill": 0, "decode": 0, "colocated": 1}, present)["colocated"] == 1


def test_new_workers_get_the_lowest_free_numbers() -> None:
    assert names_to_add("decode", 3, {"decode-1", "prefill-0"}) == [
        "decode-0",
        "decode-2",
        "decode-3",
    ]
    assert names_to_add("decode", 0, {}) == []


def test_the_newest_go_first_and_those_that_are_down_before_all() -> None:
    names = ["decode-0", "decode-2", "decode-10", "decode-1"]
    assert names_to_drain(2, names, ()) == ["decode-10", "decode-2"]
    assert names_to_drain(2, names, {"decode-0"}) == ["decode-0", "decode-10"]
    assert names_to_drain(7, names, {"decode-0"}) == []


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_what_comes_and_goes_makes_the_number_that_was_asked_for(
    indices: set[int], number: int
) -> None:
    names = {f"decode-{at}" for at in indices}
    after = names | set(names_to_add("decode", number - len(names), names))
    after -= set(names_to_drain(number, names, ()))
    assert len(after) == number


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, num_decode=2) as running:
        yield running


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def take_order(stack: Stack) -> ScaleOrder:
    """As a launcher does, by way of the router's news."""

    def look() -> ScaleOrder | None:
        return stack.on_loop(lambda: stack.node.orders.popleft() if stack.node.orders else None)

    order = eventually("an order comes", look)
    assert order is not None
    return order


def test_an_order_is_done_when_there_are_as_many_as_were_asked_for(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    with Client(stack.endpoint) as client:
        scaling = threads.submit(client.scale, prefill=2, decode=1)
        order = take_order(stack)
        assert order.counts == {"prefill": 2, "decode": 1, "colocated": 0}
        stack.on_loop(lambda: stack.node.scale_done(ScaleDone(order.order_id)))
        stack.on_loop(lambda: stack.node.begin_drain("decode-1"))
        eventually("it is let go", lambda: bool(stack.node.drained))
        assert not scaling.done()
        stack.join("prefill-1", (Role.PREFILL,))
        there = scaling.result(LONG_S)
        assert (there.prefill, there.decode, there.colocated) == (2, 1, 0)
        stack.on_loop(lambda: stack.node.begin_drain("decode-7"))  # unknown: nothing


def test_why_there_was_no_place_is_told_and_so_is_a_later_order(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    with Client(stack.endpoint) as client:
        first = threads.submit(client.scale, decode=9)
        order = take_order(stack)
        stack.on_loop(lambda: stack.node.scale_done(ScaleDone(order.order_id, "no room for it")))
        with pytest.raises(NotReady, match="no room for it"):
            first.result(LONG_S)
        second = threads.submit(client.scale, decode=9)
        order = take_order(stack)
        stack.on_loop(lambda: stack.node.scale_done(ScaleDone(order.order_id)))
        third = threads.submit(client.scale, decode=2)
        take_order(stack)
        with pytest.raises(NotReady, match="another order"):
            second.result(LONG_S)
        stack.on_loop(lambda: stack.node.scale_done(ScaleDone(order.order_id + 1)))
        assert third.result(LONG_S).decode == 2


def test_refusals_and_a_time_limit(stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        with pytest.raises(InvalidRequest, match="'kvferry down' ends a cluster"):
            client.scale(decode=0)
        with pytest.raises(DeadlineExceeded, match=r"1 prefill, 2 decode, wanted 1 prefill, 3 de"):
            client.scale(decode=3, timeout_s=0.2)


def test_the_command_scales_and_says_so(
    stack: Stack, threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--endpoint", stack.endpoint, "--json"]

    def answer() -> None:
        order = take_order(stack)
        stack.on_loop(lambda: stack.node.scale_done(ScaleDone(order.order_id)))

    answering = threads.submit(answer)
    assert main(["scale", "--decode", "2", *flags]) == 0
    answering.result(LONG_S)
    document = documents.parse(capsys.readouterr().out)
    assert (document["prefill"], document["decode"], document["colocated"]) == (1, 2, 0)
    assert main(["scale", "--decode", "0", *flags]) == 2
    assert documents.parse(capsys.readouterr().out)["decode"] is None
    assert main(["scale", *flags]) == 2
    assert "say how many" in documents.parse(capsys.readouterr().out)["error"]["message"]
