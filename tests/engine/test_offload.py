"""Preempted sequences whose KV waits in the host tier: one situation each.

The stub model reads all it knows back through the block table, so that KV that was lost, mixed up
or copied too late shows as a wrong token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceState, SequenceStatus
from kvferry.kv_cache.hashing import BlockHash
from kvferry.kv_cache.host_tier import Content, Read, Spill
from tests.engine.dict_mover import FixedCosts
from tests.engine.stepping import Bench, config
from tests.fakes import stub_spec


def bench_of(num_blocks: int = 4, host: tuple[int, int] = (16, 0), **more: Any) -> Bench:
    return Bench(num_blocks, host=host, **more)


def two_of_which_one_is_swapped(**more: Any) -> tuple[Bench, SequenceState]:
    """a grows, and b has to go, with ten positions computed: two blocks and a half."""
    bench = bench_of(6, **more)
    bench.add("a", 11, max_tokens=12)
    victim = bench.add("b", 9, max_tokens=9)
    while not victim.num_preemptions and bench.num_steps < 50:
        bench.step()
    return bench, victim


def test_kv_waits_in_the_tier_and_comes_back_without_being_computed_again() -> None:
    bench, victim = two_of_which_one_is_swapped()
    assert victim.status is SequenceStatus.SWAPPED
    assert bench.swapped == ["b"] and bench.engine.scheduler.num_swapped == 1
    assert victim.table.block_ids == []
    assert bench.offloading is not None
    assert victim.num_swapped_tokens == victim.max_computed_tokens == 10
    assert len(bench.offloading.tier) == 3
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert victim.recomputed_tokens == 0 == victim.num_swapped_tokens
    counters = bench.counters
    assert (counters.preemptions_offload, counters.preemptions_recompute) == (1, 0)
    assert counters.recomputed_tokens_preemption == 0
    assert counters.host_hit_blocks == 3
    assert counters.offloaded_bytes == counters.restored_bytes == 3 * 32


def test_where_computing_again_is_cheaper_nothing_is_copied() -> None:
    bench, victim = two_of_which_one_is_swapped(costs=FixedCosts(False))
    assert victim.status is SequenceStatus.WAITING
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert not bench.mover.moves
    counters = bench.counters
    assert (counters.preemptions_offload, counters.preemptions_recompute) == (0, 1)
    assert counters.recomputed_tokens_preemption == victim.recomputed_tokens == 10


def test_where_the_copy_of_a_found_block_does_not_fit_its_content_is_copied_back() -> None:
    """The pool has all of it, but no block to copy the last one into: the tier has that, too."""
    bench = bench_of(5, block_size=2, caching=True, match_unit=1)
    bench.reserve(2)
    victim = bench.join(stub_spec("a", range(5), 2))
    assert victim is not None
    bench.step()
    assert bench.swapped == ["a"] and victim.num_swapped_tokens == 5
    bench.run()
    bench.assert_exact()
    assert victim.recomputed_tokens == 0
    assert (bench.counters.host_hit_blocks, bench.counters.hit_tokens_host) == (1, 1)


def test_what_is_lost_while_room_is_made_for_it_is_a_lost_block() -> None:
    """Found and held, and then another's read of the same file failed."""
    bench, victim = two_of_which_one_is_swapped()
    assert bench.offloading is not None
    keys, _ = bench.offloading.find(victim, 0)
    bench.offloading.tier.lose(keys[1])
    bench.offloading.restore(keys, range(len(keys)))
    assert bench.offloading.take_lost() == {1}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_tier_that_does_not_hold_all_of_it_holds_nothing(slots: int) -> None:
    bench, victim = two_of_which_one_is_swapped(host=(slots, 0))
    assert victim.status is SequenceStatus.WAITING
    assert not bench.mover.moves
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert bench.counters.preemptions_recompute == 1


