"""Which experiments there are: a target, a fault, and the state of the request that it meets.

Pure; knows neither processes nor clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kvferry.kv_cache.errors import KVFerryError

TARGETS = ("prefill", "decode", "router", "client")
FAULTS = ("kill", "stop")
STATES = ("queued", "prefilling", "transferring", "handed_off", "decoding")


class UnknownCells(KVFerryError):
    """A pattern names no cell."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment. ``kill`` is SIGKILL, ``stop`` SIGSTOP."""

    target: str
    fault: str
    state: str

    @property
    def name(self) -> str:
        """TARGET/FAULT/STATE."""
        return f"{self.target}/{self.fault}/{self.state}"

    @property
    def place(self) -> tuple[int, int, int]:
        """Its place in a table."""
        return TARGETS.index(self.target), FAULTS.index(self.fault), STATES.index(self.state)


# Neighbours have different targets, so that no worker is ended twice in a row and has to wait out
# the supervision's growing pauses.
CELLS = tuple(
    Cell(target, fault, state) for state in STATES for fault in FAULTS for target in TARGETS
)


def select(patterns: Sequence[str]) -> tuple[Cell, ...]:
    """The cells that match any pattern (shell style, of TARGET/FAULT/STATE); all of none.

    Raises UnknownCells, naming the pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in CELLS):
            raise UnknownCells(
                f"no cell matches {pattern!r}; wanted TARGET/FAULT/STATE with a target of "
                f"{', '.join(TARGETS)}, a fault of {', '.join(FAULTS)} and a state of "
                f"{', '.join(STATES)}; * stands for any"
            )
    chosen = patterns or ["*"]
    return tuple(cell for cell in CELLS if any(fnmatchcase(cell.name, p) for p in chosen))
