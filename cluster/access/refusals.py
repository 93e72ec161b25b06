"""What the doors refuse, counted and logged in one way; tokens and what they guard never are.

Counts are exact. Lines are cut, and limited for each port and reason, as strangers cause them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

from kvferry.cluster.metrics.recorder import Recorder
from kvferry.kv_cache.errors import one_line
from kvferry.kv_cache.line_limit import LineLimit

logger = logging.getLogger(__name__)

Soon = Callable[[Callable[[], None]], object]
MAX_PART_CHARS = 200  # of each thing that a line quotes, so that none crowds out the others


class Refusals:
    """Callable from any thread; counting happens where ``soon`` runs things: the router's loop."""

    def __init__(
        self, recorder: Recorder, soon: Soon, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder = recorder
        self._soon = soon
        self._lines = LineLimit(clock)

    def call(self, whose: str, what: str, peer: str, error: Exception) -> None:
        """A call was refused: which, from where, and with which error.

        ``whose``: of which door, or of which caller; lines are limited for each by itself.
        """
        kind = type(error).__name__
        self._log((whose, kind), f"refused {_cut(what)} from {_cut(peer)}: {kind}: {_cut(error)}")
        self._soon(lambda: self._recorder.rejected(error))

    def connection(self, port: str, reason: str, peer: str, why: str) -> None:
        """A connection was refused before anything was asked over it."""
        self._log(
            (port, reason),
            f"refused a connection to the {port} port ({reason}) from {_cut(peer)}: {_cut(why)}",
        )
        self._soon(lambda: self._recorder.connection_refused(port, reason))

    def _log(self, kind: Hashable, text: str) -> None:
        line = self._lines.line(kind, text)
        if line is not None:
            logger.warning("%s", line)


def _cut(said: object) -> str:
    return one_line(one_line(str(said), MAX_PART_CHARS), MAX_PART_CHARS)  # what is escaped grows