def test_a_full_tier_is_no_reason_to_stop() -> None:
    """Two victims, room for one."""
    bench = bench_of(8, host=(3, 0))
    bench.add("a", 12, max_tokens=18)
    bench.add("b", 8, max_tokens=20)
    bench.submit(stub_spec("c", range(50, 58), 20))
    bench.step()
    while len(bench.waiting) < 2:
        assert bench.num_steps < 50
        bench.step()
    assert bench.swapped == ["c"]
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    counters = bench.counters
    assert counters.preemptions_offload >= 1 <= counters.preemptions_recompute


def test_a_swapped_sequence_waits_until_its_whole_length_fits() -> None:
    bench, _ = two_of_which_one_is_swapped()
    while bench.running:
        assert bench.swapped == ["b"]
        bench.step()
    bench.step()
    assert bench.running == ["b"] and not bench.swapped
    assert bench.offloading is not None
    assert not bench.offloading.tier.owners, "what has computed again needs no copy"
    bench.run()
    bench.assert_exact()


@pytest.mark.parametrize("files", [0, 8])
def test_an_abort_while_swapped_leaves_nothing(files: int) -> None:
    bench, victim = two_of_which_one_is_swapped(host=(1 if files else 4, files))
    assert bench.swapped == ["b"]
    bench.engine.remove(victim)
    bench.check_host()
    assert bench.offloading is not None and not len(bench.offloading.tier)
    assert victim.status is SequenceStatus.FINISHED
    bench.run()
    bench.assert_exact("b")
    bench.assert_empty()


def test_what_does_not_fit_in_memory_goes_to_the_disk_and_comes_back() -> None:
    bench, victim = two_of_which_one_is_swapped(host=(1, 4))
    assert victim.status is SequenceStatus.SWAPPED
    assert sum(isinstance(move, Spill) for move in bench.mover.moves) == 2
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert sum(isinstance(move, Read) for move in bench.mover.moves) == 2
    assert not bench.mover.disk, "files were left"
    assert victim.recomputed_tokens == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_a_miss_from_which_on_all_is_computed_again(which: int) -> None:
    bench, victim = two_of_which_one_is_swapped(host=(1, 4))
    held = sorted(bench.mover.disk)
    # the first block saved was the first to go
    order = [m.file for m in bench.mover.moves if isinstance(m, Spill)]
    assert sorted(order) == held
    bench.mover.damaged.add(order[which])
    swapped = victim.num_swapped_tokens
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert bench.counters.host_lost_blocks == 1
    assert victim.recomputed_tokens == swapped - 4 * which
    assert victim.num_preemptions == 1, "a miss is no preemption"


def test_a_disk_that_takes_nothing_costs_computing() -> None:
    bench = bench_of(6, host=(1, 4))
    bench.mover.damaged.update(range(4))
    bench.add("a", 11, max_tokens=12)
    bench.add("b", 9, max_tokens=9)
    bench.run()
    bench.assert_exact()
    bench.assert_empty()
    assert bench.counters.host_lost_blocks >= 2


def test_others_of_the_step_compute_when_one_s_blocks_are_lost() -> None:
    bench = bench_of(7, host=(1, 8), config=config(seqs=3))
    bench.add("a", 8, max_tokens=14)
    victim = bench.add("b", 8, max_tokens=9)
    while not victim.num_preemptions and bench.num_steps < 50:
        bench.step()
    bench.mover.damaged.update(bench.mover.disk)
    bench.engine.remove(bench.sequences["a"])
    bench.add("c", 3, max_tokens=2)
    assert bench.step()
    assert len(bench.runner.steps[-1].sequences) == 1
    assert bench.waiting == ["b"]
    bench.run()
    bench.assert_exact("a")
    bench.assert_empty()


def test_a_pending_copy_is_kept_from_its_source() -> None:
    """b had just got a block for the copy of its leased tail; the copy was not made."""
    bench = bench_of(4)
    first = bench.add_joined("b", 3)
    bench.pin("lease", first.table.block_ids[0])
    second = bench.add_joined("c", 8)
    for block_id in second.table.block_ids:
        bench.pin("lease", block_id)
    bench.step()
    assert (bench.running, bench.swapped) == (["c"], ["b"])
    bench.unpin_all()
    bench.run()
    bench.assert_exact()
    assert first.recomputed_tokens == 0


