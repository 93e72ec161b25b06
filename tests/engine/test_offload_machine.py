"""Scheduler, pool and host tier under arbitrary requests, aborts, decisions and disk faults.

The stub model reads all it knows back through the block table; ``Bench`` holds the pool and the
tier against their owners after every step, spoils whatever begins a new life, and keeps
dictionaries of what slots and files hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceStatus
from tests.engine.dict_mover import WaveringCosts
from tests.engine.stepping import Bench
from tests.fakes import stub_spec

picks = st.integers(0, 63)
MOST = 24  # positions of one request


class OffloadMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 4),
        host=st.sampled_from([(1, 0), (2, 0), (4, 0), (12, 0), (1, 4), (2, 16), (1, 1)]),
        caching=st.booleans(),
        budget=st.integers(1, 20),
        seats=st.sampled_from([1, 2, 3, 8]),
        mark=st.sampled_from([0.0, 0.0, 0.2]),
        ageing=st.sampled_from([None, 2.0]),
        decisions=st.lists(st.booleans(), min_size=1, max_size=3),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        host: tuple[int, int],
        caching: bool,
        budget: int,
        seats: int,
        mark: float,
        ageing: float | None,
        decisions: list[bool],
    ) -> None:
        self.costs = WaveringCosts([*decisions, True])
        self.bench = Bench(
            -(-MOST // block_size) + spare,
            block_size,
            SchedulerConfig(seats, budget, budget, mark, ageing),
            caching=caching,
            host=host,
            costs=self.costs,
        )
        self.removed: list[str] = []

    @rule(
        family=st.integers(0, 3),
        length=st.integers(1, 14),
        more=st.integers(2, 10),
        priority=st.integers(-1, 2),
        logprobs=st.sampled_from([None, None, None, 0]),
    )
    def come(
        self, family: int, length: int, more: int, priority: int, logprobs: int | None
    ) -> None:
        """A request; those of a family begin alike."""
        if len(self.bench.engine.scheduler.sequences) >= 7:
            return
        name = f"r{len(self.bench.sequences)}"
        prompt = [(family * 20 + place) % 97 for place in range(length)]
        spec = replace(stub_spec(name, prompt, more, logprobs=logprobs), priority=priority)
        self.bench.submit(spec)

    @rule(length=st.integers(1, 12), number=picks)
    def join(self, length: int, number: int) -> None:
        """A request whose prompt was computed elsewhere, as the decode role takes it in."""
        scheduler = self.bench.engine.scheduler
        if scheduler.has_preempted or len(scheduler.sequences) >= 7:
            return
        name = f"r{len(self.bench.sequences)}"
        prompt = [(number + place) % 97 for place in range(length)]
        self.bench.join(stub_spec(name, prompt, 4))

    @precondition(lambda self: self.bench.engine.has_work)
    @rule(number=picks)
    def abort(self, number: int) -> None:
        """In whatever state."""
        living = list(self.bench.engine.scheduler.sequences.values())
        victim = living[number % len(living)]
        self.bench.engine.remove(victim)
        self.removed.append(victim.key.request_id)
        assert self.bench.audit().consistent
        self.bench.check_host()

    @rule(number=picks)
    def damage(self, number: int) -> None:
        """A file cannot be read or written any more, or can again."""
        self.bench.mover.damaged ^= {number % 5}

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()
            self.check_states()

    def check_states(self) -> None:
        scheduler = self.bench.engine.scheduler
        order = [(s.rank, s.arrival) for s in scheduler.running]
        assert order == sorted(order)
        for sequence in scheduler.waiting:
            swapped = sequence.status is SequenceStatus.SWAPPED
            assert swapped == (sequence.num_swapped_tokens > 0)
            assert not (swapped and sequence.table.block_ids), "in two places at once"
        preempted = sum(s.num_preemptions for s in self.bench.sequences.values())
        assert scheduler.num_preemptions == preempted

    def teardown(self) -> None:
        """Left to itself it comes to an end, with every token right and nothing left."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        steps = 0
        while bench.engine.has_work:
            steps += 1
            assert steps < 1500, (bench.running, bench.waiting)
            bench.step()
            self.check_states()
        bench.assert_exact(*self.removed)
        bench.assert_empty()
        again = sum(s.recomputed_tokens for s in bench.sequences.values())
        assert bench.counters.recomputed_tokens_preemption == again


TestOffloadMachine = OffloadMachine.TestCase
TestOffloadMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
