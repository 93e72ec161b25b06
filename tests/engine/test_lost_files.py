"""Files of the host tier that are gone when they are wanted."""

from __future__ import annotations

import numpy as np

from kvferry.engine.engine import Engine
from kvferry.engine.offload import Offloading
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.host_tier import HostTier
from kvferry.kv_cache.prefix_index import PrefixIndex
from tests.engine.dict_mover import DictMover, FixedCosts
from tests.fakes import (
    ATTEMPT,
    FakeClock,
    RecordingOwner,
    StubRunner,
    stub_output,
    stub_spec,
)


def test_a_lost_file_that_two_of_a_step_begin_with_is_computed_by_both() -> None:
    """The first to read it finds it unreadable; the second has found it, and has it no longer."""
    slots = np.zeros((8, 4), np.int64)
    mover = DictMover(slots, set())
    clock = FakeClock()
    engine = Engine(
        SchedulerConfig(8, 64, 32, 0.0),
        StubRunner(slots.view(np.uint8), 4),
        BlockPool(8, None, PrefixIndex()),
        4,
        "m",
        clock,
        offloading=Offloading(HostTier(1, 16), mover, 4, clock, FixedCosts(True)),
    )
    owner = RecordingOwner()

    def serve(*requests: tuple[str, list[int], int]) -> None:
        for name, prompt, max_tokens in requests:
            engine.new_sequence(stub_spec(name, prompt, max_tokens), ATTEMPT, owner)
        for _ in range(200):
            engine.step()
        assert not engine.has_work

    serve(("a", list(range(8)), 1))
    serve(("b", list(range(100, 131)), 1))  # needs every block: those of "a" go to the disk
    mover.damaged = set(mover.disk)
    assert mover.damaged
    c, d = [*range(8), 50], [*range(8), 60]
    serve(("c", c, 2), ("d", d, 2))
    assert owner.tokens("c") == stub_output(c, 2) and owner.tokens("d") == stub_output(d, 2)
    assert not owner.failures
