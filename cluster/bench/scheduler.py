"""What a step costs beside the model: scheduling and book-keeping over a runner that does nothing.

``add_running`` also gives ``bench engine`` its batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from kvferry.cluster.bench.machine import Call, timed
from kvferry.cluster.reports.common import Json
from kvferry.engine.batch import ModelRunner, RunnerOutput, SchedulerOutput
from kvferry.engine.engine import Engine
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.engine.sequence import SequenceFailure, SequenceProgress
from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.block_table import BlockTable

BLOCK_SIZE = 16
MAX_STEPS = 4 * BLOCK_SIZE
VOCAB_SIZE = 50_000
NAME, ATTEMPT = "bench@0", Attempt(1, 1)


class NullRunner:
    """Answers every sequence with the same token, at once."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Computes nothing."""
        return RunnerOutput((1,) * len(output.sequences))


class Listener:
    """A sequence owner that wants nothing but that no step fails."""

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        """Nothing."""

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        """A step that fails measures nothing."""
        raise RuntimeError(f"a measured step failed: {failure.message}")


def blocks_of(lengths: Sequence[int], num_steps: int) -> int:
    """Blocks that sequences of these lengths fill after ``num_steps`` decode steps."""
    return sum(-(-(length + num_steps + 1) // BLOCK_SIZE) for length in lengths)


def make_engine(
    runner: ModelRunner, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int
) -> Engine:
    """An engine without sequences whose steps are as large as these limits."""
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_num_batched_tokens, 0.0)
    return Engine(config, runner, BlockPool(num_blocks), BLOCK_SIZE, NAME, time.perf_counter)


def add_running(engine: Engine, lengths: Sequence[int], vocab_size: int) -> None:
    """A sequence of each length that decodes; its KV counts as computed."""
    for number, length in enumerate(lengths):
        spec = spec_of(number, length, vocab_size)
        table = BlockTable(BLOCK_SIZE, engine.pool.allocate(-(-length // BLOCK_SIZE)))
        hashes = engine.hash_chain(spec)
        engine.kv.seal(table, spec.prompt_token_ids, length, hashes)
        engine.new_sequence(
            spec,
            ATTEMPT,
            Listener(),
            table=table,
            hashes=hashes,
            output_token_ids=(1,),
            num_computed_tokens=length,
        )


def spec_of(number: int, length: int, vocab_size: int, max_tokens: int = 1 << 20) -> RequestSpec:
    """A greedy request of a fixed prompt that no other request has."""
    prompt = tuple((number * 7919 + 31 * place) % vocab_size for place in range(length))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return RequestSpec(RequestId(f"bench-{number}"), prompt, sampling=sampling)


def scheduler_rows(num_running: Sequence[int], context: int, budget_s: float) -> list[Json]:
    """Steps of engines with so many sequences each, in turns.

    Lengths lie around ``context``, so that blocks fill in turn. What another engine's step drives
    out of the caches, a model's step would, too.
    """
    engines = [_full_engine(count, context) for count in num_running]
    calls = {str(engine): _stepping(engine) for engine in engines}
    times = timed(calls, budget_s, at_least=BLOCK_SIZE, at_most=MAX_STEPS)
    took = [median(values) for values in times.values()]
    return [
        {
            "num_running": count,
            "context": context,
            "steps_per_s": 1 / seconds,
            "s_per_scheduled_token": seconds / count,
        }
        for count, seconds in zip(num_running, took, strict=True)
    ]


def _full_engine(num_running: int, context: int) -> Engine:
    lengths = [context + number % BLOCK_SIZE for number in range(num_running)]
    num_blocks = blocks_of(lengths, MAX_STEPS + 1)
    engine = make_engine(NullRunner(), num_blocks, num_running, num_running)
    add_running(engine, lengths, VOCAB_SIZE)
    return engine


def _stepping(engine: Engine) -> Call:
    return lambda _: engine.step()
