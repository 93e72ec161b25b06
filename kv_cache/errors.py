"""The root of the project's errors.

Each class stands beside its cause, in its own room; the whole tree is drawn in
``kvferry.cluster.errors``, which maps it to gRPC and HTTP statuses.
"""

from __future__ import annotations

from typing import ClassVar

MAX_MESSAGE_CHARS = 2000


class KVFerryError(Exception):
    """Base of every error that KVFerry raises on purpose.

    The message names the value it got, the value it wanted, and what to do. It is one line, as a
    terminal or a log may show it, whatever the values are that it quotes.
    """

    is_one_line: ClassVar[bool] = True  # False: each of its lines is

    def __init__(self, message: str = "") -> None:
        lines = [message] if self.is_one_line else message.split("\n")
        super().__init__("\n".join(map(one_line, lines)))


def one_line(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """A text without control characters; what is longer than ``max_chars`` is cut."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)
