"""Book-keeping of "say what you still want": what an owner's lists omit is let go.

Whoever holds something for another gets the full list of what is still wanted, every period.
What two lists in a row omit is released; a list is silent about what is newer than itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.engine.request import Attempt, RequestId

MISSES_TO_RELEASE = 2


@dataclass(slots=True)
class WantedMark:
    """How long the owner has been silent about one thing.

    Attributes:
        since: number of the message that a list must be newer than to speak of the thing.
        misses: lists in a row that could have named it and did not.
    """

    since: int
    misses: int = 0

    def judge(self, named: bool, speaks_up_to: int) -> bool:
        """Take one list into account; True when the thing is to be released.

        Args:
            named: whether the list names the thing.
            speaks_up_to: number of the newest message that the list knows of.
        """
        if named:
            self.misses = 0
        elif speaks_up_to >= self.since:
            self.misses += 1
        return self.misses >= MISSES_TO_RELEASE


class EndedAttempts:
    """Remembers, bounded, the newest attempt of each request that has ended here.

    A late or doubled message of such an attempt must not begin it again.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._newest: OrderedDict[RequestId, Attempt] = OrderedDict()

    def add(self, request_id: RequestId, attempt: Attempt) -> None:
        """Note that an attempt has ended."""
        self._newest[request_id] = max(attempt, self._newest.get(request_id, attempt))
        self._newest.move_to_end(request_id)
        while len(self._newest) > self._capacity:
            self._newest.popitem(last=False)

    def covers(self, request_id: RequestId, attempt: Attempt) -> bool:
        """Whether this attempt, or a newer one, has ended here."""
        return request_id in self._newest and attempt <= self._newest[request_id]
