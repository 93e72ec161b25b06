"""What an experiment sees of requests and of deaths, and that waiting for it is bounded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from kvferry.cluster.chaos.cells import STATES
from kvferry.cluster.chaos.cluster_watch import ClusterWatch, TookTooLong, is_gone, until
from kvferry.cluster.client import AsyncClient
from kvferry.cluster.deaths import Death
from kvferry.cluster.routed_request import RequestView
from kvferry.worker.messages import NodeRef
from tests.cluster.routing import Bench


class Watched:
    """A cluster of which only the router exists."""

    grpc = "127.0.0.1:1"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.answers = True

    def processes(self) -> dict[NodeRef, int]:
        return {self.bench.ref("prefill-0"): 4711}

    def deaths(self) -> list[Death]:
        return list(self.bench.router.lost)

    def request_views(self) -> list[RequestView] | None:
        if not self.answers:
            return None
        return [request.view() for request in self.bench.router.requests.values()]


def states(watched: Watched, request_id: str) -> set[str]:
    """The states, of those that the router alone knows, that the request is seen in."""

    async def ask() -> set[str]:
        async with AsyncClient(watched.grpc) as client:
            watch = ClusterWatch(watched, client, 2)
            known = [state for state in STATES if state != "transferring"]
            return {state for state in known if await watch.in_state(request_id, state)}

    return asyncio.run(ask())


def test_a_request_is_seen_in_one_state_after_the_other() -> None:
    bench = Bench()
    watched = Watched(bench)
    assert states(watched, "r") == set()
    request, _ = bench.submit("r", max_tokens=16)
    bench.refuse(request)
    assert states(watched, "r") == {"queued"}
    bench.grant(request)
    assert states(watched, "r") == {"prefilling"}
    bench.first_token(request)
    assert states(watched, "r") == {"handed_off"}
    bench.tokens(request, 0, 100, 101)
    assert states(watched, "r") == set()  # decode has only just begun
    bench.tokens(request, 2, 102, 103)
    assert states(watched, "r") == {"decoding"}
    view = request.view()
    assert (view.prefill, view.decode) == (bench.ref("prefill-0"), bench.ref("decode-0"))
    assert view.num_delivered == 4


def test_a_silent_router_does_not_pass_for_an_ended_request() -> None:
    bench = Bench()
    watched = Watched(bench)
    bench.submit("r")

    async def ended(request_id: str) -> bool:
        async with AsyncClient(watched.grpc) as client:
            return await ClusterWatch(watched, client, 2).has_ended(request_id)

    assert not asyncio.run(ended("r"))
    assert asyncio.run(ended("another"))
    watched.answers = False
    assert not asyncio.run(ended("another"))


def test_a_death_is_logged_with_its_cause_and_the_routers_time() -> None:
    bench = Bench()
    victim = bench.ref("decode-0")
    bench.now = 7.5
    bench.router.worker_died(victim, "why", bench.now)
    bench.router.worker_died(victim, "again", bench.now + 1)
    assert list(bench.router.lost) == [Death(victim, "why", 7.5)]

    async def watch() -> ClusterWatch:
        async with AsyncClient(Watched.grpc) as client:
            return ClusterWatch(Watched(bench), client, 2)

    found = asyncio.run(watch())
    assert found.death(victim) == Death(victim, "why", 7.5)
    assert found.death(NodeRef("decode-0", victim.epoch + 1)) is None
    assert found.deaths_but([]) == [Death(victim, "why", 7.5)]
    assert found.deaths_but([victim]) == []


def test_waiting_is_bounded_and_says_for_what() -> None:
    async def never() -> int | None:
        return None

    with pytest.raises(TookTooLong, match=r"the moon: not within 0\.05 s"):
        asyncio.run(until("the moon", never, within_s=0.05, every_s=0.01))


def test_an_unburied_process_is_gone_and_a_live_one_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_gone(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(process.pid)
    assert is_gone(process.pid)
