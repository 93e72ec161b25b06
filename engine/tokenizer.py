"""Text to token ids and back, for a folder in Hugging Face layout.

Owns the vocabulary and what each token's text is in bytes. Does not know chat markup
(``engine.chat``) or streams (``engine.detokenizer``); imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from kvferry.engine.models.checkpoint import MAX_TOKENIZER_BYTES, read_text
from kvferry.engine.models.config import read_eos_token_ids
from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.request import InvalidRequest

TOKENIZER_FILE = "tokenizer.json"

_FALLBACK_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextRule(Enum):
    """How a sequence of tokens becomes text."""

    BYTE_LEVEL = "byte_level"  # each character of a token is one byte; UTF-8 over all of them
    BYTE_FALLBACK = "byte_fallback"  # SentencePiece: ``▁`` is a space, ``<0xAB>`` one byte


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, folder: str | Path) -> None:
        """Raises DamagedModel for a missing or malformed file, UnsupportedModel for its kind."""
        path = Path(folder) / TOKENIZER_FILE
        self._fast = _load(path, read_text(path, MAX_TOKENIZER_BYTES))
        self.text_rule, self.strips_leading_space = _text_rule(path, self._fast.decoder)
        self.eos_token_ids = read_eos_token_ids(Path(folder))
        self.special_ids = frozenset(
            index for index, token in self._fast.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text; the model's matrices may have more rows."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; markup of special tokens is recognised.

        ``add_special_tokens`` adds what the model wants around a text, such as the token that
        begins a document: right for raw text, wrong for chat, whose template writes it. Raises
        InvalidRequest for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text: not valid Unicode ({error}); send whole UTF-8") from error
        try:
            # A batch, because only that leaves Python's lock to other threads meanwhile.
            (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic of the library is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(
                f"text: the model's tokenizer cannot take it ({error}); send another text"
            ) from error
        ids: list[int] = encoded.ids
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for an id without text."""
        token: str | None = self._fast.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for an id without text."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self.text_rule is TextRule.BYTE_LEVEL:
            return byte_level_bytes(token)
        byte = fallback_byte(token)
        return token.replace("▁", " ").encode() if byte is None else bytes([byte])


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(rest)
    }


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet is UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte that a ``<0xAB>`` token stands for, else None."""
    match = _FALLBACK_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def _load(path: Path, text: str) -> FastTokenizer:
    try:
        fast = FastTokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics beside it
        raise DamagedModel(f"{path}: not a tokenizer ({str(error)[:200]})") from error
    fast.no_truncation()  # settings of a training run, not of the text
    fast.no_padding()
    return fast


_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_FALLBACK = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _text_rule(path: Path, decoder: Any) -> tuple[TextRule, bool]:
    """The decoder's rule, and whether it takes one space off the beginning of the text."""
    if decoder is not None:
        decoder = json.loads(decoder.__getstate__())  # as tokenizer.json writes it
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind == "ByteLevel":
        return TextRule.BYTE_LEVEL, False
    steps = decoder.get("decoders") if kind == "Sequence" else None
    if steps == _FALLBACK:
        return TextRule.BYTE_FALLBACK, False
    if steps == [*_FALLBACK, _STRIP]:
        return TextRule.BYTE_FALLBACK, True
    raise UnsupportedModel(
        f"{path}: decoder {kind!r} is not supported; wanted ByteLevel, or SentencePiece's "
        "Replace, ByteFallback, Fuse (and Strip)"
    )
