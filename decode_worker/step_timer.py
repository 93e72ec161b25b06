"""How long a decode step takes, smoothed, for the load report."""

from __future__ import annotations


class StepTimer:
    """Attributes: ``step_s``: smoothed seconds of a step that had decoding sequences; None before.

    Mixed steps count, too: they are what a decoding sequence waits for.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self._begun: float | None = None

    def note(self, num_computed: int, begun: float, now: float) -> None:
        """A step has computed so many positions of a sequence; each step counts once."""
        if num_computed == 1 and begun != self._begun:
            self._begun = begun
            took = now - begun
            self.step_s = took if self.step_s is None else 0.9 * self.step_s + 0.1 * took
