from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.detokenizer import IncrementalDetokenizer
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from tests.engine.tiny_gguf import SPECIAL
from tests.engine.tiny_tokenizers import byte_fallback, byte_level

KINDS = ("byte level", "byte fallback", "byte fallback, stripped")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {
        KINDS[0]: byte_level(root / "level"),
        KINDS[1]: byte_fallback(root / "fallback", strip=False),
        KINDS[2]: byte_fallback(root / "stripped", strip=True),
    }


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


def streamed(tokenizer: Tokenizer, parts: Sequence[Sequence[int]], skip: bool) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip)
    return [*(stream.push(part) for part in parts), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(
    ids=st.lists(st.integers(0, 280) | st.integers(257, 270), max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    skip=st.booleans(),
)
def test_any_split_of_any_ids_gives_the_text_of_all(
    kind: str, tokenizers: dict[str, Tokenizer], ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    found = "".join(streamed(tokenizer, pieces(ids, cuts), skip))
    assert found == tokenizer.decode(ids, skip_special_tokens=skip)


@given(
    parts=st.lists(
        st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x8e\x89", b"\xed\xa0", b"a"]),
        max_size=12,
    )
)
def test_broken_utf8_is_replaced_as_in_one_piece(
    parts: list[bytes], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[KINDS[0]]
    ids = [len(SPECIAL) + byte for byte in b"".join(parts)]
    found = "".join(streamed(tokenizer, [[i] for i in ids], True))
    assert found == tokenizer.decode(ids) == b"".join(parts).decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_whole_text_never_shows_half_a_character(
    kind: str, text: str, tokenizers: dict[str, Tokenizer]
) -> None:
    text = text.replace("�", "")
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    shown = streamed(tokenizer, [[i] for i in ids], False)
    assert not any("�" in part for part in shown)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_is_shown_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[KINDS[0]]
    ids = [len(SPECIAL) + byte for byte in "é€🎉".encode()]
    shown = streamed(tokenizer, [[i] for i in ids], True)
    assert shown == ["", "é", "", "", "€", "", "", "", "🎉", ""]


def test_what_is_left_incomplete_is_shown_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    assert streamed(tokenizers[KINDS[0]], [[len(SPECIAL) + 0xE2]], True) == ["", "�"]
    assert streamed(tokenizers[KINDS[1]], [[3 + 0xE2, 3 + 0x82]], True) == ["", "��"]


def test_special_tokens_are_shown_only_when_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[KINDS[0]]
    assert streamed(tokenizer, [[1, 2]], True) == ["", ""]
    assert streamed(tokenizer, [[1, 2]], False) == ["<|im_start|><|im_end|>", ""]


@pytest.mark.model
def test_text_of_the_default_model_streams_exactly(default_model: ModelFolder) -> None:
    tokenizer = Tokenizer(default_model.path)
    text = "Grüße 👩‍👩‍👧, 日本 and  12 cafés\n<|im_end|>"
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, [[i] for i in ids], False)) == text
    every = list(range(tokenizer.vocab_size))
    assert "".join(streamed(tokenizer, [[i] for i in every], True)) == tokenizer.decode(every)
