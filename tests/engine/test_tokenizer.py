from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from kvferry.engine.models.errors import DamagedModel, UnsupportedModel
from kvferry.engine.request import InvalidRequest
from kvferry.engine.tokenizer import Tokenizer
from kvferry.engine.weights.store import ModelFolder
from tests.engine.tiny_gguf import SPECIAL, byte_alphabet, vocabulary
from tests.engine.tiny_tokenizers import byte_fallback, byte_level, save

TEXTS = {
    "ascii": "The quick brown fox can't jump; it doesn't want to. (Why?) x = {'a': [1]}",
    "unicode": "naïve café, Straße, 日本語のテキスト, привет мир, 👩‍👩‍👧 🎉, ﷽, ḍ̇",
    "digits": "In 1984, 3.14159 × 2 = 6.28318; call 555-0199, room 7b, v2, 1000000",
    "whitespace": "  two\n\n\nlines\t\ttabs   end  \r\n",
    "chat markup": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><filename>",
    "nothing": "",
    "no-break": "a\u00a0b\u2003c\u200bd\ufeff",
}


@pytest.fixture(scope="module")
def ours(default_model: ModelFolder) -> Tokenizer:
    return Tokenizer(default_model.path)


@pytest.fixture(scope="module")
def smollm_reference(reference_tokenizer: Any) -> FastTokenizer:
    """transformers' vocabulary and merges under the rule that the file names ``smollm``.

    transformers does not read that rule: left alone, it keeps a run of spaces before a digit in
    one piece less the last, where the model was trained with each digit cut off first.
    """
    fast = FastTokenizer.from_str(reference_tokenizer.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    fast.pre_tokenizer = pre_tokenizers.Sequence([digits, fast.pre_tokenizer])
    return fast


@pytest.mark.model
@pytest.mark.parametrize("kind", TEXTS)
def test_ids_equal_those_of_transformers(
    kind: str, ours: Tokenizer, reference_tokenizer: Any
) -> None:
    wanted = reference_tokenizer(TEXTS[kind], add_special_tokens=False).input_ids
    assert ours.encode(TEXTS[kind]) == wanted
    for skip in (True, False):
        text = reference_tokenizer.decode(
            wanted, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert ours.decode(wanted, skip_special_tokens=skip) == text


@pytest.mark.model
def test_every_token_has_the_text_that_transformers_gives_it(
    ours: Tokenizer, reference_tokenizer: Any
) -> None:
    assert ours.vocab_size == len(reference_tokenizer) == 49152
    ids = list(range(ours.vocab_size))
    assert [ours.id_to_token(i) for i in ids] == reference_tokenizer.convert_ids_to_tokens(ids)
    assert ours.special_ids == frozenset(range(17))
    assert ours.eos_token_ids == (reference_tokenizer.eos_token_id,)


@pytest.mark.model
def test_spaces_before_a_digit_follow_the_rule_that_the_file_names(
    ours: Tokenizer, smollm_reference: FastTokenizer
) -> None:
    text = "x =   7\n\n2"
    assert [ours.id_to_token(i) for i in ours.encode(text)] == ["x", "Ġ=", "ĠĠĠ", "7", "ĊĊ", "2"]
    assert ours.encode(text) == smollm_reference.encode(text).ids


@pytest.mark.model
def test_any_text_gives_the_reference_ids_and_comes_back(
    ours: Tokenizer, smollm_reference: FastTokenizer
) -> None:
    tokens = {ours.id_to_token(i) for i in range(ours.vocab_size)}
    # The vocabulary lacks bytes that its training text lacked: such a character has no ids.
    held = {byte for byte, token in enumerate(byte_alphabet()) if token in tokens}

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == smollm_reference.encode(text, add_special_tokens=False).ids
        if held.issuperset(text.encode()):
            assert ours.decode(ids, skip_special_tokens=False) == text

    assert len(held) > 200
    check()


def test_markup_is_one_token_and_nothing_is_prepended(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.encode("<|im_end|>") == [SPECIAL.index("<|im_end|>")]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([2, vocabulary().index("hello"), 2]) == "hello"
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "with ends"])
def test_special_tokens_around_a_text_equal_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    if kind == "byte level":
        ours = byte_level(tmp_path)
    else:
        ours = byte_fallback(tmp_path, strip=True, ends=kind == "with ends")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS.values():
        wanted = reference(text).input_ids
        assert ours.encode(text, add_special_tokens=True) == wanted
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids
        assert (wanted == ours.encode(text)) is (kind == "byte fallback")


def test_a_length_that_training_cut_texts_to_is_not_ours(tmp_path: Path) -> None:
    byte_level(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(2)
    fast.enable_padding(length=8)
    assert len(save(fast, tmp_path).encode("hello hello hello")) == 5


def test_token_bytes_of_both_kinds(tmp_path: Path) -> None:
    level = byte_level(tmp_path / "level")
    assert [level.token_bytes(len(SPECIAL) + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert level.token_bytes(vocabulary().index("Ġw")) == b" w"
    assert level.token_bytes(level.encode("two words")[0]) == b"two words"
    assert level.token_bytes(10**6) == b""
    fallback = byte_fallback(tmp_path / "fallback", strip=True)
    assert [fallback.token_bytes(3 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert fallback.token_bytes(fallback.encode("a")[0]) == b" a"


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.decode([10**6]) == ""


def test_text_with_half_a_surrogate_pair_is_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        byte_level(tmp_path).encode("a\ud83d")


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"model": {"type": "Strange"}}'])
def test_a_missing_or_malformed_file_is_named(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        save(fast, tmp_path)


def test_a_panic_of_the_library_is_an_invalid_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)

    class PanicException(BaseException):
        """As the library's own, which is no Exception."""

    class Panicking:
        def encode_batch_fast(self, *arguments: object, **options: object) -> None:
            raise PanicException("called `Result::unwrap()` on an `Err` value")

    tokenizer._fast = Panicking()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="tokenizer cannot take it"):
        tokenizer.encode("x")
