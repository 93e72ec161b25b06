"""Sequences begin with the KV that is here, wait for what another computes, and stay exact.

The stub model reads all it knows back through the block table, so that a block of another chain, of
another life, or not yet written shows as a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.request import RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.audit import BlockClass
from kvferry.kv_cache.block_table import BlockTable
from tests.engine.stepping import Bench, config
from tests.fakes import ATTEMPT, stub_spec

PROMPT = tuple(range(40))


def bench_of(num_blocks: int = 32, block_size: int = 4, **budgets: int) -> Bench:
    return Bench(num_blocks, block_size, config(**budgets), caching=True)


def computed(bench: Bench, name: str) -> int:
    """Positions that a sequence computed, repetitions included."""
    return bench.owner.computed[name].total()


@pytest.mark.parametrize("length", range(1, 14))
def test_a_full_hit_computes_exactly_the_last_token(length: int) -> None:
    bench = bench_of()
    for name in ("first", "second"):
        sequence = bench.submit(stub_spec(name, PROMPT[:length], 1), prefill_only=True)
        bench.run()
    assert (computed(bench, "first"), computed(bench, "second")) == (length, 1)
    assert sequence.num_cached_tokens == length - 1
    assert sequence.recomputed_prompt_tokens == 0
    bench.assert_exact()
    bench.assert_empty()


@pytest.mark.parametrize(("unit", "cached"), [(4, 8), (2, 10), (1, 11)])
def test_a_hit_ends_at_a_match_unit(unit: int, cached: int) -> None:
    bench = Bench(32, 4, config(), caching=True, match_unit=unit)
    bench.submit(stub_spec("first", PROMPT[:16], 1), prefill_only=True)
    bench.run()
    other = (*PROMPT[:11], 48, 49, 50)
    sequence = bench.submit(stub_spec("second", other, 3))
    bench.run()
    assert sequence.num_cached_tokens == cached
    assert computed(bench, "second") == len(other) - cached + 2
    bench.assert_exact()


def test_what_was_reused_is_told_with_the_first_step() -> None:
    bench = bench_of()
    bench.submit(stub_spec("first", PROMPT[:14], 1), prefill_only=True)
    bench.run()
    bench.owner.progress.clear()
    bench.submit(stub_spec("second", PROMPT[:14], 1), prefill_only=True)
    bench.run()
    (progress,) = bench.owner.progress
    assert [(block.start, block.num_tokens) for block in progress.sealed] == [
        (0, 4),
        (4, 4),
        (8, 4),
        (12, 2),
    ]


def test_another_salt_finds_nothing() -> None:
    bench = bench_of()
    for salt in ("a", "b", "a"):
        spec = replace(stub_spec(f"{salt}{bench.num_steps}", PROMPT[:12], 1), cache_salt=salt)
        last = bench.submit(spec)
        bench.run()
    assert [s.num_cached_tokens for s in bench.sequences.values()] == [0, 0, 11]
    assert last.num_cached_tokens == 11


def test_a_prompt_whose_every_position_is_looked_at_is_computed_whole() -> None:
    bench = bench_of()
    for name in ("first", "second"):
        bench.submit(stub_spec(name, PROMPT[:12], 1, logprobs=0))
        bench.run()
    assert computed(bench, "second") == 12


def test_two_that_share_a_prefix_compute_it_once() -> None:
    bench = bench_of(tokens=8, chunk=8)
    bench.add("first", 20)
    bench.submit(stub_spec("second", (*PROMPT[:16], 48, 49), 1))
    bench.run()
    assert computed(bench, "first") == 20
    assert computed(bench, "second") == 2
    bench.assert_exact()


def test_others_pass_one_that_waits_for_a_block() -> None:
    bench = bench_of(tokens=12, chunk=8)
    bench.add("first", 20)
    bench.add("waits", 20)
    bench.submit(stub_spec("other", (30, 31, 32), 1))
    bench.step()
    assert bench.waiting == ["waits"]
    assert bench.scheduled() == [8, 3]
    bench.run()
    bench.assert_exact()


@pytest.mark.parametrize("steps", [1, 2])
def test_who_waited_takes_over_when_the_other_is_removed(steps: int) -> None:
    bench = bench_of(tokens=8, chunk=8)
    first = bench.add("first", 24)
    bench.add("second", 24)
    for _ in range(steps):
        bench.step()
    bench.engine.remove(first)
    bench.run()
    assert computed(bench, "second") == 24 - 8 * steps
    bench.assert_exact("first")
    bench.assert_empty()


def test_copies_of_a_step_that_raised_are_made_once_for_each_sequence() -> None:
    """Copied again, the first one's block would lose the token that it has written since."""
    bench = Bench(32, 4, config(), caching=True, match_unit=1)
    bench.submit(stub_spec("first", PROMPT[:6], 1), prefill_only=True)
    bench.run()
    for name, token in (("a", 40), ("b", 41)):
        bench.submit(stub_spec(name, (*PROMPT[:5], token), 4))
    bench.runner.stub.fail_next = 1  # the batch; then each runs by itself
    bench.run()
    assert [s.num_cached_tokens for s in bench.sequences.values()] == [0, 5, 5]
    bench.assert_exact()
    bench.assert_empty()


