"""Who enters a step, who is preempted, and who waits: one situation each."""

from __future__ import annotations

import pytest

from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceState, SequenceStatus
from kvferry.kv_cache.block_table import BlockTable
from tests.engine.stepping import Bench
from tests.fakes import ATTEMPT, stub_output, stub_spec


def config(seqs: int = 8, tokens: int = 64, chunk: int = 64, mark: float = 0.0) -> SchedulerConfig:
    return SchedulerConfig(seqs, tokens, chunk, mark)


def scheduled(bench: Bench) -> list[int]:
    """Tokens of each sequence in the last step."""
    return [len(share.token_ids) for share in bench.runner.steps[-1].sequences]


def join(bench: Bench, name: str, num_prompt: int, max_tokens: int = 9) -> SequenceState:
    sequence = bench.join(stub_spec(name, range(num_prompt), max_tokens))
    assert sequence is not None
    return sequence


# --- budgets --------------------------------------------------------------------------------


def test_the_oldest_gets_a_chunk_and_the_next_what_is_left_of_the_budget() -> None:
    bench = Bench(32, config=config(tokens=10, chunk=7))
    bench.add("a", 20)
    bench.add("b", 20)
    taken = []
    while bench.engine.has_work:
        bench.step()
        taken.append(scheduled(bench))
    assert taken == [[7, 3], [7, 3], [6, 4], [7], [3]]
    bench.assert_exact()


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    bench = Bench(32, config=config(tokens=6, chunk=6))
    bench.add("a", 3, max_tokens=6)
    bench.step()
    bench.add("b", 30)
    for _ in range(5):
        bench.step()
        assert scheduled(bench) == [1, 5]


def test_a_token_is_sampled_only_after_the_last_chunk() -> None:
    bench = Bench(32, config=config(chunk=4))
    sequence = bench.add("a", 9, max_tokens=3)
    for _ in range(5):
        bench.step()
    samples = [share.sample for step in bench.runner.steps for share in step.sequences]
    assert samples == [False, False, True, True, True]
    assert [p.token_id is not None for p in bench.owner.progress] == samples
    assert sequence.num_prefill_chunks == 3
    indexes = [step.sequences[0].output_index for step in bench.runner.steps]
    assert indexes == [0, 0, 0, 1, 2]


def test_no_more_sequences_run_than_there_are_seats() -> None:
    bench = Bench(32, config=config(seqs=2))
    for name in "abc":
        bench.add(name, 3, max_tokens=3 if name == "b" else 5)
    bench.step()
    assert (bench.running, bench.waiting) == (["a", "b"], ["c"])
    for _ in range(2):
        bench.step()
    assert bench.running == ["a"], "b has ended"
    bench.step()
    assert (bench.running, bench.waiting) == (["a", "c"], [])


# --- admission ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt", "admitted"), [(12, True), (13, False)])
def test_the_watermark_is_kept_free_while_somebody_runs(num_prompt: int, admitted: bool) -> None:
    """Ten blocks: three run, four are the watermark, three are to be had."""
    bench = Bench(10, config=config(mark=0.4))
    assert bench.engine.scheduler.watermark_blocks == 4
    bench.add("a", 11, max_tokens=5)
    bench.step()
    bench.add("b", num_prompt)
    bench.step()
    assert (bench.sequences["b"].first_scheduled_at is not None) == admitted
    bench.run()
    bench.assert_exact()


def test_the_watermark_keeps_nobody_out_of_an_idle_pool() -> None:
    bench = Bench(10, config=config(mark=0.5))
    bench.add("a", 40)
    bench.run()
    bench.assert_exact()


def test_a_prompt_is_admitted_when_all_of_it_fits_not_its_first_chunk() -> None:
    bench = Bench(10, config=config(chunk=4))
    bench.add("a", 20, max_tokens=2)
    for _ in range(5):
        bench.step()
    bench.add("b", 21)
    bench.step()
    assert bench.waiting == ["b"], "five blocks are free, six are needed"
    bench.run()
    bench.assert_exact()


def test_blocks_that_an_admitted_prompt_still_needs_are_not_given_to_the_next() -> None:
    bench = Bench(10, config=config(chunk=4))
    bench.add("a", 24)
    bench.step()
    bench.add("b", 17)
    bench.step()
    assert bench.pool.num_free == 8, "a holds two blocks and needs six"
    assert bench.waiting == ["b"], "it needs five"
    bench.add("c", 1)
    bench.run()
    assert bench.engine.scheduler.num_preemptions == 0
    bench.assert_exact()


def test_the_first_that_does_not_fit_stops_the_line() -> None:
    bench = Bench(10)
    bench.add("a", 20, max_tokens=4)
    bench.step()
    bench.add("large", 25)
    bench.add("small", 1)
    bench.step()
    assert bench.waiting == ["large", "small"]
    bench.run()
    first = {name: s.first_scheduled_at or 0.0 for name, s in bench.sequences.items()}
    assert first["a"] < first["large"] <= first["small"]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(4)
    bench.add("a", 8, max_tokens=9)
    bench.add("b", 7, max_tokens=2)
    bench.step()
    bench.add("c", 1)
    bench.step()
    assert (bench.running, bench.waiting) == (["a"], ["b", "c"])
    assert bench.pool.num_free == 1, "c would fit, but a is still growing"


# --- preemption -----------------------------------------------------------------------------


