"""How often the log may say the same thing, so that nobody from outside fills it.

Stands on the lowest floor because every port needs it. Pure: the clock is passed in. Knows no
logger; what is counted elsewhere stays exact, only lines are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvferry.kv_cache.errors import one_line

BURST = 100
PER_S = 1.0
MAX_LINE_CHARS = 800


@dataclass(slots=True)
class _Bucket:
    """``level``: lines that may be said now; ``left_out``: since the last one that was."""

    level: float
    at: float
    left_out: int = 0


class LineLimit:
    """A token bucket for each kind of line: ``burst`` lines at once, then ``per_s`` each second.

    The next line that is let through says how many before it were not. Kinds are kept for ever: let
    there be few of them, and none that strangers choose. May be called from any thread.
    """

    def __init__(
        self, clock: Callable[[], float], burst: int = BURST, per_s: float = PER_S
    ) -> None:
        """``clock``: seconds that do not go back."""
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._buckets: dict[Hashable, _Bucket] = {}
        self._lock = threading.Lock()

    def line(self, kind: Hashable, text: str) -> str | None:
        """What to log, in one line, of MAX_LINE_CHARS characters at most; None: nothing now."""
        with self._lock:
            now = self._clock()
            bucket = self._buckets.setdefault(kind, _Bucket(self._burst, now))
            gained = max(0.0, now - bucket.at) * self._per_s
            bucket.level, bucket.at = min(self._burst, bucket.level + gained), now
            if bucket.level < 1:
                bucket.left_out += 1
                return None
            bucket.level -= 1
            left_out, bucket.left_out = bucket.left_out, 0
        said = one_line(one_line(text, MAX_LINE_CHARS), MAX_LINE_CHARS)  # what is escaped grows
        return f"{said} ({left_out} more were not logged)" if left_out else said
