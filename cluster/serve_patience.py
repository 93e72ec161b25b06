"""When a cluster that is not ready should be given up. Pure: the clock is an argument.

Supervision brings back what dies, so a while without readiness is no reason to begin anew; only
longer is. Knows neither Ray nor what readiness is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cluster.errors import NotReady


class Patience:
    """Counts from the first look that found the cluster not ready; one that did ends the count.

    Args:
        patience_s: seconds without readiness that are borne.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._unready_since: float | None = None

    def judge(self, reasons: Sequence[str], now: float) -> None:
        """Raise NotReady if there have been ``reasons`` not to be ready for too long.

        Args:
            reasons: why no request could be served now; empty when ready.
            now: seconds, by any clock that does not go back.
        """
        if not reasons:
            self._unready_since = None
            return
        if self._unready_since is None:
            self._unready_since = now
        waited = now - self._unready_since
        if waited >= self._patience_s:
            raise NotReady(f"not ready for {waited:.1f} s: {'; '.join(reasons)}")
