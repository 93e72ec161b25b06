"""Growing and shrinking: what is asked for can serve, and the right ones come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.cli.app import main
from kvferry.cluster.client import Client
from kvferry.cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVFerryError,
    NotPlaced,
    NotReady,
)
from kvferry.cluster.registry import WorkerRegistry
from kvferry.cluster.scale_desk import ScaleDesk
from kvferry.cluster.scaling import (
    ScaleDone,
    ScaleOrder,
    Staff,
    check_counts,
    names_to_add,
    names_to_drain,
    plan,
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


def staff(*names: str, leaving: tuple[str, ...] = (), down: tuple[str, ...] = ()) -> Staff:
    roles = {name: name.rpartition("-")[0] for name in names}
    return Staff(roles, frozenset(leaving), frozenset(down))


def test_a_role_that_is_not_named_keeps_those_that_are_down() -> None:
    there = staff("prefill-0", "decode-0", "decode-1", down=("decode-0", "decode-1"))
    made = plan({"prefill": 2}, there)
    assert made.wanted == {"prefill": 2, "decode": 2, "colocated": 0}
    assert (made.adding, made.draining, made.going) == ({"prefill-1": "prefill"}, (), frozenset())
    assert plan({"decode": 1}, there).draining == ("decode-1",)


def test_those_that_leave_count_no_more_but_keep_their_names() -> None:
    there = staff("prefill-0", "decode-0", "decode-1", leaving=("decode-0",))
    assert plan({"decode": 1}, there).draining == ()
    assert plan({"decode": 1}, there).going == {"decode-0"}
    grown = plan({"decode": 2}, there)
    assert (grown.adding, grown.draining) == ({"decode-2": "decode"}, ())
    assert grown.going == set()  # whoever grows need not wait for a stream to end
    other = plan({"prefill": 2}, there)
    assert other.wanted == {"prefill": 2, "decode": 1, "colocated": 0}
    assert other.going == set(), "it is not asked about decode workers"
    with pytest.raises(InvalidRequest, match="got 2 prefill, 0 decode, 0 colocated"):
        plan({"prefill": 2}, staff("prefill-0", "decode-0", leaving=("decode-0",)))


@given(
    st.sets(st.integers(0, 12), min_size=1),
    st.sets(st.integers(0, 12)),
    st.sets(st.integers(0, 12)),
    st.integers(1, 15),
)
def test_a_plan_comes_to_the_number_that_was_asked_for(
    names: set[int], leaving: set[int], down: set[int], number: int
) -> None:
    decode = {f"decode-{at}" for at in names}
    going = tuple(decode & {f"decode-{at}" for at in leaving})
    there = staff("prefill-0", *decode, leaving=going, down=tuple(f"decode-{at}" for at in down))
    made = plan({"decode": number}, there)
    assert not made.adding.keys() & there.names.keys()
    assert not set(made.draining) & there.leaving
    assert len((decode - there.leaving - set(made.draining)) | made.adding.keys()) == number


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


def take_order(stack: Stack, after: int = 0) -> ScaleOrder:
    """As a launcher does, by way of the router's news."""

    def look() -> ScaleOrder | None:
        orders = stack.on_loop(lambda: stack.node.news(0).orders)
        return next((order for order in orders if order.order_id > after), None)

    order = eventually("an order comes", look)
    assert order is not None
    return order


def settle(
    stack: Stack, order: ScaleOrder, error: KVFerryError | None = None, going: tuple[str, ...] = ()
) -> None:
    """The answer of a launcher that has a prefill worker and two that decode."""
    present = {"prefill": 1, "decode": 2}
    wanted = {} if error else check_counts(order.counts, present)
    done = ScaleDone(order.order_id, error, wanted, going)
    stack.on_loop(lambda: stack.node.scaling.done(done))


