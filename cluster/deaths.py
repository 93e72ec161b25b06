"""A declared death: which life of which node, why, and when. Knows not who declares it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.worker.messages import NodeRef


class DeathCause(StrEnum):
    """How a router finds out that a worker is dead."""

    SILENT = "silent"  # no heartbeat for the timeout
    HUNG = "hung"  # in one step for longer than the stall limit
    REPLACED = "replaced"  # its successor has registered
    ENDED = "ended"  # whoever watches its process says so


@dataclass(frozen=True, slots=True)
class Death:
    """``at`` is in seconds of the declaring host's monotonic clock. A life that was ``drained``
    has ended as it was asked to, and has no successor.
    """

    ref: NodeRef
    why: str
    at: float
    drained: bool = False
