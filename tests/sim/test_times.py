"""The parts of a request's time to first token, measured under a virtual clock."""

from __future__ import annotations

import pytest

from kvferry.cluster.timing import request_timing
from kvferry.engine.request import RequestId
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster


@pytest.mark.parametrize("colocated", [False, True])
def test_no_second_of_the_time_to_first_token_counts_twice(colocated: bool) -> None:
    """Also not for the requests that wait, at their decode worker, for a full pool's blocks."""
    separate, both = (0, 1) if colocated else (1, 0)
    cluster = SimCluster(
        num_prefill=separate, num_decode=separate, num_colocated=both, decode_blocks=8
    )
    cluster.run(1.5)
    assert cluster.router is not None
    for i in range(4):
        cluster.submit(stub_spec(f"r{i}", range(i, i + 24), 6))
    requests = list(cluster.router.requests.values())
    cluster.run_until_ended()
    for request in requests:
        timing = request_timing(request, cluster.clock.now)
        parts = (timing.queue_s, timing.prefill_s, timing.delivery_s)
        assert all(part is not None and part >= -1e-9 for part in parts), (request, parts)
        assert timing.ttft_s == pytest.approx(sum(part or 0.0 for part in parts))
    assert cluster.router.requests == {}


def test_the_wait_of_a_prompt_that_decode_computes_unasked_counts_once() -> None:
    """Its beginning is there; it waits for blocks, and is found to be computed there."""
    cluster = SimCluster(decode_blocks=9)
    cluster.run(1.5)
    assert cluster.router is not None
    cluster.submit(stub_spec("before", range(9), 2))
    cluster.run_until_ended()
    cluster.submit(stub_spec("large", range(100, 126), 3))
    cluster.run(0.15)
    cluster.submit(stub_spec("again", range(9), 2))
    request = cluster.router.requests[RequestId("again")]
    cluster.run_until_ended()
    timing = request_timing(request, cluster.clock.now)
    parts = (timing.queue_s, timing.prefill_s, timing.delivery_s)
    assert all(part is not None and part >= -1e-9 for part in parts), parts
    assert timing.queue_s is not None and timing.queue_s > 0.1, "it did wait"
    assert request.decode_stats is not None and request.decode_stats.prefill is not None
