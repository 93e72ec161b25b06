"""Where the time of a step goes: timers around the calls of one model, and of no other.

Every moment counts for one part: a call inside another one stops the outer part's clock. What is
measured so is slower by the timers; steps are timed without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvferry.engine.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from kvferry.engine.model_runner import TorchModelRunner
from kvferry.engine.models.linear import Linear
from kvferry.engine.models.llama import LlamaWeights

LINEARS, ATTENTION, OTHER_KERNELS = "linears_s", "attention_s", "other_kernels_s"
SAMPLING, SCHEDULING, OTHER = "sampling_s", "scheduling_s", "other_s"
KERNELS = (LINEARS, ATTENTION, OTHER_KERNELS)
PARTS = (*KERNELS, SAMPLING, SCHEDULING, OTHER)


class PartTimer:
    """Seconds per part since ``start``; ``within`` nests."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._since = 0.0
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def start(self) -> None:
        """Forget what was measured."""
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Time counts for ``part``, but not while another part is inside."""
        self._turn()
        self._running.append(part)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed as ``part``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._running.pop()

        return timed

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


class TimedKernels:
    """A kernel family whose functions are timed."""

    def __init__(self, kernels: Any, timer: PartTimer) -> None:
        for name in dir(kernels):
            function = getattr(kernels, name)
            if not name.startswith("_") and callable(function) and not isinstance(function, type):
                setattr(self, name, timer.wrap(_part_of(name), function))


def _part_of(name: str) -> str:
    return ATTENTION if "attention" in name else OTHER_KERNELS


class TimedLinear:
    """A model's matrix whose products are timed."""

    def __init__(self, linear: Linear, timer: PartTimer) -> None:
        self._call = timer.wrap(LINEARS, linear)
        self.tensors = linear.tensors

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        product: torch.Tensor = self._call(x, out_dtype)
        return product


def timed_weights(weights: LlamaWeights, timer: PartTimer) -> LlamaWeights:
    """The same weights, whose products are timed."""
    layers = tuple(
        replace(
            layer,
            qkv=TimedLinear(layer.qkv, timer),
            output=TimedLinear(layer.output, timer),
            gate_up=TimedLinear(layer.gate_up, timer),
            down=TimedLinear(layer.down, timer),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=TimedLinear(weights.head, timer))


class TimedRunner(TorchModelRunner):
    """A runner that counts its sampling and the rest of its work apart."""

    timer: PartTimer

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See ``TorchModelRunner``."""
        with self.timer.within(OTHER):
            return super().execute(output)

    def _sample(self, sequences: Sequence[ScheduledSequence], hidden: torch.Tensor) -> RunnerOutput:
        with self.timer.within(SAMPLING):
            return super()._sample(sequences, hidden)
