"""What stands at a position, and under which chain value: the model's own words for tokens.

Shares no code with the product: chain values are computed again, from their definition.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

VOCABULARY = 3


def _digest(person: bytes, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=person).digest()


class Cells:
    """Numbers for "this token after those", so that KV of another beginning is another number.

    Attributes:
        unit: tokens per chain value.
    """

    def __init__(self, model: str, unit: int) -> None:
        self.unit = unit
        self._model = model
        self._numbers: dict[tuple[int, int], int] = {}
        self._origin: dict[int, tuple[int, int, int]] = {}  # cell: the one before, token, length
        self._roots: dict[int, str] = {}
        self._values: dict[int, bytes] = {}

    def root(self, salt: str) -> int:
        """The cell before the first token."""
        number = -1 - ["", "tenant"].index(salt)
        self._roots[number] = salt
        return number

    def after(self, before: int, token: int) -> int:
        """The cell of a token after all those before it."""
        number = self._numbers.setdefault((before, token), len(self._numbers) + 1)
        length = 1 if before < 0 else self._origin[before][2] + 1
        self._origin[number] = (before, token, length)
        return number

    def extend(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The cell of each of ``tokens``."""
        cells, last = [], self.root(salt)
        for token in tokens:
            last = self.after(last, token)
            cells.append(last)
        return cells

    def next_token(self, cell: int) -> int:
        """What the model says after what ends in ``cell``."""
        return (cell * 7 + cell // 5) % VOCABULARY

    def ending_in(self, cell: int, count: int) -> list[int]:
        """The last ``count`` cells up to ``cell``."""
        found = []
        for _ in range(count):
            found.append(cell)
            cell = self._origin[cell][0]
        return found[::-1]

    def value(self, cell: int) -> bytes:
        """The chain value of the tokens that end in ``cell``: little-endian, length first."""
        if cell in self._values:
            return self._values[cell]
        if cell < 0:
            parts = [text.encode() for text in (self._model, self._roots[cell])]
            sized = [struct.pack("<I", len(part)) + part for part in parts]
            value = _digest(b"kvferry-root-1", *sized)
        else:
            before, tokens = cell, []
            for _ in range((self._origin[cell][2] - 1) % self.unit + 1):
                before, token, _ = self._origin[before]
                tokens.append(token)
            packed = struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens[::-1])
            nothing = struct.pack("<I", 0)
            value = _digest(b"kvferry-blk-1", self.value(before), packed, nothing)
        self._values[cell] = value
        return value
