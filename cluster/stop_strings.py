"""Stop strings over streamed text, whatever the tokens' borders.

Pure: text goes in as it comes, text that may be shown comes out. What could be the beginning of a
stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the first of several strings in a growing text.

    Invariant: ``_held`` is a proper prefix of some stop string, the longest that the text seen so
    far ends with. With ``include`` the stop string found is shown too.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take more text.

        A stop string counts where it becomes complete: one whose last character comes with
        ``may_stop`` false is text like any other.

        Returns:
            (text that may be shown, the stop string found). Once one is found, what follows it is
            dropped; of several the one that is complete first counts, then the longest.
        """
        known = len(self._held)
        text = self._held + text
        if may_stop and (found := self._first(text, known)) is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, str] | None:
        """End and string of the first match that is complete only behind ``known`` characters."""
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
