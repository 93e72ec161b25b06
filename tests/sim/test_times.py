"""The parts of a request's time to first token, measured under a virtual clock."""

from __future__ import annotations

import pytest

from kvferry.cluster.timing import request_timing
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
