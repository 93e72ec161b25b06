"""What it costs to get a preempted sequence's KV back: computed again, or copied out and in.

Measured, not configured: seconds per token of the steps that computed prompts, seconds per byte of
the copies out of the pool and back into it, each as a moving average. A price that is not known yet
decides for copying, which measures it. A price that decides against copying is lowered a little
each time, so that copying is tried again some day: one slow copy does not decide for ever.

Pure: durations are passed in.
"""

from __future__ import annotations

from typing import Protocol

WEIGHT = 0.2  # of a new measurement
FORGIVEN = 0.02  # of the price of copying, with every decision against it


class Costs(Protocol):
    """Decides, and learns from what was measured."""

    def prefers_offload(self, num_tokens: int, bytes_out: int, bytes_in: int) -> bool:
        """Whether copying so many bytes out and in costs less than computing the tokens again."""
        ...

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of a prompt's tokens took so long."""
        ...

    def offloaded(self, num_bytes: int, seconds: float) -> None:
        """Copying out of the pool took so long."""
        ...

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Copying into the pool took so long."""
        ...


class MeasuredCosts:
    """See the module.

    Attributes:
        compute_s_per_token, offload_s_per_byte, restore_s_per_byte: the averages; None: unknown.
    """

    def __init__(self) -> None:
        self.compute_s_per_token: float | None = None
        self.offload_s_per_byte: float | None = None
        self.restore_s_per_byte: float | None = None

    def prefers_offload(self, num_tokens: int, bytes_out: int, bytes_in: int) -> bool:
        """Whether copying so many bytes out and in costs less than computing the tokens again."""
        if (
            self.compute_s_per_token is None
            or self.offload_s_per_byte is None
            or self.restore_s_per_byte is None
        ):
            return True
        copying = self.offload_s_per_byte * bytes_out + self.restore_s_per_byte * bytes_in
        if copying <= self.compute_s_per_token * num_tokens:
            return True
        self.offload_s_per_byte *= 1 - FORGIVEN
        self.restore_s_per_byte *= 1 - FORGIVEN
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of a prompt's tokens took so long."""
        self.compute_s_per_token = _average(self.compute_s_per_token, num_tokens, seconds)

    def offloaded(self, num_bytes: int, seconds: float) -> None:
        """Copying out of the pool took so long."""
        self.offload_s_per_byte = _average(self.offload_s_per_byte, num_bytes, seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Copying into the pool took so long."""
        self.restore_s_per_byte = _average(self.restore_s_per_byte, num_bytes, seconds)


def _average(before: float | None, amount: int, seconds: float) -> float | None:
    if amount < 1 or seconds <= 0:
        return before
    price = seconds / amount
    return price if before is None else (1 - WEIGHT) * before + WEIGHT * price
