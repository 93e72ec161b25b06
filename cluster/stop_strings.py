"""Stop strings over streamed text, whatever the tokens' borders.

Pure: text goes in as it comes, text that may be shown comes out. What could be the beginning of a
stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the first of several strings in a growing text.

    Invariant: ``_held`` is a proper prefix of some stop string, the longest that the text seen so
    far ends with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            (text that may be shown, the stop string found). Once one is found, what follows it is
            dropped; of several the one that is complete first counts, then the longest.
        """
        text = self._held + text
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if ends:
            end, _, stop = min(ends)
            self._held = ""
            return text[: end - len(stop)], stop
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