def test_a_pool_full_of_cached_blocks_is_free_for_anybody() -> None:
    bench = bench_of(num_blocks=4)
    for number in range(3):
        prompt = [number * 16 + place for place in range(15)]
        bench.submit(stub_spec(str(number), prompt, 2))
        bench.run()
    assert bench.pool.num_evictions == 2 * 4, "each filled the pool"
    bench.assert_exact()


def test_the_tail_of_the_least_recently_used_goes_first() -> None:
    bench = bench_of(num_blocks=6)
    for name, base in (("old", 0), ("new", 20)):
        bench.submit(stub_spec(name, [base + i for i in range(12)], 1))
        bench.run()
    bench.submit(stub_spec("used", range(12), 1))  # the old one's blocks are the youngest now
    bench.run()
    bench.submit(stub_spec("other", [40, 41, 42, 43], 1))
    bench.run()
    again = bench.submit(stub_spec("again", [20 + i for i in range(12)], 1))
    bench.run()
    assert again.num_cached_tokens == 8, "its tail was taken"
    bench.assert_exact()


def test_a_hit_that_fills_the_pool_gives_up_a_block_rather_than_wait_for_ever() -> None:
    """The copy of the last block would be one block too many."""
    bench = bench_of(num_blocks=3)
    for name in ("first", "second"):
        sequence = bench.submit(stub_spec(name, PROMPT[:12], 1))
        bench.run()
    assert sequence.num_cached_tokens == 8
    bench.assert_exact()


def test_one_that_waits_with_blocks_needs_room_for_the_copy_of_its_last() -> None:
    """It appends to a block that others can find, and the pool is full when its turn comes."""
    bench = bench_of(num_blocks=5, seqs=1)
    bench.submit(stub_spec("runs", (1, 2, 3), 2))
    bench.step()
    bench.join(stub_spec("waits", range(10, 16), 2))
    bench.step()
    reserved = bench.reserve(bench.pool.num_free)
    assert not bench.step(), "it waits"
    assert bench.waiting == ["waits"]
    bench.engine.kv.free(reserved)
    bench.run()
    bench.assert_exact()
    bench.assert_empty()


def test_one_whose_blocks_others_wait_with_does_not_wait_for_ever() -> None:
    """All that runs has is shared, and what waits holds the rest of the pool."""
    bench = bench_of(num_blocks=4, seqs=1)
    bench.submit(stub_spec("runs", PROMPT[:4], 3))
    bench.step()
    engine, spec = bench.engine, stub_spec("shares", PROMPT[:7], 2)
    table = BlockTable(4)
    engine.kv.adopt(table, engine.kv.find_prefix(engine.hash_chain(spec), PROMPT[:7]))
    bench.sequences["shares"] = engine.new_sequence(
        spec, ATTEMPT, bench.owner, table=table, num_computed_tokens=4
    )
    bench.join(stub_spec("holds", range(20, 32), 2))
    assert (bench.pool.num_free, bench.waiting) == (0, ["shares", "holds"])
    bench.run(50)
    bench.assert_exact()
    bench.assert_empty()


