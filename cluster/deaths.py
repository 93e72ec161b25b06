"""A declared death: which life of which node, why, and when. Knows not who declares it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.worker.messages import NodeRef


@dataclass(frozen=True, slots=True)
class Death:
    """``at`` is in seconds of the declaring host's monotonic clock."""

    ref: NodeRef
    why: str
    at: float