def test_an_order_is_done_when_there_are_as_many_as_were_asked_for(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    with Client(stack.endpoint) as client:
        scaling = threads.submit(client.scale, prefill=2, decode=1)
        order = take_order(stack)
        assert order.counts == {"prefill": 2, "decode": 1}
        stack.join("prefill-1", (Role.PREFILL,))
        settle(stack, order, going=("decode-1",))
        assert stack.on_loop(lambda: stack.node.news(0).orders) == ()
        stack.on_loop(lambda: stack.node.begin_drain("decode-1"))
        there = scaling.result(LONG_S)
        assert (there.prefill, there.decode, there.colocated) == (2, 1, 0)
        (gone,) = stack.on_loop(lambda: stack.node.news(0).lost)
        assert (gone.ref.node_id, gone.drained) == ("decode-1", True)
        stack.on_loop(lambda: stack.node.begin_drain("decode-7"))  # unknown: nothing


def test_only_what_was_named_is_ordered_and_waited_for(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    held = stack.workers["decode-1"]
    with Client(stack.endpoint) as client:
        stack.on_loop(lambda: stack.node.worker_died(held.ref, "killed"))
        scaling = threads.submit(client.scale, prefill=1)
        order = take_order(stack)
        assert order.counts == {"prefill": 1}
        settle(stack, order)  # of the other decode worker it is known that it comes again
        there = scaling.result(LONG_S)
        assert (there.prefill, there.decode) == (1, 2)


def test_an_order_is_told_until_it_is_answered_and_news_until_they_are_heard(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    lost = stack.workers["decode-1"].ref
    with Client(stack.endpoint) as client:
        scaling = threads.submit(client.scale, decode=1)
        order = take_order(stack)
        stack.on_loop(lambda: stack.node.worker_died(lost, "killed"))
        first = stack.on_loop(lambda: stack.node.news(0))
        again = stack.on_loop(lambda: stack.node.news(0))  # the next life of who watched
        assert first == again
        assert (first.orders, [death.ref for death in first.lost]) == ((order,), [lost])
        assert {ref.node_id for ref in first.members} == {"decode-0", "prefill-0"}
        heard = stack.on_loop(lambda: stack.node.news(first.number))
        assert (heard.orders, heard.lost) == ((order,), ())
        settle(stack, order)
        assert scaling.result(LONG_S).decode == 1


def test_a_worker_that_drains_counts_no_more_and_is_told_of(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    leaving = stack.workers["decode-1"]
    leaving.connector.held = True
    leaving.runner.allow(0)
    with Client(stack.endpoint) as client:
        stream = client.generate(token_ids=[5] * 24, max_tokens=4, ignore_eos=True)
        at = eventually("it is placed", lambda: placed(stack))
        assert at is not None
        scaling = threads.submit(client.scale, decode=1)
        order = take_order(stack)
        draining = threads.submit(client.drain, at)
        with pytest.raises(NotReady, match=f"{at} was drained meanwhile: order again"):
            scaling.result(LONG_S)
        news = stack.on_loop(lambda: stack.node.news(0))
        assert {ref.node_id for ref in news.draining} == {at}
        settle(stack, order)
        assert stack.on_loop(stack.node.scaling.num_workers)["decode"] == 1
        stack.release()
        list(stream)
        draining.result(LONG_S)


def placed(stack: Stack) -> str | None:
    def look() -> str | None:
        found = [r.decode for r in stack.router.requests.values() if r.decode is not None]
        return found[0].worker.node_id if found else None

    return stack.on_loop(look)


def test_why_there_was_no_place_is_told_and_so_is_a_later_order(
    stack: Stack, threads: ThreadPoolExecutor
) -> None:
    with Client(stack.endpoint) as client:
        first = threads.submit(client.scale, decode=9)
        order = take_order(stack)
        settle(stack, order, NotPlaced("no room for it"))
        with pytest.raises(NotReady, match="no room for it"):
            first.result(LONG_S)
        second = threads.submit(client.scale, decode=9)
        order = take_order(stack, order.order_id)
        settle(stack, order)
        third = threads.submit(client.scale, decode=2)
        last = take_order(stack, order.order_id)
        with pytest.raises(NotReady, match="another order"):
            second.result(LONG_S)
        settle(stack, last)
        assert third.result(LONG_S).decode == 2


def test_refusals_and_a_time_limit(stack: Stack, threads: ThreadPoolExecutor) -> None:
    with Client(stack.endpoint) as client:
        with pytest.raises(InvalidRequest, match="got -1 decode; wanted 0 to 1024 of each role"):
            client.scale(decode=-1)
        refused = threads.submit(client.scale, decode=0)
        order = take_order(stack)
        settle(stack, order, InvalidRequest("'kvferry down' ends a cluster"))
        with pytest.raises(InvalidRequest, match="'kvferry down' ends a cluster"):
            refused.result(LONG_S)
        with pytest.raises(DeadlineExceeded, match=r"1 prefill, 2 decode, wanted 3 decode; it go"):
            client.scale(decode=3, timeout_s=0.2)


def test_what_an_order_waits_for_is_told_to_who_waits_no_longer() -> None:
    async def run() -> None:
        desk = ScaleDesk(1, WorkerRegistry())
        waiting = asyncio.create_task(desk.scale({"decode": 3}, 0.01))
        await asyncio.sleep(0)
        (order,) = desk.unanswered()
        desk.says(order.order_id, "waiting for Ray to place decode-2 (1 CPU)")
        await waiting

    with pytest.raises(DeadlineExceeded, match=r"; it goes on: waiting for Ray to place decode-2"):
        asyncio.run(run())


def test_the_command_scales_and_says_so(
    stack: Stack, threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--endpoint", stack.endpoint, "--json"]

    def answer() -> None:
        settle(stack, take_order(stack))

    answering = threads.submit(answer)
    assert main(["scale", "--decode", "2", *flags]) == 0
    answering.result(LONG_S)
    document = documents.parse(capsys.readouterr().out)
    assert (document["prefill"], document["decode"], document["colocated"]) == (1, 2, 0)
    assert main(["scale", "--decode", "-1", *flags]) == 2
    assert documents.parse(capsys.readouterr().out)["decode"] is None
    assert main(["scale", *flags]) == 2
    assert "say how many" in documents.parse(capsys.readouterr().out)["error"]["message"]
