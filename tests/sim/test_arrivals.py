"""Requests that begin alike and come together: each shared block is moved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvferry.cluster.routed_request import RoutedRequest
from kvferry.kv_transfer.connector import ReadStatus
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster

SHARED = range(300, 340)  # ten blocks


def started(**settings: Any) -> SimCluster:
    cluster = SimCluster(**settings)
    cluster.run(1.5)
    return cluster


def submit(cluster: SimCluster, *names: str, rest: int = 5) -> list[RoutedRequest]:
    assert cluster.router is not None
    requests = []
    for place, name in enumerate(names):
        spec = stub_spec(name, [*SHARED, *range(10 * place, 10 * place + rest)], 7)
        cluster.submit(spec)
        requests.append(cluster.router.requests[spec.request_id])
    return requests


def moved_and_reused(request: RoutedRequest) -> tuple[int, int]:
    assert request.decode_stats is not None and request.decode_stats.transfer is not None
    transfer = request.decode_stats.transfer
    return transfer.blocks_moved, transfer.blocks_reused


def assert_clean(cluster: SimCluster) -> None:
    assert cluster.run(3, lambda: not cluster.leftovers()), cluster.leftovers()


@pytest.mark.parametrize("blocks_per_poll", [1, 2, 8])
@pytest.mark.parametrize("prefills", [1, 2, 3])
def test_what_comes_for_one_is_not_moved_for_the_others(
    blocks_per_poll: int, prefills: int
) -> None:
    cluster = started(blocks_per_poll=blocks_per_poll, num_prefill=prefills, decode_blocks=64)
    requests = submit(cluster, "a", "b", "c")
    cluster.run_until_ended()
    cluster.assert_exact()
    counts = [moved_and_reused(request) for request in requests]
    assert all(moved + reused == 12 for moved, reused in counts), counts
    assert sum(moved for moved, _ in counts) == 10 + 3 * 2, counts
    assert_clean(cluster)


def test_without_a_prefix_cache_each_moves_its_own() -> None:
    cluster = started(caching=False, decode_blocks=64)
    requests = submit(cluster, "a", "b")
    cluster.run_until_ended()
    cluster.assert_exact()
    assert [moved_and_reused(request) for request in requests] == [(12, 0), (12, 0)]


@pytest.mark.parametrize("after", range(2, 16))
def test_when_the_one_that_reads_is_cancelled_another_takes_over(after: int) -> None:
    cluster = started(blocks_per_poll=1, decode_blocks=64, num_prefill=2)
    first, *_ = submit(cluster, "a", "b", "c")
    for _ in range(after):
        cluster.advance()
    assert cluster.router is not None
    cluster.router.cancel(first.request_id, cluster.clock.now)
    cluster.run_until_ended(20)
    for name in ("b", "c"):
        assert cluster.listeners[name].tokens == cluster.expected(name)
    assert_clean(cluster)


def test_when_its_reads_fail_another_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started(blocks_per_poll=1, decode_blocks=64, num_prefill=2)
    connector = cluster.named("decode").connector
    poll = connector.poll
    spoiled: list[Any] = []

    def spoiling(now: float) -> Sequence[Any]:
        results = list(poll(now))
        for place, result in enumerate(results):
            if len(spoiled) < 7:
                spoiled.append(result)
                results[place] = replace(result, status=ReadStatus.CORRUPT)
        return results

    monkeypatch.setattr(connector, "poll", spoiling)
    submit(cluster, "a", "b", "c")
    cluster.run_until_ended(40)
    cluster.assert_exact()
    assert len(spoiled) == 7
    assert_clean(cluster)
