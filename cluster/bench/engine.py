"""``kvferry bench engine``: whole steps of a real model in one process, and where their time goes.

A step is timed in turns as it is, with timers around its parts, and as plain torch would do it.
Does not know how results are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar, cast

import torch

from kvferry.cluster.bench.eager import EagerKernels
from kvferry.cluster.bench.machine import gemm_rate, read_bandwidth, threads
from kvferry.cluster.bench.parts import (
    KERNELS,
    PARTS,
    SCHEDULING,
    PartTimer,
    TimedKernels,
    TimedRunner,
    timed_weights,
)
from kvferry.cluster.bench.scheduler import (
    ATTEMPT,
    BLOCK_SIZE,
    Listener,
    add_running,
    blocks_of,
    make_engine,
    scheduler_rows,
    spec_of,
)
from kvferry.cluster.reports.common import Json, dist
from kvferry.engine.batch import ModelRunner, RunnerOutput, SchedulerOutput
from kvferry.engine.kernel_choice import choose_kernels
from kvferry.engine.model_runner import TorchModelRunner
from kvferry.engine.models.linear import ModelDtype
from kvferry.engine.models.llama import Kernels, LlamaModel
from kvferry.engine.models.loading import kv_layout, load_model
from kvferry.engine.models.size import ModelSize

Say = Callable[[str], None]
AnyRunner = TypeVar("AnyRunner", bound=TorchModelRunner)
KV_STD = 0.5  # of the random KV that stands for a prompt's


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, and for how long.

    Attributes:
        batches: sequences of the decode rows.
        context: their length in tokens.
        prompt: tokens of the prefill row.
        num_running, scheduler_context: of the scheduler's rows.
        working_set_bytes, gemm_size: of the roof's measurement.
        budget_s: of one row.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 290
    prompt: int = 512
    num_running: tuple[int, ...] = (1, 64, 256, 1024)
    scheduler_context: int = 2048
    working_set_bytes: int = 512 << 20
    gemm_size: int = 2048
    budget_s: float = 5.0


TINY = Sizes((1, 2), 20, 24, (1, 4), 40, 1 << 16, 32, 0.0)
"""Seconds for all of it with a small model: for tests of everything but the figures."""


def bench_engine(folder: Path, dtype: ModelDtype, count: int, sizes: Sizes, say: Say) -> Json:
    """The fields of ``bench engine`` with ``count`` threads, by the family that would serve.

    Raises ModelError.
    """
    say("loading the model")
    model = load_model(folder, dtype, choose_kernels().kernels)
    plain = "float32" if dtype == "int8" else dtype
    eager = load_model(folder, plain, EagerKernels())
    with threads(count), torch.inference_mode():
        say("memory and matrix products")
        roof = Roof(
            read_bandwidth(sizes.working_set_bytes, min(1.0, sizes.budget_s)),
            gemm_rate(sizes.gemm_size, min(0.5, sizes.budget_s)),
        )
        rows = []
        for batch in sizes.batches:
            say(f"decode, batch {batch}")
            steps = Steps(model, eager, batch, sizes.context, 1)
            rows.append(_row(steps, roof, count, sizes.budget_s))
        say(f"prefill, {sizes.prompt} tokens")
        prefill = Steps(model, eager, 1, sizes.prompt, sizes.prompt)
        rows.append(_row(prefill, roof, count, sizes.budget_s))
    say("scheduler")
    budget_s = min(4.0, sizes.budget_s)
    scheduler = scheduler_rows(sizes.num_running, sizes.scheduler_context, budget_s)
    return {"rows": rows, "scheduler": scheduler}


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine allows: bytes and float32 operations per second."""

    bytes_per_s: float
    flops: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least that a step can take."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops)


class SwitchRunner:
    """Whichever runner is ``active``; ``executed_s`` is how long its last step took."""

    def __init__(self, active: ModelRunner) -> None:
        self.active = active
        self.executed_s = 0.0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """By the active runner."""
        before = time.perf_counter()
        result = self.active.execute(output)
        self.executed_s = time.perf_counter() - before
        return result


