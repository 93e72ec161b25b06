"""A declared death: which life of which node, why, and when. Knows not who declares it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.worker.messages import NodeRef


@dataclass(frozen=True, slots=True)
class Death:
    """``at`` is in seconds of the declaring host's monotonic clock. A life that was ``drained``
    has ended as it was asked to, and has no successor.
    """

    ref: NodeRef
    why: str
    at: float
    drained: bool = False
