"""Progress for people, on standard error; silent where nobody watches.

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
    """A context manager: one live line that shows the latest news.

    Silent if ``quiet`` or if ``stream`` is no terminal. ``on_news`` is called with every piece of
    news and may raise, to end what goes on.
    """

    def __init__(
        self,
        *,
        quiet: bool,
        stream: TextIO | None = None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._on_news = on_news
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
            disable=quiet or not stream.isatty(),
        )
        self._task = self._bar.add_task("", total=None)

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of a stage; a total of 0 is unknown."""
        self._on_news()
        self._bar.update(self._task, description=name, completed=done, total=total or None)

    def say(self, message: str) -> None:
        """News without a count."""
        self._on_news()
        self._bar.update(self._task, description=message, completed=0, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