def test_a_step_that_fails_after_blocks_came_back_begins_again() -> None:
    bench, victim = two_of_which_one_is_swapped()
    bench.engine.remove(bench.sequences["a"])
    bench.runner.poison = lambda output: (1,) if len(output.sequences) > 1 else ()
    bench.add("c", 3, max_tokens=2)
    bench.step()
    assert bench.owner.failures and victim.status is SequenceStatus.RUNNING
    assert victim.num_swapped_tokens, "it has computed nothing yet"
    bench.runner.poison = None
    bench.run()
    bench.assert_exact("a", "c")
    bench.assert_empty()


def test_log_probabilities_of_a_prompt_are_told_once_though_it_was_swapped() -> None:
    bench = bench_of(5, config=config(chunk=4))
    bench.add("a", 8, max_tokens=12)
    victim = bench.submit(stub_spec("b", range(7), 6, logprobs=0))
    while not victim.num_preemptions and bench.num_steps < 50:
        bench.step()
    assert victim.status is SequenceStatus.SWAPPED
    bench.run()
    bench.assert_exact()
    assert [entry.token_id for entry in victim.prompt_logprobs] == list(range(1, 7))


# --- beside prefix caching ----------------------------------------------------------------------


def test_blocks_that_the_cache_gives_up_are_found_in_the_tier() -> None:
    bench = bench_of(4, caching=True)
    for name, base in (("first", 0), ("other", 20), ("again", 0)):
        bench.submit(stub_spec(name, [base + i for i in range(13)], 2))
        bench.run()
    again = bench.sequences["again"]
    assert again.num_cached_tokens == 12
    assert bench.owner.computed["again"].total() == 2
    assert bench.counters.host_hit_blocks == 3
    bench.assert_exact()
    bench.assert_empty()


def test_blocks_are_kept_before_whoever_takes_them_writes() -> None:
    """Not only at a step's boundary: a reservation may be read into at once."""
    bench = bench_of(4, caching=True)
    bench.submit(stub_spec("first", range(13), 2))
    bench.run()
    assert bench.join(stub_spec("joined", range(40, 55), 2)) is not None
    bench.run()
    again = bench.submit(stub_spec("again", range(13), 2))
    bench.run()
    assert again.num_cached_tokens == 12
    bench.assert_exact()


def test_a_full_hit_in_the_tier_computes_the_last_token() -> None:
    bench = bench_of(4, caching=True)
    for name, base in (("first", 0), ("other", 20), ("again", 0)):
        bench.submit(stub_spec(name, [base + i for i in range(12)], 1))
        bench.run()
    assert bench.owner.computed["again"].total() == 1
    bench.assert_exact()


def test_a_prefix_lost_on_the_disk_is_computed_and_nothing_of_it_stays_held() -> None:
    bench = bench_of(4, host=(1, 8), caching=True)
    for name, base in (("first", 0), ("other", 20)):
        bench.submit(stub_spec(name, [base + i for i in range(13)], 2))
        bench.run()
    assert bench.offloading is not None
    found = [bench.offloading.tier.find(key) for key in bench.sequences["first"].hashes.values[:3]]
    files = [entry.file for entry in found if entry is not None and entry.file is not None]
    assert len(found) == 3 and files
    bench.mover.damaged.add(files[-1])
    again = bench.submit(stub_spec("again", range(13), 2))
    assert not bench.step(), "it was alone in the step"
    assert bench.waiting == ["again"] and not bench.offloading.tier.owners
    bench.run()
    assert bench.counters.host_lost_blocks == 1
    assert again.num_cached_tokens < 12 and again.num_preemptions == 0
    bench.assert_exact()
    bench.assert_empty()