def test_a_preempted_sequence_takes_its_blocks_back_where_they_are() -> None:
    bench = bench_of(num_blocks=6, seqs=2)
    bench.submit(stub_spec("a", [0, 1, 2, 3, 4, 5, 6], 12))
    bench.submit(stub_spec("b", [20, 21, 22, 23, 24, 25, 26], 12))
    bench.run()
    preempted = [s for s in bench.sequences.values() if s.num_preemptions]
    assert preempted, "the pool was too large"
    for sequence in preempted:
        assert computed(bench, sequence.key.request_id) < len(sequence.token_ids) * 2
    bench.assert_exact()


def test_clearing_the_cache_keeps_what_is_in_use() -> None:
    bench = bench_of()
    bench.add("done", 8)
    bench.run()
    running = bench.add("running", 8, max_tokens=5)
    bench.step()
    assert bench.pool.clear_cache() == 1, "the other block is the running one's"
    assert bench.audit().consistent
    assert running.num_cached_tokens == 7
    bench.run()
    bench.assert_exact()


# --- anything goes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """A request that comes before a step: a way down a tree of prompts, and perhaps an early end.

    Attributes:
        path: per branching, which of two continuations.
        length: tokens of the prompt.
        ends_after: steps after which it is removed; None: it runs to its end.
    """

    step: int
    path: tuple[bool, ...]
    length: int
    max_tokens: int
    prefill_only: bool
    salt: str
    ends_after: int | None

    def spec(self, name: str) -> RequestSpec:
        tokens: list[int] = []
        for number, side in enumerate(self.path):
            tokens += [number * 9 + (5 if side else 0) + place for place in range(5)]
        prompt = [token % 50 for token in tokens][: self.length]
        return replace(stub_spec(name, prompt, self.max_tokens), cache_salt=self.salt)


VISITS = st.builds(
    Visit,
    step=st.integers(0, 12),
    path=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    length=st.integers(1, 20),
    max_tokens=st.integers(1, 6),
    prefill_only=st.booleans(),
    salt=st.sampled_from(["", "", "", "tenant"]),
    ends_after=st.sampled_from([None, None, None, 0, 1, 3]),
)


@given(
    st.lists(VISITS, min_size=2, max_size=9),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4)]),
    st.integers(0, 6),
    st.integers(1, 20),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=400, deadline=None)
def test_whatever_comes_is_exact_and_accounted_for(
    visits: list[Visit], sizes: tuple[int, int], spare: int, budget: int, seats: int
) -> None:
    block_size, unit = sizes
    most = max(-(-(visit.length + visit.max_tokens) // block_size) for visit in visits)
    budgets = SchedulerConfig(seats, budget, budget, 0.0)
    bench = Bench(most + spare, block_size, budgets, caching=True, match_unit=unit)
    pending = sorted(enumerate(visits), key=lambda pair: pair[1].step)
    removed: list[str] = []
    while pending or bench.engine.has_work:
        assert bench.num_steps < 2000, (bench.running, bench.waiting)
        while pending and pending[0][1].step <= bench.num_steps:
            number, visit = pending.pop(0)
            bench.submit(visit.spec(str(number)), visit.prefill_only)
        for number, visit in enumerate(visits):
            name, ends_after = str(number), visit.ends_after
            if ends_after is None or name not in bench.sequences:
                continue
            if bench.num_steps == visit.step + ends_after:
                bench.engine.remove(bench.sequences[name])
                removed.append(name)
        bench.step()
    bench.assert_exact(*removed)
    bench.assert_empty()
    for name, sequence in bench.sequences.items():
        if name not in removed and not sequence.num_preemptions:
            expected = len(sequence.token_ids) - 1 - sequence.num_cached_tokens
            assert computed(bench, name) == expected
    counts = bench.audit().counts
    assert counts[BlockClass.CACHED] == bench.pool.num_cached
