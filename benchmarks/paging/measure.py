"""The real pool and scheduler over a list of lengths, with a runner that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paging.lengths import Lengths
from kvferry.engine.batch import RunnerOutput, SchedulerOutput
from kvferry.engine.engine import Engine
from kvferry.engine.request import Attempt, RequestId, RequestSpec, SamplingParams
from kvferry.engine.scheduler import Scheduler, SchedulerConfig
from kvferry.engine.sequence import SequenceFailure, SequenceProgress
from kvferry.kv_cache.block_pool import BlockPool

_WHOLE = 1 << 30  # tokens per step: a prompt is one chunk, memory alone limits the batch


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the steps that began with somebody waiting for memory.

    Attributes:
        num_requests: running at once.
        most_requests: running at once at most.
        wasted_tokens: slots of its blocks that a running request has not filled.
        used: share of the memory's slots that hold KV.
        num_steps: until the last request had ended.
        num_preemptions: of all requests.
    """

    num_requests: float
    most_requests: int
    wasted_tokens: float
    used: float
    num_steps: int
    num_preemptions: int


class _Counting:
    """A runner whose every token is 0 and which counts, and an owner that listens to nobody."""

    def __init__(self, block_size: int) -> None:
        self.scheduler: Scheduler | None = None
        self.steps = self.full_steps = self.running = self.most = self.held = self.filled = 0
        self._block_size = block_size

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        shares = output.sequences
        self.steps += 1
        self.most = max(self.most, len(shares))
        if self.scheduler is not None and self.scheduler.waiting:
            self.full_steps += 1
            self.running += len(shares)
            self.held += sum(len(share.block_table) for share in shares) * self._block_size
            self.filled += sum(share.start + len(share.token_ids) for share in shares)
        return RunnerOutput(tuple(0 if share.sample else None for share in shares))

    def on_progress(self, progress: SequenceProgress, now: float) -> None:
        pass

    def on_failure(self, failure: SequenceFailure, now: float) -> None:
        raise AssertionError(failure.message)


def measure(requests: Sequence[Lengths], memory_tokens: int, block_size: int) -> Measured:
    """Run ``requests``, all there from the start, in a pool of ``memory_tokens`` slots."""
    counting = _Counting(block_size)
    pool = BlockPool(memory_tokens // block_size)
    config = SchedulerConfig(len(requests), _WHOLE, _WHOLE)
    engine = Engine(config, counting, pool, block_size, "none@0", time.monotonic)
    counting.scheduler = engine.scheduler
    for number, request in enumerate(requests):
        spec = RequestSpec(
            RequestId(str(number)),
            (number,) * request.num_input,
            sampling=SamplingParams(max_tokens=request.num_output),
        )
        engine.new_sequence(spec, Attempt(0, 0), counting)
    while engine.has_work:
        engine.step()
    full, running = counting.full_steps, counting.running
    return Measured(
        running / full if full else float(counting.most),
        counting.most,
        (counting.held - counting.filled) / running if running else 0.0,
        counting.filled / (full * memory_tokens) if full else 0.0,
        counting.steps,
        engine.scheduler.num_preemptions,
    )
