"""Chained block hashes: a block's identity covers everything before it.

    H_i = BLAKE2b-128(H_{i-1} || tokens_i || extra)      H_{-1} covers model revision and salt

Cryptographic on purpose: a collision would serve another tenant's KV. The encoding is canonical
(little-endian int32, length-prefixed strings), so that every process computes the same values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

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


class HashChain:
    """The block hashes of one token sequence, computed once per full block.

    Invariant: ``full[i]`` is the hash of block ``i`` over the tokens first shown for it.
    """

    __slots__ = ("_block_size", "_root", "full")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self.full: list[BlockHash] = []

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
        size = self._block_size
        length = len(token_ids) if num_tokens is None else num_tokens
        num_full = length // size
        while len(self.full) < min(block_index + 1, num_full):
            start = len(self.full) * size
            previous = self._before(len(self.full))
            self.full.append(block_hash(previous, token_ids[start : start + size]))
        if block_index < num_full:
            return self.full[block_index]
        if block_index * size >= length:
            raise IndexError(f"block {block_index} starts past the end ({length} tokens)")
        return block_hash(self._before(block_index), token_ids[block_index * size : length])

    def _before(self, block_index: int) -> BlockHash:
        return self.full[block_index - 1] if block_index else self._root
