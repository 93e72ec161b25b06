"""What the doors refuse, counted and logged in one way; tokens and what they guard never are."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.cluster.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

Soon = Callable[[Callable[[], None]], object]


class Refusals:
    """Callable from any thread; counting happens where ``soon`` runs things: the router's loop."""

    def __init__(self, recorder: Recorder, soon: Soon) -> None:
        self._recorder = recorder
        self._soon = soon

    def call(self, what: str, peer: str, error: Exception) -> None:
        """A call was refused: which, from where, and with which error."""
        logger.warning("refused %s from %s: %s: %s", what, peer, type(error).__name__, error)
        self._soon(lambda: self._recorder.rejected(error))

    def connection(self, port: str, reason: str, why: str) -> None:
        """A connection was refused before anything was asked over it."""
        logger.warning("refused a connection to the %s port (%s): %s", port, reason, why)
        self._soon(lambda: self._recorder.connection_refused(port, reason))
