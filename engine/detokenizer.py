"""Token ids to text as they come, without ever showing half a character.

The text given out so far, plus ``finish``, equals ``Tokenizer.decode`` of all ids, however the
ids were split; each id costs constant time. Owns the bytes held back; does not know stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.tokenizer import TextRule, Tokenizer, fallback_byte


class _Text(Protocol):
    """Joins tokens under one rule."""

    def feed(self, token_id: int) -> str:
        """Text that is certain after this token."""
        ...

    def finish(self) -> str:
        """The rest."""
        ...


class IncrementalDetokenizer:
    """The growing text of one output."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._text: _Text = (
            _ByteLevelText(tokenizer)
            if tokenizer.text_rule is TextRule.BYTE_LEVEL
            else _ByteFallbackText(tokenizer)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Append ids; returns the new text that no later id can change."""
        feed, hidden = self._text.feed, self._hidden
        return "".join([feed(index) for index in token_ids if index not in hidden])

    def finish(self) -> str:
        """The text held back; bytes that are no character become U+FFFD. Call once, last."""
        return self._text.finish()


class _ByteLevelText:
    """All bytes are one UTF-8 stream; an incomplete character waits for its rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _ByteFallbackText:
    """A run of byte tokens is UTF-8 as a whole, or one U+FFFD per byte: it waits for its end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._strip = tokenizer.strips_leading_space

    def feed(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        byte = fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._stripped(self._end_run() + token.replace("▁", " "))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "�" * len(run)

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
