"""Progress for people, on standard error: a live line at a terminal, plain lines elsewhere.

One object takes both kinds of news: stages with counts (download, conversion) and plain messages
(start-up). Knows nothing of models or clusters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressLine:
    """A context manager: one live line with the latest count; messages stay where they were said.

    Silent if ``quiet``. Where ``stream`` is no terminal every message is a line, and so is the
    beginning of every stage; at one the line is drawn ``per_second`` times. ``on_news`` is called
    with every piece of news and may raise, to end what goes on.
    """

    def __init__(
        self,
        *,
        quiet: bool,
        stream: TextIO | None = None,
        on_news: Callable[[], None] = lambda: None,
        per_second: float = 10,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._on_news = on_news
        self._quiet = quiet
        self._is_live = not quiet and stream.isatty()
        self._stage = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream, highlight=False, soft_wrap=True),
            transient=True,
            disable=not self._is_live,
            refresh_per_second=per_second,
        )
        self._task = self._bar.add_task("", total=None)

    def stage(self, name: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` units of a stage; a total of 0 is unknown.

        ``detail`` is what a terminal shows beside the name.
        """
        self._on_news()
        shown = f"{name}, {detail}" if detail else name
        self._bar.update(self._task, description=shown, completed=done, total=total or None)
        if name != self._stage and not self._is_live:
            self._print(f"{name} ...")
        self._stage = name

    def say(self, message: str) -> None:
        """News without a count."""
        self._on_news()
        self._bar.update(self._task, description="", completed=0, total=None)
        self._print(message)

    def _print(self, message: str) -> None:
        if not self._quiet:
            self._bar.console.print(message, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