def test_cached_contents_make_room_for_swapped_ones_and_not_the_reverse() -> None:
    bench = bench_of(5, host=(2, 0), caching=True)
    bench.submit(stub_spec("first", [40 + i for i in range(17)], 2))
    bench.run()
    bench.add("a", 8, max_tokens=12)
    victim = bench.submit(stub_spec("b", range(30, 35), 9))
    bench.step()
    assert bench.offloading is not None
    assert len(bench.offloading.tier) == 2 and not bench.offloading.tier.owners
    while not victim.num_preemptions and bench.num_steps < 50:
        bench.step()
    assert bench.swapped == ["b"]
    assert all(entry.owners for entry in bench.offloading.tier)
    bench.run()
    bench.assert_exact()
    bench.assert_empty()


def test_another_salt_finds_nothing_in_the_tier() -> None:
    bench = bench_of(4, caching=True)
    for number, salt in enumerate(("a", "b", "c", "b")):
        spec = stub_spec(str(number), range(13), 1)
        bench.submit(replace(spec, cache_salt=salt))
        bench.run()
    cached = [s.num_cached_tokens for s in bench.sequences.values()]
    assert cached == [0, 0, 0, 12]
    bench.assert_exact()


# --- who goes, who comes ------------------------------------------------------------------------

AGEING = 10.0


def prioritised(num_blocks: int, seqs: int = 8, **more: Any) -> Bench:
    return Bench(num_blocks, config=SchedulerConfig(seqs, 64, 64, 0.0, AGEING), **more)


def submit(bench: Bench, name: str, priority: int, num_prompt: int, max_tokens: int = 6) -> None:
    spec = stub_spec(name, range(num_prompt), max_tokens)
    bench.submit(replace(spec, priority=priority))


def test_the_victim_is_the_last_in_priority_then_the_newest() -> None:
    bench = prioritised(6)
    for name, priority in (("a", 1), ("b", 5), ("c", 1)):
        submit(bench, name, priority, 8)
    bench.step()
    bench.step()
    assert bench.preemptions() == [0, 1, 0]
    bench.run()
    bench.assert_exact()
    bench = prioritised(6)
    for name, priority in (("a", 1), ("b", 1), ("c", 1)):
        submit(bench, name, priority, 8)
    bench.step()
    bench.step()
    assert bench.preemptions() == [0, 0, 1]


def test_lower_priorities_are_admitted_first() -> None:
    bench = prioritised(32, seqs=1)
    submit(bench, "first", 9, 3)
    bench.step()
    for name, priority in (("late", 3), ("soon", -1), ("next", 0)):
        submit(bench, name, priority, 3)
    assert bench.waiting == ["soon", "next", "late"]
    bench.run()
    bench.assert_exact()


def test_priorities_mean_nothing_in_order_of_arrival() -> None:
    bench = Bench(32, config=config(seqs=1))
    for name, priority in (("a", 5), ("b", 0)):
        submit(bench, name, priority, 3)
    bench.step()
    assert (bench.running, bench.waiting) == (["a"], ["b"])


def test_nobody_waits_for_ever_behind_more_urgent_ones() -> None:
    """A stream of urgent requests that would keep the one seat taken."""
    bench = prioritised(32, seqs=1)
    submit(bench, "patient", 2, 3)
    patient = bench.sequences["patient"]
    number = 0
    while patient.first_scheduled_at is None:
        assert number < 5 * AGEING, "starved"
        submit(bench, f"urgent {number}", 0, 3, max_tokens=2)
        number += 1
        bench.step()
    before = [s.arrived_at for s in bench.sequences.values() if s.first_scheduled_at is not None]
    assert 2 * AGEING - 1 <= max(before) < 2 * AGEING, "two levels are worth so much waiting"
    bench.run()
    bench.assert_exact()


def test_the_tier_is_told_of_a_leak_by_name() -> None:
    bench, victim = two_of_which_one_is_swapped()
    assert bench.offloading is not None
    tier = bench.offloading.tier
    victim.num_swapped_tokens = 0
    del bench.engine.scheduler.sequences[victim.key]
    bench.engine.scheduler.waiting.clear()
    with pytest.raises(AssertionError, match="leaked: kept for"):
        bench.check_host()
    tier.save("nobody", [Content(BlockHash(b"x" * 16), 0, 4)])
    tier.release(victim.key)
    with pytest.raises(AssertionError, match="nobody, which is gone"):
        bench.check_host()
