"""Blocks that cannot be read at once: announced later, in order, and given back all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.kv_cache.audit import BlockClass
from kvferry.worker import messages as m
from kvferry.worker.messages import FailureCause, Leg
from kvferry.worker.publishing import DirectPublisher, Published
from tests.fakes import ATTEMPT
from tests.prefill_worker.test_prefill_role import (
    OWN,
    READER,
    PrefillBench,
    R,
    blocks_of,
)


class SlowPublisher(DirectPublisher):
    """Publishes blocks, in any order, when a test lets it."""

    def __init__(self, bench: PrefillBench) -> None:
        made = bench.made
        super().__init__(OWN.epoch, made.pool, made.connector, True)
        self.offered: Counter[int] = Counter()
        self.ready: set[int] = set()
        self.fresh = 0
        self.pins: list[int] = []

    @property
    def num_pending(self) -> int:  # type: ignore[override]
        return len(set(self.offered) - self.ready)

    def offer(self, block_id: int) -> None:
        assert self._pool.blocks[block_id].num_pins, "what is offered is pinned"
        self.offered[block_id] += 1

    def let(self, *block_ids: int) -> None:
        """These can be read from now on."""
        self.ready.update(block_ids)
        self.fresh += len(block_ids)

    def published(self, block_id: int) -> Published | None:  # type: ignore[override]
        assert self.offered[block_id]
        return super().published(block_id) if block_id in self.ready else None

    def poll(self) -> int:
        fresh, self.fresh = self.fresh, 0
        return fresh

    def withdraw(self, block_ids: Sequence[int]) -> None:
        self.pins += [self._pool.blocks[block_id].num_pins for block_id in block_ids]
        self.offered -= Counter(block_ids)


def slow_bench() -> tuple[PrefillBench, SlowPublisher]:
    bench = PrefillBench()
    publisher = SlowPublisher(bench)
    bench.made.worker.publisher = publisher
    return bench, publisher


def is_busy(bench: PrefillBench) -> bool:
    return bench.made.worker.has_work


def test_a_block_is_announced_when_it_can_be_read_and_the_hand_off_does_not_wait() -> None:
    bench, publisher = slow_bench()
    bench.ask(length=10)
    bench.step(2)
    (announcement,) = bench.announced()
    assert announcement.blocks == () and announcement.hand_off is not None
    assert is_busy(bench), "somebody must look again"
    block_ids = list(publisher.offered)
    assert len(block_ids) == 3
    publisher.let(*block_ids)
    bench.step()
    blocks = blocks_of(bench.announced())
    assert [(b.start, b.num_tokens, b.ref.block_id) for b in blocks] == [
        (0, 4, block_ids[0]),
        (4, 4, block_ids[1]),
        (8, 2, block_ids[2]),
    ]
    assert not is_busy(bench)
    bench.acknowledge(10, hand_off=True)
    assert not publisher.offered and set(publisher.pins) == {1}
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    assert bench.is_empty()


def test_blocks_are_announced_in_order_whichever_can_be_read_first() -> None:
    bench, publisher = slow_bench()
    bench.ask(length=10)
    bench.step(2)
    bench.announced()
    first, second, third = publisher.offered
    publisher.let(third)
    bench.step()
    assert bench.announced() == []
    publisher.let(first)
    bench.step()
    assert [b.start for b in blocks_of(bench.announced())] == [0]
    publisher.let(second)
    bench.step()
    assert [b.start for b in blocks_of(bench.announced())] == [4, 8]


def test_a_lease_does_not_end_while_blocks_are_still_to_be_announced() -> None:
    bench, publisher = slow_bench()
    bench.ask(length=10)
    bench.step(2)
    publisher.let(next(iter(publisher.offered)))
    bench.step()
    bench.acknowledge(4, hand_off=True)  # all that it was told of
    assert len(publisher.offered) == 2 and len(bench.role.leases) == 1
    bench.announced()
    publisher.let(*publisher.offered)
    bench.step()
    assert [b.start for b in blocks_of(bench.announced())] == [4, 8]
    bench.acknowledge(10, hand_off=True)
    assert not publisher.offered and not len(bench.role.leases)


def test_what_the_reader_cannot_read_yet_does_not_make_it_stall() -> None:
    bench, publisher = slow_bench()
    bench.ask(length=10)
    bench.step(2)
    bench.wait(1000.0)
    assert bench.failures() == []
    publisher.let(*publisher.offered)
    bench.step()
    bench.wait(1000.0)
    assert [cause for _, _, cause in bench.failures()] == [FailureCause.STALLED]
    assert bench.is_empty() and not publisher.offered


def test_an_ended_job_takes_back_what_was_offered_and_never_announced() -> None:
    bench, publisher = slow_bench()
    bench.ask(length=10)
    bench.step()
    assert bench.check()[BlockClass.REFERENCED] == 2
    assert len(publisher.offered) == 2
    bench.made.sent()
    bench.router.send(m.CancelLeg(R, ATTEMPT, Leg.PREFILL))
    assert bench.is_empty() and not publisher.offered and set(publisher.pins) == {1}
    assert (READER, m.LeaseEnded(R, ATTEMPT)) not in bench.sent(), "it was told of nothing"
