"""Builds ``tokenizer.json`` from the vocabulary and merges that a GGUF file carries.

Owns the splitting rules that GGUF only names (``tokenizer.ggml.pre``). Byte-level BPE only;
SentencePiece vocabularies are refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.engine.models.config import DamagedModel, UnsupportedModel
from kvferry.engine.weights.gguf_reader import GGUFModel

_CONTROL = 3
_USER_DEFINED = 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "qwen2": _WORDS.format(digits=r"\p{N}"),
    "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"),
}


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """The file's tokenizer. Raises UnsupportedModel or DamagedModel."""
    kind = model.file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{model.path}: tokenizer of kind {kind!r}, wanted 'gpt2' (byte-level BPE)"
        )
    tokens = _strings(model, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DamagedModel(f"{model.path}: the vocabulary has {len(tokens) - len(vocab)} doubles")
    rule = model.file.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(model, vocab),
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(model, rule)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, model, tokens)
    return tokenizer


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``: special tokens and the chat template."""
    tokens = _strings(model, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(model.file.metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, role in roles.items():
        index = model.token_id(role)
        if index is not None:
            if not 0 <= index < len(tokens):
                raise DamagedModel(f"{model.path}: {role} token id {index} of {len(tokens)}")
            config[f"{name}_token"] = tokens[index]
    if model.chat_template is not None:
        config["chat_template"] = model.chat_template
    return config


def _pre_tokenizer(model: GGUFModel, rule: Any) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in ("default", "gpt-2"):
        return whole
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if rule in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[rule]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UnsupportedModel(
        f"{model.path}: splitting rule {rule!r}; supported: default, gpt-2, smollm, "
        f"{', '.join(_SPLITS)}"
    )


def _add_special_tokens(tokenizer: Tokenizer, model: GGUFModel, tokens: list[str]) -> None:
    kinds = model.file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise DamagedModel(f"{model.path}: tokenizer.ggml.token_type does not fit the vocabulary")
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _merges(model: GGUFModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _strings(model, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise DamagedModel(f"{model.path}: merge {line!r} is not made of vocabulary entries")
        merges.append((left, right))
    return merges


def _strings(model: GGUFModel, key: str) -> list[str]:
    value = model.file.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DamagedModel(f"{model.path}: {key} is missing or not a list of strings")
    return value
