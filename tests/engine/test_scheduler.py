"""The scheduler under arbitrary arrivals: budgets, exact outputs, progress, order, and counts.

``Bench`` checks the budgets, the audit and the sealed hashes at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceProgress, SequenceState, SequenceStatus
from tests.engine.stepping import Bench, CountingOwner
from tests.fakes import stub_spec

CONFIGS = st.builds(
    SchedulerConfig,
    max_num_seqs=st.sampled_from([1, 2, 3, 8]),
    max_num_batched_tokens=st.integers(1, 20),
    chunk_tokens=st.integers(1, 20),
    watermark=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)


@dataclass(frozen=True)
class Arrival:
    """A request that comes before a step; the first ``computed`` positions come along."""

    step: int
    num_prompt: int
    num_delivered: int
    num_new: int
    prefill_only: bool = False
    computed: int = 0

    @property
    def most_positions(self) -> int:
        """Positions that will have KV at its end."""
        new = 0 if self.prefill_only else self.num_new - 1
        return self.num_prompt + self.num_delivered + new


FRESH = st.builds(
    Arrival,
    step=st.integers(0, 6),
    num_prompt=st.integers(1, 14),
    num_delivered=st.integers(0, 3),
    num_new=st.integers(1, 8),
    prefill_only=st.booleans(),
)
JOINING = st.builds(
    Arrival,
    step=st.integers(0, 6),
    num_prompt=st.integers(1, 14),
    num_delivered=st.integers(0, 3),
    num_new=st.integers(2, 8),
    computed=st.integers(1, 20),
)


class Drive:
    """Feeds arrivals to a bench, steps it until all have ended, and judges each step."""

    def __init__(self, bench: Bench, arrivals: list[Arrival]) -> None:
        self.bench = bench
        self.pending = sorted(arrivals, key=lambda arrival: arrival.step)
        self.names = {id(arrival): f"r{i}" for i, arrival in enumerate(self.pending)}
        self.computed_elsewhere: dict[str, int] = {}
        joining = sum(arrival.computed > 0 for arrival in arrivals)
        tokens = sum(arrival.most_positions + 1 for arrival in arrivals)
        # The oldest sequence computes in every step; only one that joined later, with blocks, may
        # run ahead of it, and then lose what it did.
        self.most_steps = 6 + len(arrivals) + (joining + 1) * tokens

    def run(self) -> None:
        bench, scheduler = self.bench, self.bench.engine.scheduler
        while self.pending or bench.engine.has_work:
            assert bench.num_steps < self.most_steps, (bench.running, bench.waiting)
            self.pending = [arrival for arrival in self.pending if not self.arrive(arrival)]
            running, waiting = list(scheduler.running), list(scheduler.waiting)
            holders = {id(s) for s in waiting if s.table.block_ids}
            bench.step()
            self.judge_victims(running)
            self.judge_admission([s for s in waiting if id(s) in holders])
            self.judge_admission([s for s in waiting if id(s) not in holders])
            assert len(scheduler.running) <= bench.config.max_num_seqs

    def arrive(self, arrival: Arrival) -> bool:
        bench, name = self.bench, self.names[id(arrival)]
        if arrival.step > bench.num_steps:
            return False
        most = arrival.num_delivered + arrival.num_new
        prompt = [len(name) + i * i for i in range(arrival.num_prompt)]
        spec = stub_spec(name, prompt, most, range(900, 900 + arrival.num_delivered))
        count = min(arrival.computed, len(spec.kv_prompt()))
        if not count:
            bench.submit(spec, arrival.prefill_only)
            return True
        self.computed_elsewhere[name] = count
        if bench.engine.scheduler.has_preempted:
            return False  # as the decode role does: preempted ones first
        return bench.join(spec, count) is not None

    def judge_victims(self, before: list[SequenceState]) -> None:
        """Whoever was preempted was newer than all that ran on."""
        victims = [s.arrival for s in before if s.status is SequenceStatus.WAITING]
        ran_on = [s.arrival for s in before if s.status is SequenceStatus.RUNNING]
        assert max(ran_on, default=0) < min(victims, default=1 << 30)

    def judge_admission(self, before: list[SequenceState]) -> None:
        """Whoever was admitted had waited longest."""
        admitted = [s.arrival for s in before if s.status is not SequenceStatus.WAITING]
        left = [s.arrival for s in before if s.status is SequenceStatus.WAITING]
        assert max(admitted, default=0) < min(left, default=1 << 30)

    def judge_end(self) -> None:
        """Every output is exact, every recomputed position was counted, nothing is left."""
        self.bench.assert_exact()
        self.bench.assert_empty()
        for name, sequence in self.bench.sequences.items():
            times = self.bench.owner.computed[name].copy()
            times.update(range(self.computed_elsewhere.get(name, 0)))
            again = {position: count - 1 for position, count in times.items()}
            assert min(again.values()) >= 0
            assert sequence.recomputed_tokens == sum(again.values())
            assert sequence.recomputed_prompt_tokens == sum(
                count for position, count in again.items() if position < sequence.num_kv_prompt
            )
            assert (sequence.recomputed_tokens > 0) <= (sequence.num_preemptions > 0)
        preempted = sum(sequence.num_preemptions for sequence in self.bench.sequences.values())
        assert self.bench.engine.scheduler.num_preemptions == preempted


def bench_for(
    arrivals: list[Arrival], block_size: int, spare: int, config: SchedulerConfig
) -> Bench:
    """A pool that holds the largest request, and ``spare`` blocks more."""
    largest = max(-(-arrival.most_positions // block_size) for arrival in arrivals)
    return Bench(largest + spare, block_size, config)


@given(
    st.lists(FRESH, min_size=1, max_size=7), st.integers(1, 4), st.sampled_from([0, 1, 4]), CONFIGS
)
@settings(max_examples=300)
def test_outputs_are_exact_in_any_pool_that_holds_the_largest_request(
    arrivals: list[Arrival], block_size: int, spare: int, config: SchedulerConfig
) -> None:
    drive = Drive(bench_for(arrivals, block_size, spare, config), arrivals)
    drive.run()
    drive.judge_end()
    first = [s.first_scheduled_at or 0.0 for s in drive.bench.sequences.values()]
    assert first == sorted(first), "nobody was overtaken"


@given(
    st.lists(st.one_of(FRESH, JOINING), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([0, 1, 4]),
    CONFIGS,
)
@settings(max_examples=300)
def test_sequences_that_join_with_computed_blocks_are_exact_and_block_nobody(
    arrivals: list[Arrival], block_size: int, spare: int, config: SchedulerConfig
) -> None:
    drive = Drive(bench_for(arrivals, block_size, spare, config), arrivals)
    drive.run()
    drive.judge_end()


@given(st.lists(FRESH, min_size=1, max_size=7), st.integers(1, 4), CONFIGS)
def test_a_pool_that_holds_all_preempts_nobody(
    arrivals: list[Arrival], block_size: int, config: SchedulerConfig
) -> None:
    blocks = sum(-(-arrival.most_positions // block_size) for arrival in arrivals)
    drive = Drive(Bench(blocks, block_size, config), arrivals)
    drive.run()
    drive.judge_end()
    assert drive.bench.engine.scheduler.num_preemptions == 0


@given(
    st.lists(FRESH, min_size=1, max_size=7), st.integers(1, 4), st.sampled_from([0, 1, 4]), CONFIGS
)
def test_prompts_alone_preempt_nobody(
    arrivals: list[Arrival], block_size: int, spare: int, config: SchedulerConfig
) -> None:
    """What an admitted prompt still needs is not given to the next."""
    prompts = [replace(arrival, prefill_only=True) for arrival in arrivals]
    drive = Drive(bench_for(prompts, block_size, spare, config), prompts)
    drive.run()
    drive.judge_end()
    assert drive.bench.engine.scheduler.num_preemptions == 0


@dataclass
class LeasingOwner(CountingOwner):
    """Pins each position's block once, as a prefill worker does; leases are named by their step."""

    bench: Bench | None = None
    pinned: dict[str, int] = field(default_factory=dict)

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        super().on_progress(progress, now)
        assert self.bench is not None
        name = progress.sequence.key.request_id
        for block in progress.sealed:
            if block.start >= self.pinned.get(name, 0):
                self.pinned[name] = block.start + block.num_tokens
                self.bench.pin(str(self.bench.num_steps), block.block_id)


