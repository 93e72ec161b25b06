"""The engine's step: who hears what, what is sealed, and what a failing step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.batch import SchedulerOutput
from kvferry.engine.request import Attempt, FinishReason, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceFailure, SequenceKey, SequenceProgress
from kvferry.engine.stopping import Finish
from kvferry.kv_cache.block_table import SealedBlock
from kvferry.kv_cache.hashing import HashChain, root_hash
from tests.engine.stepping import MODEL, Bench, CountingOwner
from tests.fakes import ATTEMPT, RecordingOwner, stub_output, stub_spec

SMALL = SchedulerConfig(8, 64, 8, 0.0)


# --- progress -------------------------------------------------------------------------------


def test_each_owner_hears_of_each_step_of_its_sequence() -> None:
    bench = Bench(8, config=SMALL)
    other = CountingOwner(pool=bench.pool)
    bench.add("a", 10, max_tokens=2)
    sequence = bench.engine.new_sequence(stub_spec("b", range(3), 2), ATTEMPT, other)
    bench.run()
    mine = [(p.num_computed, p.token_id is not None) for p in bench.owner.progress]
    assert mine == [(8, False), (2, True), (1, True)]
    assert [p.num_computed for p in other.progress] == [3, 1]
    assert {id(p.sequence) for p in other.progress} == {id(sequence)}
    assert other.tokens("b") == stub_output(range(3), 2)
    finishes = [p.finish for p in bench.owner.progress]
    assert finishes == [None, None, Finish(FinishReason.LENGTH)]


def test_a_sequence_is_named_by_request_and_attempt() -> None:
    bench = Bench(8)
    spec = stub_spec("a", range(3), 2)
    one = bench.submit(spec)
    two = bench.submit(spec, attempt=Attempt(1, 2))
    assert one.key == SequenceKey(RequestId("a"), ATTEMPT)
    bench.run()
    assert one.token_ids == two.token_ids == [0, 1, 2, *stub_output(range(3), 2)]


def test_the_table_is_still_there_when_the_owner_hears_of_the_end() -> None:
    """So that blocks can be pinned before they would be freed."""

    class Pinning(RecordingOwner):
        def on_progress(self, progress: SequenceProgress, now: float) -> None:
            super().on_progress(progress, now)
            for block in progress.sealed:
                bench.pin("lease", block.block_id)

    bench = Bench(8, config=SMALL)
    owner = Pinning()
    spec = stub_spec("a", range(10), 9)
    sequence = bench.engine.new_sequence(spec, ATTEMPT, owner, prefill_only=True)
    bench.run()
    assert sequence.table.block_ids == []
    assert bench.pool.num_free == 5
    assert [p.token_id for p in owner.progress] == [None, stub_output(range(10), 1)[0]]
    bench.unpin_all()
    bench.assert_empty()


@pytest.mark.parametrize("chunk", [3, 8])
@pytest.mark.parametrize("length", range(1, 14))
def test_a_prefill_seals_every_position_once_and_ends_with_its_first_token(
    length: int, chunk: int
) -> None:
    bench = Bench(8, config=SchedulerConfig(8, 64, chunk, 0.0))
    sequence = bench.submit(stub_spec("a", range(length), 9), prefill_only=True)
    bench.run()
    sealed = [block for p in bench.owner.progress for block in p.sealed]
    assert [block.start for block in sealed] == list(range(0, length, 4))
    assert sum(block.num_tokens for block in sealed) == length
    assert bench.owner.tokens("a") == stub_output(range(length), 1)
    assert sequence.num_computed_tokens == length, "token 1 has no KV here"
    assert bench.owner.progress[-1].finish is None, "the request goes on elsewhere"
    bench.assert_empty()


def test_a_prefill_whose_first_token_ends_the_request_says_so() -> None:
    bench = Bench(8)
    bench.submit(stub_spec("a", range(5), 1), prefill_only=True)
    bench.run()
    (progress,) = bench.owner.progress
    assert progress.finish == Finish(FinishReason.LENGTH)


def test_blocks_are_sealed_in_the_step_that_fills_them_and_partial_ones_only_by_prefill() -> None:
    bench = Bench(8, config=SMALL)
    sequence = bench.add("a", 6, max_tokens=5)
    bench.step()
    first, second = sequence.table.block_ids
    bench.step()
    bench.step()
    assert [p.sealed for p in bench.owner.progress] == [
        (SealedBlock(0, first, 4),),
        (),
        (SealedBlock(4, second, 4),),
    ]


def test_the_chain_covers_model_and_salt_and_may_be_begun_by_somebody_else() -> None:
    bench = Bench(8)
    salted = RequestSpec(
        RequestId("a"), tuple(range(8)), sampling=SamplingParams(max_tokens=1), cache_salt="tenant"
    )
    begun = bench.engine.hash_chain(salted)
    one = begun.at(0, range(8))
    assert one == HashChain(root_hash(MODEL, "tenant"), 4).at(0, range(8))
    assert one != HashChain(root_hash(MODEL), 4).at(0, range(8))
    assert one != HashChain(root_hash("other@1", "tenant"), 4).at(0, range(8))
    sequence = bench.engine.new_sequence(salted, ATTEMPT, bench.owner, hashes=begun)
    assert sequence.hashes is begun
    bench.run()
    assert len(begun.values) == 2


@pytest.mark.parametrize("num_prompt", range(1, 10))
def test_a_sequence_with_computed_blocks_computes_none_of_its_prompt(num_prompt: int) -> None:
    bench = Bench(8)
    bench.runner.stub.forbid_prompt = True
    spec = stub_spec("a", range(num_prompt), 6)
    sequence = bench.join(spec)
    assert sequence is not None
    bench.run()
    bench.assert_exact()
    assert bench.owner.tokens("a") == stub_output(range(num_prompt), 6)[1:], "token 1 came along"
    assert sequence.recomputed_tokens == 0 == sequence.num_prefill_chunks


def test_times_are_those_of_the_step_that_first_held_the_sequence() -> None:
    bench = Bench(8, config=SchedulerConfig(1, 64, 64, 0.0))
    first, second = bench.add("a", 3, max_tokens=3), bench.add("b", 3)
    bench.run()
    assert (first.first_scheduled_at, second.first_scheduled_at) == (1.0, 4.0)
    assert bench.engine.step_started_at == 4.0


def test_without_work_a_step_does_nothing() -> None:
    bench = Bench(8)
    assert not bench.step()
    assert bench.runner.steps == []


# --- ends -----------------------------------------------------------------------------------


def ending(limit: str, delivered: int) -> RequestSpec:
    """A request that ends with its fifth output token, ``delivered`` of which are there."""
    prompt = tuple(range(6))
    output = stub_output(prompt, 5)
    assert output.index(output[4]) == 4
    return RequestSpec(
        RequestId("a"),
        prompt,
        (tuple(output[:delivered]),),
        SamplingParams(
            max_tokens=5 if limit == "max_tokens" else 90,
            temperature=0.0,
            stop_token_ids=(output[4],) if limit == "stop id" else (),
        ),
        eos_token_ids=(output[4],) if limit == "eos" else (),
        max_model_len=11 if limit == "max_model_len" else 100,
    )


@pytest.mark.parametrize("delivered", [0, 1, 4])
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("max_tokens", FinishReason.LENGTH),
        ("max_model_len", FinishReason.LENGTH),
        ("eos", FinishReason.STOP),
        ("stop id", FinishReason.STOP),
    ],
)
def test_a_request_ends_at_the_same_token_however_many_were_delivered_before(
    limit: str, reason: FinishReason, delivered: int
) -> None:
    bench = Bench(8)
    spec = ending(limit, delivered)
    bench.submit(spec)
    bench.run()
    assert bench.owner.tokens("a") == stub_output(range(6), 5)[delivered:]
    indexes = [share.output_index for step in bench.runner.steps for share in step.sequences]
    assert indexes == list(range(delivered, 5)), "part of the generator's key"
    finish = bench.owner.progress[-1].finish
    assert finish is not None and finish.reason is reason
    assert (finish.stop_reason is not None) == (limit == "stop id")
    bench.assert_empty()


# --- failing steps --------------------------------------------------------------------------


def test_a_step_that_raises_ends_only_who_raises_alone() -> None:
    bench = Bench(8, config=SchedulerConfig(2, 64, 8, 0.0))
    bench.add("a", 9, max_tokens=4)
    bench.add("b", 3, max_tokens=4)
    bench.add("c", 5, max_tokens=4)
    bench.step()
    bench.runner.stub.fail_next = 2  # the batch, then a by itself
    assert bench.step(), "the engine has done something: others may run now"
    assert bench.owner.failures == ["ArithmeticError: the stub model was told to fail"]
    assert bench.engine.num_failed_steps == 1
    assert (bench.running, bench.waiting) == (["b"], ["c"])
    bench.run()
    bench.assert_exact("a")
    bench.assert_empty()


def test_a_step_in_which_all_raise_alone_ends_them_all_and_nobody_else() -> None:
    bench = Bench(8, config=SchedulerConfig(2, 64, 8, 0.0))
    bench.add("a", 9, max_tokens=4)
    bench.add("b", 3, max_tokens=4)
    bench.add("c", 5, max_tokens=4)
    bench.step()
    bench.runner.stub.fail_next = 3
    assert bench.step()
    assert bench.engine.num_failed_steps == 2
    assert (bench.running, bench.waiting) == ([], ["c"])
    assert bench.audit().counts["free"] == 8  # type: ignore[index]
    bench.run()
    bench.assert_exact("a", "b")
    bench.assert_empty()


def poisoner(*names: str) -> Callable[[SchedulerOutput], Sequence[int]]:
    """Poisons the rows whose sequence begins with the name's token, when they sample."""
    marks = {200 + ord(name) for name in names}

    def poison(output: SchedulerOutput) -> Sequence[int]:
        return [i for i, share in enumerate(output.sequences) if share.sampling.seed in marks]

    return poison