class Steps:
    """The same step again and again: ``batch`` sequences that compute ``query_len`` tokens each,
    at the end of ``context``. Prompts and KV are made up; a decoding sequence grows by its tokens.
    """

    MAX_TURNS = 16
    MODES = 3

    def __init__(
        self, model: LlamaModel, eager: LlamaModel, batch: int, context: int, query_len: int
    ) -> None:
        self.model, self.batch, self.context, self.query_len = model, batch, context, query_len
        kv_dtype = str(model.dtype).removeprefix("torch.")
        self.layout = kv_layout(model.config, BLOCK_SIZE, kv_dtype)
        num_steps = self.MODES * (self.MAX_TURNS + 1)
        self._num_blocks = blocks_of([context] * batch, num_steps)
        size = self._num_blocks * self.layout.block_bytes() // model.dtype.itemsize
        self._memory = (torch.randn(size, generator=seeded()) * KV_STD).to(model.dtype)
        self.timer = PartTimer()
        kernels = cast(Kernels, TimedKernels(model.kernels, self.timer))
        watched = LlamaModel(model.config, timed_weights(model.weights, self.timer), kernels)
        self._plain = self._runner(TorchModelRunner, model)
        self._timed = self._runner(TimedRunner, watched)
        self._timed.timer = self.timer
        self._eager = self._runner(TorchModelRunner, eager)
        self._switch = SwitchRunner(self._plain)
        self._engine = make_engine(self._switch, self._num_blocks, batch, batch * query_len)
        if query_len == 1:
            add_running(self._engine, [context] * batch, model.config.vocab_size)
        self._num_requests = 0

    def _runner(self, kind: type[AnyRunner], model: LlamaModel) -> AnyRunner:
        tokens = self.batch * self.query_len
        return kind(model, self._memory, self.layout, self._num_blocks, tokens, self.batch)

    def plain(self) -> float:
        """Seconds of a step as it is."""
        self._switch.active = self._plain
        return self._step()

    def parts(self) -> dict[str, float]:
        """Seconds of each part of a step with timers."""
        self._switch.active = self._timed
        self.timer.start()
        with self.timer.within(SCHEDULING):
            self._step()
        return self.timer.seconds

    def eager(self) -> float:
        """Seconds of plain torch's step, without any scheduling."""
        self._switch.active = self._eager
        self._step()
        return self._switch.executed_s

    def _step(self) -> float:
        if self.query_len > 1:
            self._add_prompts()
        before = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - before

    def _add_prompts(self) -> None:
        for _ in range(self.batch):
            self._num_requests += 1
            vocab_size = self.model.config.vocab_size
            spec = spec_of(self._num_requests, self.context, vocab_size, max_tokens=1)
            self._engine.new_sequence(spec, ATTEMPT, Listener())

    def least_seconds(self, roof: Roof) -> float:
        """Of a step: every weight and all KV read once, or every product computed."""
        size, config = ModelSize.of(self.model), self.model.config
        tokens = self.batch * self.query_len
        pairs = self.batch * self.query_len * (self.context - (self.query_len - 1) / 2)
        attention = 4 * pairs * config.num_layers * config.num_heads * config.head_dim
        products = (
            2 * size.num_layer_parameters * tokens + 2 * size.num_head_parameters * self.batch
        )
        kv = self.batch * self.context * self.layout.block_bytes() / self.layout.block_size
        return roof.seconds(size.weight_bytes + kv, products + attention)


def seeded() -> torch.Generator:
    """The same numbers in every run."""
    return torch.Generator().manual_seed(0)


def _row(steps: Steps, roof: Roof, count: int, budget_s: float) -> Json:
    """Plain, timed and eager steps in turns; the first turn is not counted."""
    plain: list[float] = []
    eager: list[float] = []
    parts: list[dict[str, float]] = []
    began = time.perf_counter()
    for turn in range(Steps.MAX_TURNS + 1):
        took, by_torch, shares = steps.plain(), steps.eager(), steps.parts()
        if turn:
            plain.append(took)
            eager.append(by_torch)
            parts.append(shares)
        if turn >= 3 and time.perf_counter() - began > budget_s:
            break
    found_parts = {name: median(part[name] for part in parts) for name in PARTS}
    in_kernels = sum(found_parts[name] for name in KERNELS)
    step_s, eager_s = median(plain), median(eager)
    return {
        "phase": "decode" if steps.query_len == 1 else "prefill",
        "batch": steps.batch,
        "context": steps.context,
        "threads": count,
        "dtype": str(steps.model.dtype).removeprefix("torch."),
        "step_s": dist(plain),
        "parts": found_parts,
        "outside_kernels_fraction": 1 - in_kernels / sum(found_parts.values()),
        "eager_step_s": eager_s,
        "ratio_to_eager": eager_s / step_s,
        "fraction_of_roof": steps.least_seconds(roof) / step_s,
    }
