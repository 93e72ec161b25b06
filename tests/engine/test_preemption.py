"""Who gives up blocks, what is computed again, and who joins with blocks: one situation each."""

from __future__ import annotations

from kvferry.engine.sequence import SequenceStatus
from tests.engine.stepping import Bench, config
from tests.fakes import stub_output, stub_spec

# --- preemption -----------------------------------------------------------------------------


def test_the_newest_is_preempted_and_returns_to_its_place_in_line() -> None:
    bench = Bench(6)
    for name in "abc":
        bench.add(name, 8, max_tokens=6)
    bench.step()
    bench.add("d", 1)
    bench.step()
    assert (bench.running, bench.waiting) == (["a", "b"], ["c", "d"])
    assert bench.has_preempted() and bench.engine.scheduler.num_preemptions == 1
    victim = bench.sequences["c"]
    assert (victim.num_preemptions, victim.num_computed_tokens) == (1, 0)
    assert victim.table.block_ids == [] and victim.status is SequenceStatus.WAITING
    bench.run()
    bench.assert_exact()
    bench.assert_empty()


def test_the_newest_preempts_itself_before_anybody_older() -> None:
    bench = Bench(4)
    bench.add("a", 6, max_tokens=3)
    bench.add("b", 8, max_tokens=3)
    bench.step()
    bench.step()
    assert (bench.running, bench.waiting) == (["a"], ["b"])
    assert bench.scheduled() == [1], "a computes in the same step"


def test_a_victim_gives_back_something_now() -> None:
    """The newest is passed over while a lease keeps all its blocks."""
    bench = Bench(6)
    for name in "abc":
        bench.add(name, 8, max_tokens=4)
    bench.step()
    for block_id in bench.sequences["c"].table.block_ids:
        bench.pin("c", block_id)
    bench.step()
    assert bench.sequences["b"].num_preemptions == 1
    assert bench.sequences["c"].num_preemptions == 0
    assert bench.running == ["a", "c"]
    bench.unpin_all()
    bench.run()
    bench.assert_exact()


def test_where_nobody_would_give_anything_back_nobody_is_preempted() -> None:
    bench = Bench(4)
    bench.add("a", 8, max_tokens=4)
    bench.add("b", 8, max_tokens=4)
    bench.step()
    for sequence in bench.sequences.values():
        for block_id in sequence.table.block_ids:
            bench.pin("lease", block_id)
    assert not bench.step()
    assert bench.running == ["a", "b"]
    bench.unpin_all()
    bench.run()
    bench.assert_exact()


def test_only_as_many_are_preempted_as_are_needed() -> None:
    bench = Bench(6)
    for name in "abc":
        bench.add(name, 8, max_tokens=3)
    bench.step()
    bench.step()
    assert bench.preemptions() == [0, 0, 1]
    bench = Bench(6, config=config(chunk=8))
    bench.add_half("a", 4, num_prompt=16)
    for name in "bcde":
        bench.add_joined(name, 3)
    bench.step()
    assert bench.preemptions() == [0, 0, 0, 0, 1], "one block was free, two were needed"


def test_recomputed_tokens_are_those_that_had_been_computed_before() -> None:
    bench = Bench(5, config=config(chunk=8))
    bench.add("a", 4, max_tokens=14)
    victim = bench.add("b", 7, max_tokens=6)
    while not victim.num_preemptions:
        bench.step()
    had = victim.max_computed_tokens
    assert had > 7, "it was decoding"
    bench.run()
    bench.assert_exact()
    assert victim.num_preemptions == 1
    assert victim.recomputed_tokens == had
    assert victim.recomputed_prompt_tokens == 7
    assert bench.sequences["a"].recomputed_tokens == 0


def test_delivered_tokens_are_prompt_to_the_cache_when_recomputed() -> None:
    bench = Bench(5)
    bench.add("a", 8, max_tokens=9)
    prompt = [7, 8, 9, 10]
    delivered = stub_output(prompt, 3)
    victim = bench.submit(stub_spec("b", prompt, 8, delivered))
    while not victim.num_preemptions:
        bench.step()
    bench.run()
    assert victim.token_ids == [*prompt, *stub_output(prompt, 8)], "delivered tokens are output"
    assert victim.recomputed_prompt_tokens == 7


def test_what_a_peer_had_computed_counts_as_recomputed() -> None:
    bench = Bench(5)
    bench.add("a", 8, max_tokens=9)
    bench.step()
    victim = bench.add_joined("b", 7)
    assert victim.max_computed_tokens == 7
    while not victim.num_preemptions:
        bench.step()
    bench.run()
    bench.assert_exact()
    assert victim.recomputed_prompt_tokens == 7


# --- joining with blocks --------------------------------------------------------------------


