"""Tokenizers out of GGUF files give the ids that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.tokenizer import TextRule, Tokenizer
from kvferry.engine.weights.convert import convert_gguf
from kvferry.engine.weights.files import no_progress
from tests.engine.tiny_gguf import sentencepiece_vocabulary, write_tiny_gguf

TEXTS = (
    "The weather in a town",
    "  two and    four\n\nlines\t.",
    "naïve café 日本語 👩‍👩‍👧",
    "<s>the</s> <tool>the<unk>",
    "",
    " ",
    "thethethe anan",
)
ADDS = {
    (None, None): {},
    (False, None): {"tokenizer.ggml.add_bos_token": False},
    (True, True): {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
    (False, True): {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
}


def converted(folder: Path, **how: Any) -> Tokenizer:
    """The tokenizer of the tiny model, converted; ``folder`` keeps the file beside it."""
    write_tiny_gguf(folder / "m.gguf", **how)
    (folder / "out").mkdir()
    convert_gguf(folder / "m.gguf", folder / "out", "m", {"gguf_sha256": "0" * 64}, no_progress)
    return Tokenizer(folder / "out")


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("sentencepiece", [True, False])
def test_ids_equal_those_of_transformers_with_and_without_special_tokens(
    sentencepiece: bool, adds: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    ours = converted(tmp_path, sentencepiece=sentencepiece, extra=ADDS[adds])
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    written = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == written(text, add_special_tokens=add).input_ids, text
            if sentencepiece or "  " not in text:  # it does not read the rule ``smollm``
                assert ids == read(text, add_special_tokens=add).input_ids, text
    begin, end = ours.encode("the", True)[0], ours.encode("the", True)[-1]
    assert (begin == 1) is (sentencepiece if adds[0] is None else adds[0])
    assert (end == 2) is bool(adds[1])


def test_sentencepiece_texts_come_back(tmp_path: Path) -> None:
    ours = converted(tmp_path, sentencepiece=True)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert (ours.text_rule, ours.strips_leading_space) == (TextRule.BYTE_FALLBACK, True)
    tokens = [token for token, _, _ in sentencepiece_vocabulary()]
    assert [tokens[i] for i in ours.encode("the thing")] == ["▁the", "▁t", "h", "ing"]
    assert ours.special_ids == {0, 1, 2}

    @settings(deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == read(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == read.decode(ids)
        if not text.startswith(" "):  # one space before the text is not told from none
            assert ours.decode(ids) == text

    check()


def test_a_vocabulary_without_the_space_before_a_text(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_space_prefix": False}
    ours = converted(tmp_path, sentencepiece=True, extra=extra)
    tokens = [token for token, _, _ in sentencepiece_vocabulary()]
    assert [tokens[i] for i in ours.encode("the the")] == ["t", "he", "▁the"]
    assert not ours.strips_leading_space
    assert ours.decode(ours.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("extra", "error", "named"),
    [
        ({"tokenizer.ggml.add_bos_token": 1}, DamagedModel, "add_bos_token"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, DamagedModel, "unknown"),
        ({"tokenizer.ggml.scores": 1.0}, DamagedModel, "scores"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "SentencePiece BPE"),
    ],
)
def test_what_does_not_fit_is_named(
    extra: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", sentencepiece=True, extra=extra)
    (tmp_path / "out").mkdir()
    with pytest.raises(error, match=named):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "m", {"gguf_sha256": "0"}, no_progress)
    assert list((tmp_path / "out").iterdir()) == []