def marked(name: str, num_prompt: int, max_tokens: int) -> RequestSpec:
    """A request whose rows a poisoner can tell."""
    return RequestSpec(
        RequestId(name),
        tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=200 + ord(name)),
    )


def test_a_poisoned_row_ends_its_sequence_and_the_others_go_on_right() -> None:
    bench = Bench(16, config=SMALL)
    for name, length in (("a", 10), ("b", 3), ("c", 6)):
        bench.submit(marked(name, length, 5))
    bench.step()
    bench.runner.poison = poisoner("b")
    assert bench.step()
    assert bench.owner.failures == ["PoisonedRows: no token can be chosen"]
    assert bench.running == ["a", "c"]
    assert bench.engine.num_failed_steps == 1
    bench.run()
    bench.assert_exact("b")
    bench.assert_empty()
    assert all(s.recomputed_tokens == 0 for s in bench.sequences.values())


@given(
    st.sets(st.sampled_from("abcd"), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=4, max_size=4),
    st.integers(0, 6),
    st.integers(6, 12),
)
@settings(max_examples=200)
def test_whichever_rows_are_poisoned_only_they_end(
    names: set[str], shapes: list[tuple[int, bool]], after: int, num_blocks: int
) -> None:
    """Also where the poisoned step made a copy, reopened a block, or preempted somebody."""
    bench = Bench(num_blocks, config=SMALL)
    for name, (length, joins) in zip("abcd", shapes, strict=True):
        spec = marked(name, length, 9)
        joined = bench.join(spec) if joins else None
        if joined is None:
            bench.submit(spec)
        elif length % 4:
            bench.pin(name, joined.table.block_ids[-1])
    for _ in range(after):
        bench.step()
    left = {name for name in names if bench.sequences[name].table.block_ids}
    bench.runner.poison = poisoner(*names)
    for _ in range(400):
        if not bench.engine.has_work:
            break
        bench.step()
        if bench.num_steps == after + 20:
            bench.unpin_all()
    bench.unpin_all()
    bench.assert_exact(*names)
    bench.assert_empty()
    assert len(bench.owner.failures) <= len(names)
    assert len(bench.owner.failures) >= (1 if left else 0)


def test_an_owner_may_end_another_sequence_of_the_same_step() -> None:
    """It hears nothing more, as after any other abort."""

    class Ending(CountingOwner):
        def on_progress(self, progress: SequenceProgress, now: float) -> None:
            super().on_progress(progress, now)
            bench.engine.remove(bench.sequences["b"])

        def on_failure(self, failure: SequenceFailure, now: float) -> None:
            super().on_failure(failure, now)
            bench.engine.remove(bench.sequences["b"])

    for fails in (False, True):
        bench = Bench(8, owner=Ending())
        bench.add("a", 3)
        bench.add("b", 3)
        bench.runner.stub.fail_next = 2 if fails else 0  # the batch, then a by itself
        bench.run()
        heard = [p.sequence.key.request_id for p in bench.owner.progress]
        assert heard == ([] if fails else ["a"])
        assert len(bench.owner.failures) == fails
        bench.assert_empty()
