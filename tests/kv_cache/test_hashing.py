"""Block hashes: the same in every process, and equal exactly where everything before is equal."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_cache.hashing import BlockHash, HashChain, block_hash, root_hash

MODEL = "smollm2-135m-instruct@1"
GOLDEN = {
    "root": "3c476d1f2b680db889ea47fe6ce7a4d3",
    "salted root": "b8965be87abf6e437aa5976f19ff7378",
    "first block": "e1f236cac3268fcfe573361fcd1577d8",
    "second block": "98c30e0d839ccc176ec5b1744988260a",
    "partial block": "c2cc040f79a9815d77f5e91f6fc94b4f",
    "adapter": "5b1aa11634f96ce84b56b6a0dc799306",
}
COMPUTE = """
from kvferry.kv_cache.hashing import block_hash, root_hash
root = root_hash("smollm2-135m-instruct@1")
print("root", root.hex(), sep=":")
print("salted root", root_hash("smollm2-135m-instruct@1", "tenant-a").hex(), sep=":")
first = block_hash(root, [1, 2, 3, 4])
print("first block", first.hex(), sep=":")
print("second block", block_hash(first, (5, 6, 49151, 0)).hex(), sep=":")
print("partial block", block_hash(first, [5, 6]).hex(), sep=":")
print("adapter", block_hash(first, [5, 6], b"adapter-7").hex(), sep=":")
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_other_processes_compute_the_golden_values(hash_seed: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", COMPUTE],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert dict(line.split(":") for line in printed.splitlines()) == GOLDEN


def test_the_golden_values_follow_from_the_documented_encoding() -> None:
    """Written out by hand: lengths and ids as four bytes, little-endian."""

    def number(value: int) -> bytes:
        return value.to_bytes(4, "little", signed=True)

    def blake(data: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, person=person).digest()

    name = MODEL.encode()
    root = blake(number(len(name)) + name + number(0), b"kvferry-root-1")
    assert root.hex() == GOLDEN["root"]
    ids = b"".join(number(i) for i in (1, 2, 3, 4))
    first = blake(root + number(4) + ids + number(0), b"kvferry-blk-1")
    assert first.hex() == GOLDEN["first block"]


def test_model_and_salt_are_in_the_root_and_cannot_run_into_each_other() -> None:
    named = ["m@1", "m@2", "m@1a", "m@"]
    roots = [root_hash(model, salt) for model in named for salt in ("", "a", "1", "@1")]
    roots.append(root_hash("", "m@1"))
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {16}


@given(st.text(), st.text(), st.text(), st.text())
def test_two_roots_are_equal_only_for_the_same_model_and_salt(
    model: str, salt: str, other_model: str, other_salt: str
) -> None:
    same = (model, salt) == (other_model, other_salt)
    assert (root_hash(model, salt) == root_hash(other_model, other_salt)) == same


def test_a_partial_block_has_a_hash_of_its_own() -> None:
    root = root_hash(MODEL)
    tokens = [[], [0], [0, 0], [0, 0, 0], [256], [1], [-1], [1 << 24]]
    hashes = [block_hash(root, ids, extra) for ids in tokens for extra in (b"", b"\0", bytes(4))]
    for one, other in combinations(hashes, 2):
        assert one != other


def test_every_position_of_the_chain_depends_on_root_and_extra() -> None:
    one, other = root_hash(MODEL), root_hash(MODEL, "salt")
    for _ in range(3):
        assert block_hash(one, [1, 2], b"x") != block_hash(one, [1, 2])
        one, other = block_hash(one, [1, 2]), block_hash(other, [1, 2])
        assert one != other


def by_hand(root: BlockHash, tokens: list[int], size: int) -> list[bytes]:
    """Hash of every block of ``tokens``, the partial one last."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens), size):
        hashes.append(block_hash(BlockHash(([root, *hashes])[-1]), tokens[start : start + size]))
    return hashes


few_tokens = st.lists(st.integers(0, 1), max_size=9)


@given(few_tokens, few_tokens, st.integers(1, 4))
def test_two_blocks_are_equal_exactly_when_everything_up_to_their_end_is(
    one: list[int], other: list[int], size: int
) -> None:
    root = root_hash(MODEL)
    first, second = by_hand(root, one, size), by_hand(root, other, size)
    for i, hash_one in enumerate(first):
        for j, hash_other in enumerate(second):
            same = i == j and one[: (i + 1) * size] == other[: (j + 1) * size]
            assert (hash_one == hash_other) == same


@given(few_tokens, st.integers(1, 4), st.data())
def test_a_chain_gives_each_block_its_hash_in_whatever_order_it_is_asked(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    root = root_hash(MODEL)
    chain = HashChain(root, size)
    wanted = by_hand(root, tokens, size)
    for index in data.draw(st.permutations(range(len(wanted)))):
        assert chain.at(index, tokens) == wanted[index]
    assert chain.values == wanted[: len(tokens) // size]


@given(few_tokens, st.integers(1, 4), st.data())
def test_a_chain_that_has_seen_more_tokens_answers_for_those_it_is_shown(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    root = root_hash(MODEL)
    chain = HashChain(root, size)
    for length in data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)):
        shown = tokens[:length]
        assert [chain.at(i, shown) for i in range(-(-length // size))] == by_hand(root, shown, size)


def test_a_block_past_the_end_has_no_hash() -> None:
    chain = HashChain(root_hash(MODEL), 4)
    chain.at(0, range(8))
    for length, index in [(8, 2), (7, 2), (4, 1), (0, 0)]:
        with pytest.raises(IndexError, match=rf"block {index} starts past the end \({length}"):
            chain.at(index, range(length))