@given(
    st.lists(FRESH, min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([0, 1, 4]),
    CONFIGS,
    st.integers(0, 9),
)
@settings(max_examples=300)
def test_leases_delay_and_spoil_nothing(
    arrivals: list[Arrival], block_size: int, spare: int, config: SchedulerConfig, lasts: int
) -> None:
    """Blocks that a reader still wants come back late; whoever is preempted frees others."""
    bench = bench_for(arrivals, block_size, spare, config)
    bench.owner = LeasingOwner(pool=bench.pool, bench=bench)
    drive = Drive(bench, arrivals)
    drive.most_steps *= lasts + 2
    scheduler = bench.engine.scheduler
    while drive.pending or bench.engine.has_work:
        assert bench.num_steps < drive.most_steps, (bench.running, bench.waiting)
        drive.pending = [arrival for arrival in drive.pending if not drive.arrive(arrival)]
        for lease in [lease for lease in bench.leases if int(lease[0]) < bench.num_steps - lasts]:
            bench.leases.remove(lease)
            bench.pool.unpin(lease[1])
        preempted, free = scheduler.num_preemptions, bench.pool.num_free
        if not bench.step() and scheduler.num_preemptions > preempted:
            assert bench.pool.num_free > free, "a preemption freed nothing"
    bench.unpin_all()
    drive.judge_end()
