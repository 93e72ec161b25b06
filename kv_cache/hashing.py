"""Chained block hashes: a block's identity covers everything before it.

    H_i = BLAKE2b-128(H_{i-1} || tokens_i || extra)      H_{-1} covers model revision and salt

Cryptographic on purpose: a collision would serve another tenant's KV. The encoding is canonical
(little-endian int32, length-prefixed strings), so that every process computes the same values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)

_HASH_BYTES = 16


def root_hash(model: str, salt: str = "") -> BlockHash:
    """The value before the first block: covers the model (name and revision) and tenant salt."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES, person=b"kvferry-root-1")
    for part in (model, salt):
        encoded = part.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    return BlockHash(digest.digest())


def block_hash(previous: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """Hash of the block that holds ``token_ids`` after a chain ending in ``previous``.

    ``extra`` is opaque (adapter, multimodal digest). Partial blocks hash too: their token count
    is part of the encoding.
    """
    digest = hashlib.blake2b(previous, digest_size=_HASH_BYTES, person=b"kvferry-blk-1")
    digest.update(struct.pack(f"<I{len(token_ids)}i", len(token_ids), *token_ids))
    digest.update(struct.pack("<I", len(extra)) + extra)
    return BlockHash(digest.digest())


class Mark(NamedTuple):
    """A chain value inside a block: the content of its first ``num_tokens`` slots."""

    value: BlockHash
    num_tokens: int


class HashChain:
    """The chain values of one token sequence, one per match unit, each computed once.

    The identity of a block is the value at its last position, so pools of other block sizes have
    the same chain. Invariant: ``values[i]`` covers the tokens before ``(i + 1) * unit`` as they
    were first shown.

    Args:
        root: the value before the first token.
        block_size: positions per block.
        unit: tokens per value; divides ``block_size``, which it is by default.
        extra: opaque, covered by every value.
    """

    __slots__ = ("_block_size", "_extra", "_root", "unit", "values")

    def __init__(
        self, root: BlockHash, block_size: int, unit: int | None = None, extra: bytes = b""
    ) -> None:
        self._root = root
        self._block_size = block_size
        self._extra = extra
        self.unit = block_size if unit is None else unit
        if self.unit < 1 or block_size % self.unit:
            raise ValueError(f"unit is {unit}, wanted a divisor of the block size {block_size}")
        self.values: list[BlockHash] = []

    def copy(self) -> HashChain:
        """A chain of a sequence that begins alike, with the values computed so far."""
        copied = HashChain(self._root, self._block_size, self.unit, self._extra)
        copied.values = self.values.copy()
        return copied

    def at(
        self, block_index: int, token_ids: Sequence[int], num_tokens: int | None = None
    ) -> BlockHash:
        """Hash of block ``block_index`` of ``token_ids``; partial if the tokens end inside it.

        Args:
            block_index: index of the block in the sequence.
            token_ids: all tokens of the sequence, from position 0, or a prefix of them; may be
                fewer than were shown before.
            num_tokens: look at so many of them only; None for all.
        """
        length = len(token_ids) if num_tokens is None else num_tokens
        start = block_index * self._block_size
        if start >= length:
            raise IndexError(f"block {block_index} starts past the end ({length} tokens)")
        return self.value_at(min(start + self._block_size, length), token_ids)

    def value_at(self, end: int, token_ids: Sequence[int]) -> BlockHash:
        """The chain value of the first ``end`` (at least 1) of ``token_ids``."""
        unit = self.unit
        while len(self.values) < end // unit:
            begin = len(self.values) * unit
            tokens = token_ids[begin : begin + unit]
            self.values.append(block_hash(self._before(len(self.values)), tokens, self._extra))
        whole, rest = divmod(end, unit)
        if not rest:
            return self.values[whole - 1]
        return block_hash(self._before(whole), token_ids[whole * unit : end], self._extra)

    def marks(self, block_index: int, end: int, token_ids: Sequence[int]) -> list[Mark]:
        """Values inside block ``block_index``, filled up to position ``end``: of each unit, and of
        the last position.
        """
        start = block_index * self._block_size
        ends = [*range(start + self.unit, end, self.unit), end]
        return [Mark(self.value_at(at, token_ids), at - start) for at in ends]

    def _before(self, unit_index: int) -> BlockHash:
        return self.values[unit_index - 1] if unit_index else self._root