def test_the_newest_is_preempted_and_returns_to_its_place_in_line() -> None:
    bench = Bench(6)
    for name in "abc":
        bench.add(name, 8, max_tokens=6)
    bench.step()
    bench.add("d", 1)
    bench.step()
    assert (bench.running, bench.waiting) == (["a", "b"], ["c", "d"])
    assert bench.engine.scheduler.has_preempted and bench.engine.scheduler.num_preemptions == 1
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
    assert scheduled(bench) == [1], "a computes in the same step"


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
    bench = Bench(8, config=config(chunk=8))
    bench.add("a", 17)
    for name in "bc":
        bench.add(name, 1, max_tokens=9)
    bench.run()
    assert bench.engine.scheduler.num_preemptions == 0
    bench = Bench(6)
    for name in "abc":
        bench.add(name, 8, max_tokens=3)
    bench.step()
    bench.step()
    assert [s.num_preemptions for s in bench.sequences.values()] == [0, 0, 1]


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
    victim = join(bench, "b", 7)
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
    joined = join(bench, "b", 7)
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
    join(bench, "c", 8, max_tokens=2)
    assert bench.waiting == ["c"]
    bench.step()
    bench.run()
    bench.assert_exact()
    assert bench.sequences["b"].num_preemptions >= 1
    assert bench.sequences["c"].num_preemptions == 0
    first = bench.sequences["c"].first_scheduled_at
    assert first is not None and first <= 4.0, "it took the seat that b had to leave"


def test_whoever_needs_only_a_seat_is_not_held_up_by_the_watermark() -> None:
    bench = Bench(10, config=config(seqs=2, mark=0.5))
    bench.add("a", 12, max_tokens=2)
    bench.add("b", 8, max_tokens=9)
    bench.step()
    join(bench, "c", 7)
    bench.step()
    assert bench.running == ["b"] and bench.waiting == ["c"]
    assert bench.pool.num_free - 1 < bench.engine.scheduler.watermark_blocks + 1
    bench.step()
    assert bench.running == ["b", "c"]


def test_blocks_of_those_who_wait_are_taken_back_when_nothing_else_can_run() -> None:
    """Two hold half of their prompts each, and neither half can grow."""
    bench = Bench(4, config=config(seqs=1))
    bench.add("a", 1, max_tokens=3)
    bench.step()
    for name in ("b", "c"):
        assert bench.join(stub_spec(name, range(14), 2), num_computed=4 + (name == "c")) is not None
    bench.run()
    bench.assert_exact()
    assert [s.num_preemptions for s in bench.sequences.values()] == [0, 0, 1]


def test_a_leased_tail_is_copied_before_it_is_written() -> None:
    bench = Bench(6)
    joined = join(bench, "a", 6, max_tokens=4)
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
    first = join(bench, "b", 3)
    bench.pin("lease", first.table.block_ids[0])
    second = join(bench, "c", 8)
    for block_id in second.table.block_ids:
        bench.pin("lease", block_id)
    bench.step()
    assert (bench.running, bench.waiting) == (["c"], ["b"])
    assert bench.runner.steps[0].copies == ()
    bench.unpin_all()
    bench.run()
    bench.assert_exact()


# --- taking in and out ----------------------------------------------------------------------


def test_one_key_names_one_sequence() -> None:
    bench = Bench(4)
    bench.add("a", 3)
    with pytest.raises(ValueError, match="is already in the scheduler"):
        bench.add("a", 3)
    bench.run()


def test_removing_twice_or_after_the_key_was_taken_again_changes_nothing() -> None:
    bench = Bench(4)
    old = bench.add("a", 3, max_tokens=5)
    bench.step()
    bench.engine.remove(old)
    bench.engine.remove(old)
    bench.assert_empty()
    bench.add("a", 3, max_tokens=2)
    bench.engine.remove(old)
    bench.run()
    bench.assert_exact()


@pytest.mark.parametrize(
    "state", ["waiting", "mid-chunk", "decoding", "preempted", "waiting with blocks", "ended"]
)
def test_an_abort_in_every_state_leaves_nothing_and_harms_nobody(state: str) -> None:
    bench = Bench(8, config=config(seqs=2, tokens=8, chunk=4))
    match state:
        case "waiting":
            bench.add("a", 29, max_tokens=2)
            bench.step()
            aborted = bench.add("b", 9)
            bench.step()
            assert aborted.status is SequenceStatus.WAITING
        case "mid-chunk":
            aborted = bench.add("b", 9, max_tokens=5)
            bench.step()
            assert 0 < aborted.num_computed_tokens < 9
        case "decoding":
            aborted = bench.add("b", 3, max_tokens=9)
            for _ in range(4):
                bench.step()
            assert aborted.num_output_tokens == 4
        case "preempted":
            bench.add("a", 15, max_tokens=16)
            aborted = bench.add("b", 7, max_tokens=16)
            while not aborted.num_preemptions:
                bench.step()
            assert aborted.status is SequenceStatus.WAITING
        case "waiting with blocks":
            bench.add("a", 3, max_tokens=3)
            bench.add("c", 3, max_tokens=3)
            bench.step()
            aborted = join(bench, "b", 9)
            assert aborted.status is SequenceStatus.WAITING
        case _:
            aborted = bench.add("b", 3)
            bench.run()
    bench.engine.remove(aborted)
    assert aborted.status is SequenceStatus.FINISHED
    assert aborted.table == BlockTable(4)
    bench.run()
    bench.assert_exact("b")
    bench.assert_empty()
    assert ATTEMPT not in {key.attempt for key in bench.engine.scheduler.sequences}
