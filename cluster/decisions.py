"""Placements as ``kvferry status --decisions`` shows them: names and numbers, no request kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Decision:
    """One placement. ``prefill_worker`` and ``actual_ttft_s`` become known as it runs.

    ``cached_tokens``: of the prompt, found at one of the two workers by what the router knew then.
    """

    request_id: str
    policy: str
    decode_worker: str
    prefill_worker: str | None
    reason: str
    cached_tokens: int
    actual_ttft_s: float | None = None
