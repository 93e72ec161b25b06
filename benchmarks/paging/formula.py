"""What the arithmetic says: bytes of a token, requests that fit, tokens wasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paging.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a model its KV depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values of so many positions: 2 L S H_kv d b."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes
        return per_token * num_tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests that a memory holds at once on average, and tokens reserved for nothing by each."""

    num_requests: float
    wasted_tokens: float


def fit(requests: Sequence[Lengths], memory_tokens: int, block_size: int) -> Fit:
    """Mean over the lives of ``requests``, a step per output token, in blocks of ``block_size``.

    With a block of the longest request allowed this is contiguous reservation.
    """
    steps = blocks = positions = 0
    for request in requests:
        # After step t (from 0) the prompt and t tokens have KV; the token just sampled has none.
        steps += request.num_output
        first, last = request.num_input, request.num_input + request.num_output - 1
        blocks += _blocks_until(last, block_size) - _blocks_until(first - 1, block_size)
        positions += (first + last) * request.num_output // 2
    num_blocks = memory_tokens // block_size
    mean_blocks = blocks / steps
    return Fit(num_blocks / mean_blocks, mean_blocks * block_size - positions / steps)


def exact_fit(requests: Sequence[Lengths], memory_tokens: int) -> Fit:
    """Contiguous reservation by who knows each output's length in advance, without any gap."""
    steps = sum(request.num_output for request in requests)
    held = sum((r.total - 1) * r.num_output for r in requests) / steps
    used = sum((2 * r.num_input + r.num_output - 1) * r.num_output // 2 for r in requests) / steps
    return Fit(memory_tokens / held, held - used)


def _blocks_until(length: int, block_size: int) -> int:
    """The sum of ceil(n / block_size) for n from 1 to ``length``."""
    whole, rest = divmod(length, block_size)
    return block_size * whole * (whole + 1) // 2 + rest * (whole + 1)