def test_who_joins_with_blocks_runs_at_once_beside_those_who_wait() -> None:
    bench = Bench(8, config=config(seqs=3))
    bench.add("a", 16, max_tokens=9)
    bench.step()
    bench.add("large", 20)
    joined = bench.add_joined("b", 7)
    bench.step()
    assert (bench.running, bench.waiting) == (["a", "b"], ["large"])
    assert joined.num_prefill_chunks == 0, "no position of its prompt is computed"
    assert joined.num_computed_tokens == 8


def test_who_joins_with_blocks_and_finds_no_seat_does_not_wait_behind_those_without() -> None:
    """b could not run while c holds its blocks, and c would wait behind b."""
    bench = Bench(6, config=config(seqs=2))
    bench.add("a", 8, max_tokens=9)
    bench.add("b", 7, max_tokens=9)
    bench.step()
    bench.add_joined("c", 8, max_tokens=2)
    assert bench.waiting == ["c"]
    while not bench.has_preempted():
        bench.step()
    assert (bench.running, bench.waiting) == (["a"], ["c", "b"])
    bench.step()
    assert bench.sequences["c"].first_scheduled_at == bench.clock.now, "in the seat that b had left"
    bench.run()
    bench.assert_exact()
    assert bench.sequences["c"].num_preemptions == 0


def test_whoever_needs_only_a_seat_is_not_held_up_by_the_watermark() -> None:
    bench = Bench(10, config=config(seqs=2, mark=0.5))
    bench.add_joined("a", 11, max_tokens=2)
    bench.add_joined("b", 11)
    bench.add_joined("c", 11)
    bench.step()
    assert (bench.running, bench.waiting) == (["b"], ["c"])
    assert bench.pool.num_free < bench.engine.scheduler.watermark_blocks
    bench.step()
    assert bench.running == ["b", "c"]


def test_blocks_of_those_who_wait_are_taken_back_when_nothing_else_can_run() -> None:
    """Two hold part of their prompts each, and neither can grow."""
    bench = Bench(4, config=config(seqs=1))
    bench.add("a", 1, max_tokens=3)
    bench.step()
    bench.add_half("b", 4)
    bench.add_half("c", 5)
    bench.run()
    bench.assert_exact()
    assert bench.preemptions() == [0, 0, 1]


def test_nothing_is_taken_back_in_a_step_that_preempts() -> None:
    """The running one gives up its own blocks: then one of those who wait can run."""
    bench = Bench(4, config=config(seqs=1))
    bench.add("a", 8, max_tokens=3)
    bench.step()
    bench.add_half("b", 3, num_prompt=5)
    bench.add_half("c", 3, num_prompt=5)
    bench.run()
    bench.assert_exact()
    assert bench.preemptions() == [1, 0, 0]


def test_nothing_is_taken_back_while_running_ones_wait_for_a_lease_to_end() -> None:
    bench = Bench(4, config=config(seqs=1))
    running = bench.add("a", 8, max_tokens=3)
    bench.step()
    for block_id in running.table.block_ids:
        bench.pin("lease", block_id)
    bench.add_half("b", 3)
    bench.add_half("c", 3)
    assert not bench.step()
    assert bench.preemptions() == [0, 0, 0]
    bench.unpin_all()
    bench.run()
    bench.assert_exact()


def test_the_first_in_line_keeps_its_blocks_though_nothing_can_run() -> None:
    """What is missing is under a lease: its own blocks would not help."""
    bench = Bench(4, config=config(seqs=1))
    running = bench.add("a", 8, max_tokens=3)
    bench.step()
    bench.add_half("b", 3)
    bench.engine.remove(running)
    keep = bench.join(stub_spec("lease", range(12), 2))
    assert keep is not None
    for block_id in keep.table.block_ids:
        bench.pin("lease", block_id)
    bench.engine.remove(keep)
    assert not bench.step()
    bench.unpin_all()
    bench.run()
    bench.assert_exact("a", "lease")
    assert bench.sequences["b"].num_preemptions == 0


def test_a_leased_tail_is_copied_before_it_is_written() -> None:
    bench = Bench(6)
    joined = bench.add_joined("a", 6, max_tokens=4)
    tail = joined.table.block_ids[1]
    bench.pin("lease", tail)
    content = bench.slots[tail].copy()
    bench.run()
    bench.assert_exact()
    assert bench.runner.steps[0].copies == ((tail, 2),)
    assert [step.copies for step in bench.runner.steps[1:]] == [()] * (len(bench.runner.steps) - 1)
    assert (bench.slots[tail] == content).all()


def test_a_copy_planned_for_a_sequence_that_is_then_preempted_is_not_made() -> None:
    """c is leased whole and takes the block that b had just got for its copy."""
    bench = Bench(4)
    first = bench.add_joined("b", 3)
    bench.pin("lease", first.table.block_ids[0])
    second = bench.add_joined("c", 8)
    for block_id in second.table.block_ids:
        bench.pin("lease", block_id)
    bench.step()
    assert (bench.running, bench.waiting) == (["c"], ["b"])
    assert bench.runner.steps[0].copies == ()
    bench.unpin_all()
    bench.run()
    bench.assert_exact()
