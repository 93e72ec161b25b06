"""The router's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Limits; times in seconds.

    ``max_attempts`` counts attempts of one request since decode last delivered a token; a worker
    that has been in one step for ``stall_limit`` counts as dead, however lively its heartbeats.
    ``ageing`` is how much waiting one level of priority is worth; None: requests have none.
    """

    queue_limit: int = 1024
    max_attempts: int = 3
    worker_wait: float = 30.0
    list_period: float = 1.0
    heartbeat: float = 0.5
    heartbeat_timeout: float = 1.5
    stall_limit: float = 30.0
    ageing: float | None = None
