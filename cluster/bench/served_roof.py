"""The output that memory and arithmetic allow a served closed loop: pure, from measured constants.

A prompt costs the products of its matrices, at the measured rate of a float32 product; a decode
step reads every weight and the KV of its batch once, at the measured bandwidth. Nothing else is
counted: no attention, no activations, no words between processes. Workers of one kind share the
cores that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvferry.engine.models.size import ModelSize

STEADY = 0.15
"""How much a machine's readings may differ before a run says that it was disturbed."""


@dataclass(frozen=True, slots=True)
class Cores:
    """How many workers of a kind, and their threads together."""

    workers: int
    threads: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Prefill and decode apart, or together: the other fields are None then."""

    prefill: Cores | None = None
    decode: Cores | None = None
    colocated: Cores | None = None

    @property
    def gemm_threads(self) -> int:
        """Threads that compute prompts."""
        cores = self.colocated or self.prefill
        assert cores is not None
        return cores.threads

    @property
    def read_threads(self) -> int:
        """Threads that read weights and KV."""
        cores = self.colocated or self.decode
        assert cores is not None
        return cores.threads

    @classmethod
    def of(cls, workers: Sequence[tuple[str, int]]) -> Arrangement | None:
        """From each worker's role and threads; None for a mixture, of which nothing is said."""
        kinds = {
            role: Cores(len(threads), sum(threads))
            for role in ("prefill", "decode", "colocated")
            if (threads := [count for name, count in workers if name == role])
        }
        if set(kinds) in ({"prefill", "decode"}, {"colocated"}):
            return cls(**kinds)
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the machine did at one moment, with as many threads as the arrangement has.

    Attributes:
        gemm_flops: of a float32 product of 512 rows, by the threads that compute prompts.
        read_bytes_per_s: by the threads that decode.
    """

    gemm_flops: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: lengths in tokens, and requests in flight."""

    input_tokens: int
    output_tokens: int
    concurrency: int


def typical(readings: Sequence[Reading]) -> Reading:
    """The medians."""
    return Reading(
        median(reading.gemm_flops for reading in readings),
        median(reading.read_bytes_per_s for reading in readings),
    )


def spread(readings: Sequence[Reading]) -> float:
    """How far the readings lie apart: the largest over the smallest, less 1; the worse of both."""
    gemms, reads = [r.gemm_flops for r in readings], [r.read_bytes_per_s for r in readings]
    return max(max(values) / min(values) - 1 for values in (gemms, reads))


def output_tokens_per_s(
    load: Load, size: ModelSize, kv_bytes_per_token: float, arrangement: Arrangement, can: Reading
) -> float:
    """The roof. A decoding request holds its prompt and half of its output, on average."""
    prompt_s = size.prompt_flops(load.input_tokens) / can.gemm_flops
    held = load.input_tokens + load.output_tokens / 2
    kv_bytes = load.concurrency * held * kv_bytes_per_token
    decoding = arrangement.colocated or arrangement.decode
    assert decoding is not None
    # Each worker reads its own weights for its share of the batch, with its share of the memory.
    step_s = (decoding.workers * size.weight_bytes + kv_bytes) / can.read_bytes_per_s
    if arrangement.colocated:
        steps = load.output_tokens / load.concurrency  # those that one request accounts for
        return load.output_tokens / (prompt_s + steps * step_s)
    return min(load.output_tokens / prompt_s, load.concurrency / step_s)
