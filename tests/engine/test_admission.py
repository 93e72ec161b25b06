"""Who enters a step and who waits, and how sequences come and go: one situation each."""

from __future__ import annotations

import pytest

from kvferry.engine.sequence import SequenceStatus
from kvferry.kv_cache.block_table import BlockTable
from tests.engine.stepping import Bench, config

# --- budgets --------------------------------------------------------------------------------


def test_the_oldest_gets_a_chunk_and_the_next_what_is_left_of_the_budget() -> None:
    bench = Bench(32, config=config(tokens=10, chunk=7))
    bench.add("a", 20)
    bench.add("b", 20)
    taken = []
    while bench.engine.has_work:
        bench.step()
        taken.append(bench.scheduled())
    assert taken == [[7, 3], [7, 3], [6, 4], [7], [3]]
    bench.assert_exact()


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    bench = Bench(32, config=config(tokens=6, chunk=6))
    bench.add("a", 3, max_tokens=6)
    bench.step()
    bench.add("b", 30)
    for _ in range(5):
        bench.step()
        assert bench.scheduled() == [1, 5]


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


def test_new_ones_that_wait_are_not_preempted_ones() -> None:
    bench = Bench(4, config=config(seqs=1))
    bench.add("a", 3)
    bench.add("b", 3)
    bench.step()
    assert bench.waiting == ["b"] and not bench.has_preempted()


def test_whoever_is_admitted_takes_its_place_by_age() -> None:
    """b came before c, but had to wait for blocks."""
    bench = Bench(8)
    bench.add("a", 16, max_tokens=2)
    bench.step()
    bench.add("b", 20, max_tokens=4)
    bench.add_joined("c", 3)
    bench.step()
    assert (bench.running, bench.waiting) == (["c"], ["b"])
    bench.step()
    assert bench.running == ["b", "c"]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(4)
    bench.add("a", 8, max_tokens=9)
    bench.add("b", 7, max_tokens=2)
    bench.step()
    bench.add("c", 1)
    bench.step()
    assert (bench.running, bench.waiting) == (["a"], ["b", "c"])
    assert bench.pool.num_free == 1, "c would fit, but a is still growing"


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
            aborted = bench.add_joined("b", 9)
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
