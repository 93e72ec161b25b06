"""What a pool with quarantined blocks may promise."""

from __future__ import annotations

import pytest

from kvferry.cluster.errors import WorkerLost
from tests.fakes import stub_spec
from tests.sim.cluster import SimCluster


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("late", [False, True])
def test_what_no_longer_fits_beside_a_quarantined_block_fails_and_holds_nobody_up(
    role: str, late: bool
) -> None:
    cluster = SimCluster(prefill_blocks=8, decode_blocks=8, audit_every_step=False)
    cluster.run(1.5)
    pool = cluster.named(role).worker.engine.pool
    (block,) = pool.allocate(1)
    if not late:
        pool.quarantine(block)
        pool.release([block])
    large = cluster.submit(stub_spec("large", range(29), 3))  # 31 positions: all 8 blocks of 4
    if late:
        if role == "prefill":
            return  # it has begun and waits for the block, which comes back or its lease ends
        cluster.run(1.0)
        pool.quarantine(block)
        pool.release([block])
    small = cluster.submit(stub_spec("small", range(500, 505), 3))
    assert cluster.run(60, lambda: bool(large.ends and small.ends))
    assert isinstance(large.ends[0].error, WorkerLost)
    assert "this worker has 7" in str(large.ends[0].error)
    assert small.tokens == cluster.expected("small")


def test_the_watermark_is_waived_for_an_idle_pool_with_a_quarantined_block() -> None:
    cluster = SimCluster(decode_blocks=10)
    cluster.run(1.5)
    engine = cluster.named("decode").worker.engine
    (block,) = engine.pool.allocate(1)
    engine.pool.quarantine(block)
    engine.pool.release([block])
    assert engine.pool.num_usable == engine.pool.num_free == 9
    cluster.submit(stub_spec("r", range(33), 4))  # 36 positions: 9 blocks
    cluster.run_until_ended()
    cluster.assert_exact()
